package podenv

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"time"

	"golang.org/x/sync/errgroup"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/checkpoint"
	"berth/image"
	"berth/internal/failpoint"
	"berth/internal/netns"
	"berth/internal/task"
	"berth/internal/trace"
	"berth/internal/trash"
	"berth/oci"
	"berth/sandbox/lsm"
	"berth/sandbox/runtime"
	"berth/sandbox/state"
	"berth/shim/proto"
)

// Provisioner is what is needed to make it, and to take it away.
type Provisioner struct {
	Dirs           state.Dirs
	HostResolvConf string // what pods with the Default DNS policy get
	Namespaces     Namespaces
	Networks       *Networks
	Launch         runtime.Launcher
	Processes      runtime.Processes
	SELinux        lsm.SELinux
	Images         *image.Store
	Trash          *trash.Trash
	Records        *checkpoint.Dir // of pods
	Tasks          *task.Runner
	Log            *slog.Logger
}

// Pod is what is written down of a pod. Make and TakeDown note in Rec what becomes of its network.
type Pod struct {
	Rec    *state.PodRecord
	Config *runtimeapi.PodSandboxConfig
	Pause  *os.File // pidfd; nil: it has ended, or nobody knows its process

	Launched func(pausePID int) // Make calls it when the pause runs, which may be long before the network is up
}

func (p Pod) String() string { return "pod " + p.Rec.ID }

// Make makes everything the pod needs and returns its pause, which runs. The network and the pause
// come up side by side where both need no more than the namespace.
func (k Provisioner) Make(ctx context.Context, p Pod) (*proto.Started, error) {
	if err := k.makeFiles(ctx, p); err != nil {
		return nil, err
	}
	if err := k.makeNamespaces(ctx, p); err != nil {
		return nil, err
	}
	group, gctx := errgroup.WithContext(ctx)
	if needsNetwork(p) {
		group.SetLimit(1) // one after the other
	}
	var pause *proto.Started
	group.Go(func() error {
		return k.Tasks.Guard("attach network", p.String(), func() error { return k.Networks.Attach(gctx, p.Rec, p.Config) })
	})
	group.Go(func() error {
		return k.Tasks.Guard("launch pause", p.String(), func() (err error) {
			if pause, err = k.Launch.Pause(gctx, runtime.NewSpecPod(p.Rec, p.Config, 0), p.Rec.PauseImage); err == nil {
				p.Launched(pause.InitPID)
			}
			return err
		})
	})
	err := group.Wait()
	if err != nil && pause != nil {
		err = errors.Join(err, pause.Init.Close())
	}
	return pause, err
}

// needsNetwork tells whether the pause can be made only when the pod is attached to its network. A
// sandbox takes over the addresses that it finds. Sysctls that the pod asks for may be those of an
// interface (net.ipv4.conf.eth0.arp_ignore), and hold whatever plugins set.
func needsNetwork(p Pod) bool {
	return p.Rec.Runtime.IsSandboxed() || oci.SetsNetworkSysctls(p.Config)
}

func (k Provisioner) makeFiles(ctx context.Context, p Pod) error {
	defer trace.Begin(ctx, "files").End()
	return k.filesOf(p).make(k.HostResolvConf)
}

func (k Provisioner) makeNamespaces(ctx context.Context, p Pod) error {
	defer trace.Begin(ctx, "namespaces").End()
	return k.Namespaces.Make(p.Rec.ID, p.Config, p.Rec.NetNS)
}

// FinishFiles writes /etc/hosts with the pod's addresses, and labels it and the others: all containers of the pod read
// them, and they are the pod's own, also where they are copies of the host's.
func (k Provisioner) FinishFiles(ctx context.Context, p Pod) error {
	defer trace.Begin(ctx, "hosts").End()
	if err := k.filesOf(p).writeHosts(p.Rec.IPs); err != nil {
		return err
	}
	if err := k.SELinux.LabelOwn(k.Dirs.Etc(p.Rec.ID), p.Rec.SELinux); err != nil {
		return fmt.Errorf("pod %s: %w", p.Rec.ID, err)
	}
	return nil
}

