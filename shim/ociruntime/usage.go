package ociruntime

import (
	"context"
	"encoding/json"
	"fmt"
)

// Usage is the resource usage of a container as a runtime measures it. Times are in nanoseconds,
// sizes in bytes.
type Usage struct {
	CPU struct {
		Usage struct {
			Total  uint64 `json:"total"`
			Kernel uint64 `json:"kernel"`
			User   uint64 `json:"user"`
		} `json:"usage"`
	} `json:"cpu"`
	Memory struct {
		Usage struct {
			Usage uint64 `json:"usage"`
			Limit uint64 `json:"limit"` // 0: none
		} `json:"usage"`
		Raw map[string]uint64 `json:"raw,omitempty"` // as in the kernel's memory.stat
	} `json:"memory"`
	Pids struct {
		Current uint64 `json:"current"`
	} `json:"pids"`
}

// Usage returns the usage of a container of a runtime that Measures.
func (r *Runtime) Usage(ctx context.Context, id string) (Usage, error) {
	document, err := r.output(ctx, "events", "--stats", id)
	if err != nil {
		return Usage{}, err
	}
	var event struct{ Data Usage }
	if err := json.Unmarshal(document, &event); err != nil {
		return Usage{}, fmt.Errorf("usage of %s: %q: %w", id, firstLine(document), err)
	}
	return event.Data, nil
}
