package node

import (
	"berth/cmd/node/hostlocal"
	"berth/cni"
	"berth/cni/berthnet"
	"berth/cni/berthnet/conf"
)

// Readers returns readers for the plugins whose state on the node berth can inspect.
func Readers() cni.Readers {
	return cni.Readers{
		Plugins: map[string]cni.PluginReader{berthnet.Type: reader{}},
		IPAMs:   []cni.IPAMReader{hostlocal.Reader{}},
	}
}

// reader adapts berthnet, which does not import package cni, because the program berth-net must
// stay small.
type reader struct{}

func (reader) Reservations(data []byte) (all []cni.Reservation, err error) {
	n, err := conf.ParseNames(data)
	if err != nil {
		return nil, nil
	}
	found, err := berthnet.Reservations(n)
	for _, r := range found {
		for _, ip := range r.IPs {
			all = append(all, cni.Reservation{File: r.File, IP: ip.String(), PodID: r.ContainerID})
		}
	}
	return all, err
}

func (reader) Objects(data []byte) (all []cni.Object, err error) {
	n, err := conf.ParseNames(data)
	if err != nil {
		return nil, nil
	}
	found, err := berthnet.Objects(n)
	for _, o := range found {
		all = append(all, cni.Object{PodID: o.ContainerID, Description: o.Description})
	}
	return all, err
}
