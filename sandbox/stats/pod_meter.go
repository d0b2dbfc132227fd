package stats

import (
	"errors"
	"iter"
	"path/filepath"
	"sync/atomic"

	"berth/internal/cgstats"
	"berth/internal/errdefs"
	"berth/internal/netns"
)

// PodMeter measures a pod while its pause runs.
type PodMeter struct {
	group *ContainerMeter // the pod's cgroup; nil if it has none
	pause *ContainerMeter // the pause's cgroup, if the pod has none; containers are added to it
	rate  rate            // of the sum, if the pod has no cgroup
	net   *cgstats.NetDev

	ended    atomic.Pointer[cgstats.Sample] // counters of ended containers, if the pod has no cgroup
	reported atomic.Pointer[cgstats.Sample] // highest counters reported so far
}

// PodMeter returns the meter of a pod. cgroupsPath is the runtime-spec path of the pause's cgroup.
// If hasCgroup is set, the parent of this cgroup is the pod's cgroup. netnsPath is the pin of its
// network namespace; empty: the pod uses the node's.
func (h Cgroups) PodMeter(cgroupsPath string, hasCgroup bool, netnsPath string) *PodMeter {
	p := &PodMeter{}
	p.ended.Store(&cgstats.Sample{})
	p.reported.Store(&cgstats.Sample{})
	if hasCgroup {
		p.group = h.parent(cgroupsPath)
	} else {
		p.pause = h.ContainerMeter(cgroupsPath, true)
	}
	if netnsPath != "" {
		p.net = netMeter(netnsPath)
	}
	return p
}

// netMeter measures the network namespace pinned at path. The pause's process cannot be used
// instead, because with a sandboxing runtime it is in the node's namespace.
func netMeter(path string) *cgstats.NetDev {
	return cgstats.NewNetDev(func(open func() error) error {
		err := netns.In(path, open)
		if errdefs.IsNotFound(err) { // the pod is being stopped
			return cgstats.ErrGone
		}
		return err
	})
}

// parent measures the parent of the pause's cgroup, which holds all containers of the pod.
func (h Cgroups) parent(cgroupsPath string) *ContainerMeter {
	return &ContainerMeter{reader: cgstats.New(func() (cgstats.Group, error) {
		group, err := h.Node.Cgroup(cgroupsPath)
		if err != nil {
			return cgstats.Group{}, err
		}
		dir := func(controller string) string {
			if below := group.Dir(controller); below != "" {
				return filepath.Dir(below)
			}
			return ""
		}
		return cgstats.Group{V2: h.Node.Host.CgroupV2, Dir: dir}, nil
	}, true)}
}

// Ended adds the final counters of a container to the pod, so that the pod's counters do not
// decrease. The cgroup must still exist, and the container must not be measured as part of the pod
// any more. After a restart of the daemon the counters start at zero.
func (p *PodMeter) Ended(c *ContainerMeter) error {
	if p.pause == nil { // the pod's cgroup includes the container
		return nil
	}
	last, err := c.final()
	if err != nil {
		return err
	}
	update(&p.ended, func(sum *cgstats.Sample) { sum.Add(last) })
	return nil
}

// update replaces the sample at p, which readers share, by a changed copy.
func update(p *atomic.Pointer[cgstats.Sample], change func(*cgstats.Sample)) {
	for {
		old := p.Load()
		changed := *old
		change(&changed)
		if p.CompareAndSwap(old, &changed) {
			return
		}
	}
}

// Past returns the counters of exited containers. Callers must read it before they measure the
// running containers. Otherwise a container that exits in between would count twice.
func (p *PodMeter) Past() *cgstats.Sample { return p.ended.Load() }

// Read takes a sample of the pod. past is the result of Past. containers are the usages of the
// running containers. Read adds them up if the pod has no cgroup. interfaces lists up to
// maxInterfaces network interfaces, the default one first. It is empty if the pod uses the node's
// network. The error wraps cgstats.ErrGone when the pod has ended.
func (p *PodMeter) Read(
	u *Usage, past *cgstats.Sample, containers iter.Seq[*Usage],
) (interfaces []cgstats.Interface, err error) {
	if p.net != nil {
		if interfaces, err = p.net.Read(); err != nil {
			return nil, err
		}
		interfaces = defaultFirst(interfaces)
	}
	if p.group != nil {
		return interfaces, p.group.Read(u)
	}
	return interfaces, p.readSum(u, past, containers)
}

// readSum adds up the usage of pause, running and ended containers. Pressure cannot be added up.
// For a moment a container may be neither running nor in past. This does not lower the result,
// because no counter is reported lower than before.
func (p *PodMeter) readSum(u *Usage, past *cgstats.Sample, containers iter.Seq[*Usage]) error {
	if err := p.pause.reader.Read(&u.Sample); err != nil {
		return err
	}
	u.Memory.Limit, u.Memory.SwapLimit = cgstats.Unlimited, cgstats.Unlimited
	u.CPU.Pressure, u.Memory.Pressure, u.IO = cgstats.Pressure{}, cgstats.Pressure{}, cgstats.Pressure{}
	u.Add(past)
	for c := range containers {
		u.Add(&c.Sample)
	}
	update(&p.reported, func(highest *cgstats.Sample) {
		u.Raise(highest)
		highest.Raise(&u.Sample)
	})
	u.NanoCores, u.NanoCoresKnown = p.rate.add(u.At, u.CPU.Usage)
	return nil
}

// Close closes the files of the pod's cgroup and network namespace.
func (p *PodMeter) Close() error {
	var err error
	for _, m := range []*ContainerMeter{p.group, p.pause} {
		if m != nil {
			err = errors.Join(err, m.Close())
		}
	}
	if p.net != nil {
		err = errors.Join(err, p.net.Close())
	}
	return err
}

// defaultInterface is the name that CNI plugins are asked to give to the pod's first interface.
const defaultInterface = "eth0"

// maxInterfaces limits the reported interfaces of a pod. Containers with CAP_NET_ADMIN can create
// any number. Each interface takes 2 KiB of metrics, and a list of all pods must stay below the 16
// MB that clients accept.
const maxInterfaces = 100

// defaultFirst moves the default interface to the front and drops interfaces above maxInterfaces.
// If the network has given the default interface another name, it is already first.
func defaultFirst(interfaces []cgstats.Interface) []cgstats.Interface {
	for i, in := range interfaces {
		if in.Name == defaultInterface {
			interfaces[0], interfaces[i] = interfaces[i], interfaces[0]
		}
	}
	return interfaces[:min(len(interfaces), maxInterfaces)]
}
