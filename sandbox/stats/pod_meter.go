package stats

import (
	"errors"
	"iter"
	"path/filepath"
	"sync/atomic"

	"berth/internal/cgroup"
	"berth/internal/cgstats"
	"berth/internal/errdefs"
	"berth/internal/netns"
)

// PodMeter measures a pod while its pause runs.
type PodMeter struct {
	group *ContainerMeter // the pod's own cgroup, or else
	pause *ContainerMeter // that of its pause, to which its containers are added
	rate  rate            // of the sum
	net   *cgstats.NetDev

	ended atomic.Pointer[cgstats.Sample] // counters of the containers that have ended, where the pod has no cgroup
	told  atomic.Pointer[cgstats.Sample] // the highest counters that were told
}

// PodMeter returns the meter of a pod whose pause has the cgroup at a runtime-spec cgroupsPath. With
// hasCgroup the parent of that is the pod's. netnsPath is where its network namespace is pinned;
// empty: it has the node's.
func (h Cgroups) PodMeter(cgroupsPath string, hasCgroup bool, netnsPath string) *PodMeter {
	p := &PodMeter{}
	p.ended.Store(&cgstats.Sample{})
	p.told.Store(&cgstats.Sample{})
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

// netMeter measures the network namespace that is pinned at path. The pause's process
// would not do: that of a Sandboxed runtime is in the node's.
func netMeter(path string) *cgstats.NetDev {
	return cgstats.NewNetDev(func(open func() error) error {
		err := netns.In(path, open)
		if errdefs.IsNotFound(err) { // the pod is being stopped
			return cgstats.ErrGone
		}
		return err
	})
}

// parent measures the cgroup that a pause is in, with all its containers.
func (h Cgroups) parent(cgroupsPath string) *ContainerMeter {
	return &ContainerMeter{reader: cgstats.New(func() (cgstats.Group, error) {
		group, err := cgroup.Open(cgroupsPath, h.Systemd)
		if err != nil {
			return cgstats.Group{}, err
		}
		dir := func(controller string) string {
			if below := group.Dir(controller); below != "" {
				return filepath.Dir(below)
			}
			return ""
		}
		return cgstats.Group{V2: h.V2, Dir: dir}, nil
	}, true)}
}

// Ended keeps what a container has used that has ended, while its cgroup is still there and nobody measures it any more as
// one of the pod's: a pod's CPU time does not grow less when a container ends. A new daemon counts anew.
func (p *PodMeter) Ended(c *ContainerMeter) error {
	if p.pause == nil { // its cgroup knows
		return nil
	}
	last, err := c.final()
	if err != nil {
		return err
	}
	update(&p.ended, func(sum *cgstats.Sample) { sum.Add(last) })
	return nil
}

// update changes a sample that is never changed in its place.
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

// Past is what the pod's containers had used that had ended. It is to be read before those that run are measured, or one
// that ends meanwhile may be counted twice.
func (p *PodMeter) Past() *cgstats.Sample { return p.ended.Load() }

// Read takes a sample of what is the pod's; past is Past's, and containers are what its containers use, which is
// added up where the pod has no cgroup. interfaces has the default one first, and
// maxInterfaces at most; none with the node's network. The error wraps cgstats.ErrGone if the pod has ended.
func (p *PodMeter) Read(u *Usage, past *cgstats.Sample, containers iter.Seq[*Usage]) (interfaces []cgstats.Interface, err error) {
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

// readSum adds up what pause and containers use, and have used. Pressure can't be added up. A container that is between
// the two for a moment is not missed: no counter is told lower than it was.
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
	update(&p.told, func(highest *cgstats.Sample) {
		u.Raise(highest)
		highest.Raise(&u.Sample)
	})
	u.NanoCores, u.NanoCoresKnown = p.rate.add(u.At, u.CPU.Usage)
	return nil
}

// Close lets go of the pod's cgroup and network namespace.
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

// defaultInterface is the name that CNI plugins are told to give to the pod's
// first interface.
const defaultInterface = "eth0"

// maxInterfaces is how many of a pod's interfaces are told of. What a list tells of all
// pods must stay below the 16 MB that clients take, whatever containers with
// CAP_NET_ADMIN make: an interface takes 2 KiB of metrics.
const maxInterfaces = 100

// defaultFirst moves the default interface to the front and cuts off those above
// maxInterfaces. Where a network calls the default one something else, it is the first.
func defaultFirst(interfaces []cgstats.Interface) []cgstats.Interface {
	for i, in := range interfaces {
		if in.Name == defaultInterface {
			interfaces[0], interfaces[i] = interfaces[i], interfaces[0]
		}
	}
	return interfaces[:min(len(interfaces), maxInterfaces)]
}