// filesOf is what a pod's files are made from.
func (k Provisioner) filesOf(p Pod) files {
	return files{Dirs: k.Dirs, ID: p.Rec.ID, Config: p.Config, MountLabel: p.Rec.SELinux.Mount}
}

// TakeDown removes what exists for a pod until it is stopped: network, pause and tmpfs. It does
// every step, side by side: the end of a namespace and each unmounting wait for an RCU grace
// period, which may be the same.
func (k Provisioner) TakeDown(ctx context.Context, p Pod) error {
	return k.Tasks.Together("take down", p.String(),
		func() error { return k.detachNetwork(ctx, p) },
		func() error { return k.removePause(ctx, p) },
		func() error { return k.removeMounts(p.Rec.ID) })
}

// detachNetwork runs CNI DEL with the configuration that ADD had, and removes
// the namespace once that succeeded: plugins may need it until then.
func (k Provisioner) detachNetwork(ctx context.Context, p Pod) error {
	if p.Rec.Network != nil {
		if err := k.Networks.Detach(ctx, p.Rec, p.Config); err != nil {
			return fmt.Errorf("detach pod %s from its network: %w", p.Rec.ID, err)
		}
		p.Rec.Network = nil
		if p.Rec.Phase != state.Removing { // else the record goes anyway
			if err := k.Records.Write(p.Rec.ID, p.Rec); err != nil {
				k.Log.Warn("record that a pod is detached; the next daemon will detach it once more", "pod", p.Rec.ID, "error", err)
			}
		}
	}
	if p.Rec.NetNS == "" {
		return nil
	}
	return netns.Remove(p.Rec.NetNS)
}

// removePause kills the pause and removes all that its launch made. libcontainer's pause is one process: when that has ended its
// cgroup is idle. That of another runtime is the runtime's to end.
func (k Provisioner) removePause(ctx context.Context, p Pod) error {
	ctx, cancel := context.WithTimeout(ctx, runtime.KillWait)
	defer cancel()
	k.EndPause(ctx, p)
	return k.Processes.Remove(ctx, p.Rec.ID, p.Rec.CgroupsPath)
}

// endPatience is how long a pause may take to end by a signal, which takes a millisecond. One that does not may be frozen: what kills its
// cgroup thaws it, and needs the rest of the time.
const endPatience = time.Second

// EndPause kills the pause, unless that is for its runtime to do.
func (k Provisioner) EndPause(ctx context.Context, p Pod) {
	if p.Pause == nil || p.Rec.Runtime != nil {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, endPatience)
	defer cancel()
	if err := k.Processes.End(ctx, p.Pause); err != nil {
		k.Log.Warn("end a pause; what is in its cgroup is killed", "pod", p.Rec.ID, "error", err)
	}
}

// removeMounts takes away the pod's tmpfs and the pin of its user namespace.
// Containers that still have them keep their view.
func (k Provisioner) removeMounts(podID string) error {
	if err := k.Namespaces.Unpin(podID); err != nil {
		return fmt.Errorf("pod %s: %w", podID, err)
	}
	return unmountTmpfs(k.Dirs, podID)
}

// Remove removes the rest of a pod that was taken down, its containers too: what their runtime kept, the image of its
// pause, its files, what is kept of its network.
func (k Provisioner) Remove(podID string) error {
	if err := k.Processes.RemoveRoot(podID); err != nil {
		return err
	}
	if err := k.Images.Release(podID); err != nil {
		return fmt.Errorf("release pause image of pod %s: %w", podID, err)
	}
	if err := k.Trash.Discard(k.Dirs.Writable(podID)); err != nil {
		return err
	}
	failpoint.Reach("pod.remove-files")
	if err := os.RemoveAll(k.Dirs.PodFiles(podID)); err != nil {
		return fmt.Errorf("remove files of pod %s: %w", podID, err)
	}
	failpoint.Reach("pod.files-removed")
	return k.Networks.Forget(podID)
}
