package main

import (
	"context"
	"fmt"
	"time"

	"golang.org/x/sys/unix"

	"berth/integration/bench/subject"
	"berth/integration/fixture"
)

// pull pulls an image of eight layers from loopback, measures its disk usage, and removes it.
func pull(form string, c fixture.Compression) experiment {
	wall, cpu := "pull-"+form, "pull-"+form+"-cpu"
	e := experiment{
		name: "pull, " + form, rows: []string{wall, cpu}, applies: ownImages, warmUp: 1, samples: wanted, limit: 3 * time.Minute, budget: 100 * time.Second,
		prepare: func(_ context.Context, b *bench, _ *subject.Subject) (any, error) { return b.pushPullImage(form, c) },
		sample: func(ctx context.Context, c *contestant) (values, error) {
			p, err := pullOnce(ctx, c.s, c.state.(string))
			if err != nil {
				return nil, err
			}
			v := values{wall: {p.wall.Seconds()}}
			if c.s.AccountsCPU() {
				v[cpu] = []float64{p.cpu.Seconds()}
			}
			if form == "gzip" {
				v["remove-image"] = []float64{ms(p.remove)}
				if c.s.Root != "" {
					v["disk"] = []float64{float64(p.disk) / fixture.PullBytes}
				}
			}
			return v, nil
		},
	}
	if form == "gzip" {
		e.rows = append(e.rows, "disk", "remove-image")
	}
	return e
}

// ownImages omits a runtime that shares its images with another measured runtime.
func ownImages(s *subject.Subject) bool { return plugins(s) && !s.Twin }

// pullCost holds the measurements of a pull.
type pullCost struct {
	wall, cpu time.Duration
	remove    time.Duration // until RemoveImage answers
	disk      int64
}

// pullOnce pulls and removes an image. It syncs first, so that no runtime has to write the dirty
// pages of another one.
func pullOnce(ctx context.Context, s *subject.Subject, image string) (p pullCost, err error) {
	unix.Sync()
	var empty, full int64
	if empty, err = s.Disk(); err != nil {
		return p, err
	}
	before, err := s.CPU()
	if err != nil {
		return p, err
	}
	if p.wall, err = s.Pull(ctx, image); err != nil {
		return p, err
	}
	if err := s.Rest(ctx); err != nil {
		return p, err
	}
	after, err := s.CPU()
	if err != nil {
		return p, err
	}
	if full, err = s.Disk(); err != nil {
		return p, err
	}
	p.cpu, p.disk = after-before, full-empty
	if p.remove, err = s.RemoveImage(ctx, image); err != nil {
		return p, err
	}
	return p, removed(ctx, s, empty)
}

// removed waits until the disk usage is back to empty. A runtime may delete files after its answer.
// That work must not slow the next pull.
func removed(ctx context.Context, s *subject.Subject, empty int64) error {
	const (
		limit = time.Minute
		slack = 1 << 20 // metadata
		look  = 10 * time.Millisecond
	)
	for begin := time.Now(); s.Root != ""; {
		used, err := s.Disk()
		if err != nil {
			return err
		}
		if used <= empty+slack {
			break
		}
		if time.Since(begin) > limit {
			return fmt.Errorf("%d bytes of the image are on the disk %v after its removal", used-empty, limit)
		}
		if err := wait(ctx, look); err != nil {
			return err
		}
	}
	return s.Rest(ctx)
}

// pushPullImage pushes the image once and returns its name.
func (b *bench) pushPullImage(form string, c fixture.Compression) (string, error) {
	if name, ok := b.pushed[form]; ok {
		return name, nil
	}
	img, err := fixture.PullImage(c)
	if err != nil {
		return "", err
	}
	name, err := b.registry.Push("bench/pull:"+form, img)
	if err != nil {
		return "", fmt.Errorf("the image of %s layers: %w", form, err)
	}
	b.pushed[form] = name
	return name, nil
}
