package sandbox

import (
	"errors"
	"path"
	"path/filepath"
	"sync/atomic"
	"time"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/cni"
	"berth/internal/cgroup"
	"berth/internal/cgstats"
	"berth/internal/errdefs"
	"berth/oci"
)

// Usage is what a container or pod has used up to now.
type Usage struct {
	cgstats.Sample
	NanoCores      uint64 // CPU time a second, recently; see rate
	NanoCoresKnown bool   // two samples are needed
}

// ContainerStats is what a container uses.
type ContainerStats struct {
	Info    *ContainerInfo
	Running bool    // else Usage is empty
	Cgroup  string  // its path below the cgroup mounts
	Usage   Usage   // Tasks is counted only where the pod has no cgroup
	Census  *Census // nil until the first one
}

// PodStats is what a pod uses.
type PodStats struct {
	Info       *PodInfo
	Running    bool // else all but Containers is empty
	Usage      Usage
	Cgroup     string              // its path below the cgroup mounts; of its pause where it has none
	Interfaces []cgstats.Interface // the default one first, maxInterfaces at most; none with the host's network
	Containers []ContainerStats    // those that run
}

// ContainerStats measures a container. One that does not run, or ends meanwhile,
// is no error. It reads the kernel's files and waits for nobody.
func (m *Manager) ContainerStats(info *ContainerInfo) (ContainerStats, error) {
	stats := ContainerStats{Info: info}
	c, known := m.containers.get(info.ID)
	if !known {
		return stats, nil
	}
	stats.Census = c.census.Load()
	run := c.running.Load()
	if run == nil {
		return stats, nil
	}
	err := run.meter.read(&stats.Usage)
	if errors.Is(err, cgstats.ErrGone) {
		return stats, nil
	}
	stats.Running, stats.Cgroup = err == nil, oci.CgroupPath(c.rec.CgroupsPath)
	return stats, err
}

// ContainerDetail reads what only metrics need of a container that runs. One that
// does not, or ends meanwhile, has none: nil.
func (m *Manager) ContainerDetail(id string) (*cgstats.Detail, error) {
	c, known := m.containers.get(id)
	if !known {
		return nil, nil
	}
	run := c.running.Load()
	if run == nil || run.meter.reader == nil {
		return nil, nil
	}
	detail := &cgstats.Detail{}
	err := run.meter.reader.ReadDetail(detail)
	if errors.Is(err, cgstats.ErrGone) {
		return nil, nil
	}
	return detail, err
}

// PodStats measures a pod; containers are its containers. A pod that is not ready,
// or ends meanwhile, is no error. It reads the kernel's files and waits for nobody.
//
// The pod's figures are those of the cgroup its config names, which kubelet makes
// for each pod. Without one they are the sum of pause and containers that run: the CPU
// time of those that ended is not in it any more. A container that can't be measured
// is left out.
func (m *Manager) PodStats(info *PodInfo, containers []*ContainerInfo) (PodStats, error) {
	stats := PodStats{Info: info}
	for _, c := range containers {
		if c.State != runtimeapi.ContainerState_CONTAINER_RUNNING {
			continue
		}
		one, err := m.ContainerStats(c)
		if err != nil {
			m.unmeasured.Warn(m.log, "a container can't be measured", "container", c.ID, "error", err)
		}
		if one.Running {
			stats.Containers = append(stats.Containers, one)
		}
	}
	p, known := m.pods.get(info.ID)
	if !known {
		return stats, nil
	}
	meter := p.meter.Load()
	if meter == nil {
		return stats, nil
	}
	err := meter.read(&stats)
	if errors.Is(err, cgstats.ErrGone) {
		return PodStats{Info: info, Containers: stats.Containers}, nil
	}
	stats.Running, stats.Cgroup = err == nil, oci.CgroupPath(p.rec.CgroupsPath)
	if p.hasCgroup() {
		stats.Cgroup = path.Dir(stats.Cgroup)
	}
	return stats, err
}

// meter measures one cgroup. Its owner closes it when the processes in it have ended.
type meter struct {
	reader *cgstats.Reader // nil for a container that has no process in its cgroup: nothing is known
	rate   rate
}

func (m *meter) read(u *Usage) error {
	if m.reader == nil {
		*u = Usage{Sample: cgstats.Sample{At: time.Now()}}
		return nil
	}
	if err := m.reader.Read(&u.Sample); err != nil {
		return err
	}
	u.NanoCores, u.NanoCoresKnown = m.rate.add(u.At, u.CPU.Usage)
	return nil
}

func (m *meter) Close() error {
	if m.reader == nil {
		return nil
	}
	return m.reader.Close()
}

// containerMeter measures a container's cgroup. That of a Sandboxed runtime's is empty:
// all its containers are in the cgroup of the pause, and their zeros would look measured.
func (m *Manager) containerMeter(c *container) *meter {
	p, known := m.pods.get(c.podID)
	if known && p.sandboxed() {
		return &meter{}
	}
	return m.cgroupMeter(c.rec.CgroupsPath, known && !p.hasCgroup())
}

// sandboxed tells whether the pod's containers run where the node can't see them.
func (p *pod) sandboxed() bool {
	r := p.runtime()
	return r != nil && r.Sandboxed
}

// hasCgroup tells whether the pod has a cgroup, to be its containers' parent.
func (p *pod) hasCgroup() bool { return p.config.GetLinux().GetCgroupParent() != "" }

