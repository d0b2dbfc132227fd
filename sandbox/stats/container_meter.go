package stats

import (
	"errors"
	"sync/atomic"
	"time"

	"berth/internal/cgstats"
	"berth/sandbox/state"
)

// Usage is the cumulative resource usage of a container or pod.
type Usage struct {
	cgstats.Sample
	NanoCores      uint64 // recent CPU time per second; see rate
	NanoCoresKnown bool   // false before the second sample
}

// Cgroups describes the node's cgroup setup.
type Cgroups struct {
	Node state.Node
}

// ContainerMeter measures one cgroup. The zero value is for a container that has no processes in
// its cgroup. Its usage is part of its pod's, and the last Sample may have it.
type ContainerMeter struct {
	reader *cgstats.Reader
	rate   rate
	last   atomic.Pointer[cgstats.Sample] // counters of the last read
}

// ContainerMeter returns a meter of the cgroup at a runtime-spec cgroupsPath. If tasks is set, it
// also counts tasks.
func (h Cgroups) ContainerMeter(cgroupsPath string, tasks bool) *ContainerMeter {
	return &ContainerMeter{reader: cgstats.New(func() (cgstats.Group, error) {
		group, err := h.Node.Cgroup(cgroupsPath)
		if err != nil {
			return cgstats.Group{}, err
		}
		return cgstats.Group{V2: h.Node.Host.CgroupV2, Dir: group.Dir}, nil
	}, tasks)}
}

// isSandboxed reports whether the container has no processes in its cgroup.
func (c *ContainerMeter) isSandboxed() bool { return c.reader == nil }

// read returns the usage of a container. last is its last sample, nil before the first one.
func (c *ContainerMeter) read(u *Usage, last *Sample) error {
	switch {
	case !c.isSandboxed():
		return c.Read(u)
	case last == nil || last.Usage == nil:
		*u = Usage{Sample: cgstats.Sample{At: time.Now()}}
	default:
		*u = Usage{Sample: *last.Usage}
		u.NanoCores, u.NanoCoresKnown = c.rate.add(u.At, u.CPU.Usage)
	}
	return nil
}

// Read takes a sample of a cgroup. The error wraps cgstats.ErrGone if the cgroup was removed.
func (c *ContainerMeter) Read(u *Usage) error {
	if err := c.reader.Read(&u.Sample); err != nil {
		return err
	}
	u.NanoCores, u.NanoCoresKnown = c.rate.add(u.At, u.CPU.Usage)
	counters := u.Counters()
	c.last.Store(&counters)
	return nil
}

// final returns the last counters of an exited container. systemd removes a scope with its last
// process. In that case final returns the counters of the last read. The error wraps
// cgstats.ErrGone if the cgroup was removed before the first read.
func (c *ContainerMeter) final() (*cgstats.Sample, error) {
	if c.isSandboxed() {
		return &cgstats.Sample{}, nil
	}
	var u Usage
	err := c.Read(&u)
	if last := c.last.Load(); err == nil || errors.Is(err, cgstats.ErrGone) && last != nil {
		return last, nil
	}
	return nil, err
}

// Detail reads counters that only metrics need. It returns nil if they are unknown. The error wraps
// cgstats.ErrGone if the cgroup was removed.
func (c *ContainerMeter) Detail() (*cgstats.Detail, error) {
	if c.isSandboxed() {
		return nil, nil
	}
	detail := &cgstats.Detail{}
	err := c.reader.ReadDetail(detail)
	return detail, err
}

// Close closes the cgroup's files. Later reads fail with cgstats.ErrGone.
func (c *ContainerMeter) Close() error {
	if c.isSandboxed() {
		return nil
	}
	return c.reader.Close()
}
