package berthnet

import (
	"berth/cni/berthnet/addresses"
	"berth/cni/berthnet/conf"
	"berth/cni/berthnet/links"
	"berth/cni/berthnet/rules"
)

// Kept is what is reserved for an attachment, in a file.
type Kept struct {
	addresses.Reservation
	File string
}

// Reservations reads what a network keeps for attachments.
func Reservations(n *conf.Net) (all []Kept, err error) {
	store := addresses.Inspect(n.Dir())
	found, err := store.All()
	for _, r := range found {
		all = append(all, Kept{r, store.Path(r)})
	}
	return all, err
}

// Trace is something that was made for a container on the node.
type Trace struct{ ContainerID, What string }

// Traces returns what there is of a network's attachments on the node: ports of the bridge and host ports. Of a host port whose address nobody
// has, the container is not known.
func Traces(n *conf.Net) (all []Trace, err error) {
	ports, err := links.Ports(n.Key())
	if err != nil {
		return nil, err
	}
	for _, p := range ports {
		all = append(all, Trace{p.ContainerID, "the bridge's port " + p.Name})
	}
	filter := &rules.Filter{}
	defer filter.Close()
	open, err := filter.Ports(n.Key())
	if err != nil {
		return nil, err
	}
	kept, err := addresses.Inspect(n.Dir()).All()
	if err != nil {
		return nil, err
	}
	for _, p := range open {
		trace := Trace{What: p.String() + " for " + p.Pod.String()}
		for _, r := range kept {
			for _, ip := range r.IPs {
				if ip == p.Pod {
					trace.ContainerID = r.ContainerID
				}
			}
		}
		all = append(all, trace)
	}
	return all, nil
}