// cgroupMeter measures the cgroup of a container or pause.
func (m *Manager) cgroupMeter(cgroupsPath string, tasks bool) *meter {
	return &meter{reader: cgstats.New(func() (cgstats.Group, error) {
		group, err := cgroup.Open(cgroupsPath, m.cfg.SystemdCgroup)
		if err != nil {
			return cgstats.Group{}, err
		}
		return cgstats.Group{V2: m.cfg.Host.CgroupV2, Dir: group.Dir}, nil
	}, tasks)}
}

// podMeter measures a pod while its pause runs.
type podMeter struct {
	group *meter // the pod's own cgroup, or else
	pause *meter // that of its pause, to which its containers are added
	rate  rate   // of the sum
	net   *cgstats.NetDev
}

// newPodMeter returns the meter of a pod whose pause runs.
func (m *Manager) newPodMeter(p *pod) *podMeter {
	pm := &podMeter{}
	if p.hasCgroup() {
		pm.group = m.parentMeter(p.rec.CgroupsPath)
	} else {
		pm.pause = m.cgroupMeter(p.rec.CgroupsPath, true)
	}
	if p.rec.NetNS != "" {
		pm.net = netMeter(p.rec.NetNS)
	}
	return pm
}

// netMeter measures the network namespace that is pinned at path. The pause's process
// would not do: that of a Sandboxed runtime is in the node's.
func netMeter(path string) *cgstats.NetDev {
	return cgstats.NewNetDev(func(open func() error) error {
		err := cni.InNetNS(path, open)
		if errdefs.IsNotFound(err) { // the pod is being stopped
			return cgstats.ErrGone
		}
		return err
	})
}

// parentMeter measures the cgroup that a pause is in, with all its containers.
func (m *Manager) parentMeter(cgroupsPath string) *meter {
	return &meter{reader: cgstats.New(func() (cgstats.Group, error) {
		group, err := cgroup.Open(cgroupsPath, m.cfg.SystemdCgroup)
		if err != nil {
			return cgstats.Group{}, err
		}
		dir := func(controller string) string {
			if below := group.Dir(controller); below != "" {
				return filepath.Dir(below)
			}
			return ""
		}
		return cgstats.Group{V2: m.cfg.Host.CgroupV2, Dir: dir}, nil
	}, true)}
}

// read fills in what is the pod's; its containers are there already.
func (pm *podMeter) read(stats *PodStats) error {
	if pm.net != nil {
		interfaces, err := pm.net.Read()
		if err != nil {
			return err
		}
		stats.Interfaces = defaultFirst(interfaces)
	}
	if pm.group != nil {
		return pm.group.read(&stats.Usage)
	}
	return pm.readSum(stats)
}

// readSum adds up what pause and containers use. Pressure can't be added up.
func (pm *podMeter) readSum(stats *PodStats) error {
	u := &stats.Usage
	if err := pm.pause.reader.Read(&u.Sample); err != nil {
		return err
	}
	u.Memory.Limit, u.Memory.SwapLimit = cgstats.Unlimited, cgstats.Unlimited
	u.CPU.Pressure, u.Memory.Pressure, u.IO = cgstats.Pressure{}, cgstats.Pressure{}, cgstats.Pressure{}
	for _, c := range stats.Containers {
		u.Add(&c.Usage.Sample)
	}
	u.NanoCores, u.NanoCoresKnown = pm.rate.add(u.At, u.CPU.Usage)
	return nil
}

// Close lets go of the pod's cgroup and network namespace.
func (pm *podMeter) Close() error {
	var err error
	for _, m := range []*meter{pm.group, pm.pause} {
		if m != nil {
			err = errors.Join(err, m.Close())
		}
	}
	if pm.net != nil {
		err = errors.Join(err, pm.net.Close())
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

// rate computes how much CPU time a second something uses, from the samples that
// all clients together take. A value covers the time since the last sample that is
// at least minWindow old: two clients, one every second and one every ten, both get
// the average of the last one to two seconds; one alone gets that since its own last.
// A window far shorter would tell more about the scheduler's clock than about the
// container. There is no lock; of two samples at the same moment one is forgotten.
type rate struct{ last atomic.Pointer[window] }

// window lies between two samples. It never changes.
type window struct{ from, to sample }

type sample struct {
	at    time.Time
	usage uint64
}

const (
	// minWindow lies between two samples that are remembered.
	minWindow = time.Second
	// minFirst must lie between the first two for a value. The CPU time of what runs is
	// brought up to date with the clock tick, every 4 or 10 ms.
	minFirst = 100 * time.Millisecond
)

// add takes a sample and returns the value, if one is known: that takes two samples,
// with the first usage not higher than the second.
func (r *rate) add(at time.Time, usage uint64) (nanoCores uint64, known bool) {
	now := sample{at, usage}
	last := r.last.Load()
	if last != nil && at.Before(last.to.at) { // one that was taken later came first
		return now.rateSince(last.from)
	}
	if last == nil || usage < last.to.usage {
		r.last.CompareAndSwap(last, &window{to: now})
		return 0, false
	}
	from := last.to
	switch since := at.Sub(last.to.at); {
	case since >= minWindow:
		r.last.CompareAndSwap(last, &window{from: last.to, to: now})
	case !last.from.at.IsZero():
		from = last.from
	case since < minFirst:
		return 0, false
	}
	return now.rateSince(from)
}

// rateSince is not known without an earlier sample.
func (s sample) rateSince(from sample) (nanoCores uint64, known bool) {
	elapsed := s.at.Sub(from.at)
	if from.at.IsZero() || elapsed < minFirst || s.usage < from.usage {
		return 0, false
	}
	return uint64(float64(s.usage-from.usage) / float64(elapsed) * float64(time.Second)), true
}
