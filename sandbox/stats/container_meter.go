package stats

import (
	"errors"
	"sync/atomic"
	"time"

	"berth/internal/cgroup"
	"berth/internal/cgstats"
)

// Usage is what a container or pod has used up to now.
type Usage struct {
	cgstats.Sample
	NanoCores      uint64 // CPU time a second, recently; see rate
	NanoCoresKnown bool   // two samples are needed
}

// Cgroups says how the node has its cgroups.
type Cgroups struct {
	V2      bool
	Systemd bool // paths name scopes of systemd's
}

// ContainerMeter measures one cgroup. The zero value is for a container that has no process in its
// cgroup: nothing is known of it.
type ContainerMeter struct {
	reader *cgstats.Reader
	rate   rate
	last   atomic.Pointer[cgstats.Sample] // its counters when it was last read
}

// ContainerMeter returns the meter of the cgroup at a runtime-spec cgroupsPath. With tasks they are
// counted too.
func (h Cgroups) ContainerMeter(cgroupsPath string, tasks bool) *ContainerMeter {
	return &ContainerMeter{reader: cgstats.New(func() (cgstats.Group, error) {
		group, err := cgroup.Open(cgroupsPath, h.Systemd)
		if err != nil {
			return cgstats.Group{}, err
		}
		return cgstats.Group{V2: h.V2, Dir: group.Dir}, nil
	}, tasks)}
}

// Read takes a sample. The error wraps cgstats.ErrGone if the cgroup has ended.
func (c *ContainerMeter) Read(u *Usage) error {
	if c.reader == nil {
		*u = Usage{Sample: cgstats.Sample{At: time.Now()}}
		return nil
	}
	if err := c.reader.Read(&u.Sample); err != nil {
		return err
	}
	u.NanoCores, u.NanoCoresKnown = c.rate.add(u.At, u.CPU.Usage)
	counters := u.Counters()
	c.last.Store(&counters)
	return nil
}

// final returns the counters that a container has ended with, or, if its cgroup is gone, had when it was last read:
// systemd removes a scope with the last process in it. The error wraps cgstats.ErrGone if it was never read.
func (c *ContainerMeter) final() (*cgstats.Sample, error) {
	if c.reader == nil {
		return &cgstats.Sample{}, nil
	}
	var u Usage
	err := c.Read(&u)
	if last := c.last.Load(); err == nil || errors.Is(err, cgstats.ErrGone) && last != nil {
		return last, nil
	}
	return nil, err
}

// Detail reads what only metrics need; nil if nothing is known. The error wraps
// cgstats.ErrGone if the cgroup has ended.
func (c *ContainerMeter) Detail() (*cgstats.Detail, error) {
	if c.reader == nil {
		return nil, nil
	}
	detail := &cgstats.Detail{}
	err := c.reader.ReadDetail(detail)
	return detail, err
}

// Close lets go of the cgroup. Reads fail with cgstats.ErrGone from then on.
func (c *ContainerMeter) Close() error {
	if c.reader == nil {
		return nil
	}
	return c.reader.Close()
}
