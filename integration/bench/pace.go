package main

import (
	"context"
	"fmt"
	"os/exec"
	"time"
)

// paceStarts is how often measurePace starts a program: for some ten milliseconds in all.
const paceStarts = 10

// measurePace does a fixed piece of work, much like what runtimes do all day, and returns how long it took in ms: on a machine that is shared
// with strangers it takes twice as long at some times as at others.
func measurePace(ctx context.Context) (took float64, err error) {
	begin := time.Now()
	for range paceStarts {
		if err := exec.CommandContext(ctx, "true").Run(); err != nil {
			return 0, fmt.Errorf("measure the machine's pace: %w", err)
		}
	}
	return ms(time.Since(begin)), nil
}
