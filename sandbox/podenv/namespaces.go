package podenv

import (
	"berth/internal/netns"
	"berth/internal/rootfs"
	"berth/internal/userns"
	"berth/sandbox/state"
)

// Namespaces makes and removes the user and network namespaces of pods.
type Namespaces struct {
	Dirs   state.Dirs
	Holder string // path of a program that does nothing
}

// Make makes and pins the user and network namespaces that the pod does not share with the node. It
// pins the network namespace at netnsPath. An empty netnsPath means the node's network.
func (n Namespaces) Make(podID string, mappings *userns.Mappings, netnsPath string) error {
	if mappings == nil {
		if netnsPath == "" {
			return nil
		}
		return netns.New(netnsPath)
	}
	return userns.With(n.Holder, *mappings, netnsPath != "", func(ns userns.Namespaces) error {
		if err := userns.Pin(ns.User(), n.Dirs.UserNS(podID)); err != nil {
			return err
		}
		if netnsPath == "" {
			return nil
		}
		return netns.Pin(ns.Net(), netnsPath)
	})
}

// Probe checks that the kernel supports user namespaces of pods, by performing every operation that
// such pods need. The error gives the reason.
func (n Namespaces) Probe() error {
	if err := userns.CheckPassable(n.Dirs.RootPlace()); err != nil {
		return err
	}
	return rootfs.ProbeUserNamespace(n.Holder, n.Dirs.Trash())
}

// Unpin removes the pin of a pod's user namespace. It may be repeated.
func (n Namespaces) Unpin(podID string) error { return userns.Unpin(n.Dirs.UserNS(podID)) }
