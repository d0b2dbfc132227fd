package podenv

import (
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/internal/netns"
	"berth/internal/rootfs"
	"berth/internal/userns"
	"berth/oci"
	"berth/sandbox/state"
)

// Namespaces makes and removes the user and network namespaces of pods.
type Namespaces struct {
	Dirs   state.Dirs
	Holder string // path of a program that does nothing
}

// Make creates and pins the pod's own user and network namespaces. netnsPath is the pin of the
// network namespace; empty: the pod uses the node's.
func (n Namespaces) Make(podID string, config *runtimeapi.PodSandboxConfig, netnsPath string) error {
	mappings, err := oci.UserNamespace(config)
	if err != nil {
		return err
	}
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
