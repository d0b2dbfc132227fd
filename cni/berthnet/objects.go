package berthnet

import (
	"berth/cni/berthnet/addresses"
	"berth/cni/berthnet/conf"
	"berth/cni/berthnet/links"
	"berth/cni/berthnet/rules"
)

// Reservation is an attachment's reservation and its file.
type Reservation struct {
	addresses.Reservation
	File string
}

// Reservations returns the reservations of a network.
func Reservations(n *conf.Net) (all []Reservation, err error) {
	store := addresses.Inspect(n.Dir())
	found, err := store.All()
	for _, r := range found {
		all = append(all, Reservation{r, store.Path(r)})
	}
	return all, err
}

// Object is a network device or host port of a container. ContainerID is empty for a host port
// whose pod address is not reserved.
type Object struct{ ContainerID, Description string }

// Objects returns the bridge ports and host ports of a network's attachments.
func Objects(n *conf.Net) (all []Object, err error) {
	ports, err := links.Ports(n.Key())
	if err != nil {
		return nil, err
	}
	for _, p := range ports {
		all = append(all, Object{p.ContainerID, "the bridge's port " + p.Name})
	}
	filter := &rules.Filter{}
	defer filter.Close()
	open, err := filter.Ports(n.Key())
	if err != nil {
		return nil, err
	}
	reserved, err := addresses.Inspect(n.Dir()).All()
	if err != nil {
		return nil, err
	}
	for _, p := range open {
		object := Object{Description: p.String() + " for " + p.Pod.String()}
		for _, r := range reserved {
			for _, ip := range r.IPs {
				if ip == p.Pod {
					object.ContainerID = r.ContainerID
				}
			}
		}
		all = append(all, object)
	}
	return all, nil
}
