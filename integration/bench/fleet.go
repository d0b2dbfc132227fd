package main

import (
	"context"
	"fmt"
	"time"

	"berth/integration/bench/subject"
)

const (
	fleetPods       = 500
	fleetContainers = 2 // in each pod, created and not started
)

// fleet fills a node with more pods than any node has. It measures lists and a restart of the
// daemon.
var fleet = experiment{
	name: "500 pods with 1,000 containers", rows: []string{"list-1000", "restart-500"}, applies: ownImages, oneByOne: true,
	warmUp: 1, samples: wanted, limit: 6 * time.Minute, budget: time.Minute,
	prepare: func(ctx context.Context, _ *bench, s *subject.Subject) (any, error) {
		return nil, inParallel(ctx, fleetPods, func(ctx context.Context, _ int) error {
			pod, err := s.RunSandbox(ctx, true)
			if err != nil {
				return err
			}
			for range fleetContainers {
				if err := pod.CreateContainer(ctx); err != nil {
					return fmt.Errorf("CreateContainer: %w", err)
				}
			}
			return nil
		})
	},
	sample: func(ctx context.Context, c *contestant) (values, error) {
		v := values{}
		for range 3 {
			n, took, err := c.s.ListContainers(ctx)
			if err != nil {
				return nil, err
			}
			if c.s.Daemon != nil && n != fleetPods*fleetContainers {
				return nil, fmt.Errorf("ListContainers: %d containers, want %d", n, fleetPods*fleetContainers)
			}
			v["list-1000"] = append(v["list-1000"], ms(took))
		}
		if c.s.Daemon != nil {
			took, err := c.s.Restart(ctx, fleetPods)
			if err != nil {
				return nil, err
			}
			v["restart-500"] = []float64{took.Seconds()}
		}
		return v, nil
	},
}
