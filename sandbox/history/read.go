package history

import (
	"context"
	"slices"
	"time"

	"berth/internal/errdefs"
	"berth/internal/trace"
)

// Summary describes a start in a list.
type Summary struct {
	Pod
	Began      time.Time     `json:"began"`
	Took       time.Duration `json:"took"` // time in which berth worked, in nanoseconds
	Pull       time.Duration `json:"pull"` // the part of this time in which images were pulled
	Containers int           `json:"containers"`
	Failed     bool          `json:"failed"` // an operation failed
}

// List returns summaries of all kept starts, newest first. It reads the disk.
func (h *History) List(ctx context.Context) ([]Summary, error) {
	if err := h.flush(ctx); err != nil {
		return nil, err
	}
	ids, err := h.names()
	if err != nil {
		return nil, err
	}
	all := []Summary{}
	for _, id := range ids {
		s, err := h.load(id)
		if errdefs.IsNotFound(err) { // deleted meanwhile, or damaged
			continue
		}
		if err != nil {
			return nil, err
		}
		all = append(all, summarize(s))
	}
	slices.SortFunc(all, func(a, b Summary) int { return b.Began.Compare(a.Began) })
	return all[:min(len(all), Kept)], nil
}

// Find returns the start of the pod with that ID. It reads the disk. The error is NotFound if the
// start is not kept.
func (h *History) Find(ctx context.Context, podID string) (Start, error) {
	if err := h.flush(ctx); err != nil {
		return Start{}, err
	}
	ids, err := h.names()
	if err != nil {
		return Start{}, err
	}
	if !slices.Contains(ids, podID) { // also any ID that is not a file name
		return Start{}, errdefs.NotFound("the start of pod sandbox %s is not among the last %d", podID, Kept)
	}
	return h.load(podID)
}

// summarize returns the summary of a start.
func summarize(s Start) Summary {
	sum := Summary{Pod: s.Pod, Took: trace.Busy(s.Operations)}
	var pulls []trace.Operation
	containers := map[string]bool{}
	for i, o := range s.Operations {
		if i == 0 {
			sum.Began = o.Began
		}
		if o.Image != "" {
			pulls = append(pulls, o)
		}
		if o.Object != "" {
			containers[o.Object] = true
		}
		sum.Failed = sum.Failed || o.Failure != ""
	}
	sum.Pull, sum.Containers = trace.Busy(pulls), len(containers)
	return sum
}
