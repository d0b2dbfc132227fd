// Package history keeps the traces of the last pod starts in memory.
//
// # Contract
//
// A Recording collects the traces of one pod's start. They are about the pod, the newest attempt of
// each container, and the image pulls for which the containers waited. Adding a trace takes two
// locks in turn and no disk. The History keeps the Kept recordings with the newest operations, also
// of removed pods. They end with the daemon (ADR 018).
package history

import (
	"slices"
	"sync"
	"time"

	"berth/internal/errdefs"
	"berth/internal/trace"
)

// Kept is the number of pod starts that are kept.
const Kept = 200

// Pod identifies a pod.
type Pod struct {
	ID        string `json:"id"`
	Namespace string `json:"namespace"`
	Name      string `json:"name"`
	UID       string `json:"uid"`
	Attempt   uint32 `json:"attempt"`
}

// Start is a pod's start. Operations are sorted by their beginnings.
type Start struct {
	Pod
	Operations []trace.Operation `json:"operations"`
}

// Summary describes a start in a list.
type Summary struct {
	Pod
	Began      time.Time     `json:"began"`
	Took       time.Duration `json:"took"` // time in which berth worked, in nanoseconds
	Pull       time.Duration `json:"pull"` // the part of this time in which images were pulled
	Containers int           `json:"containers"`
	Failed     bool          `json:"failed"` // an operation failed
}

// History has the last starts. The zero value is empty. The lock guards all fields.
type History struct {
	mu sync.Mutex
	// +checklocks:mu
	kept []*Recording // by their newest operations, oldest first
	// +checklocks:mu
	waiting []waitingPull // for pods that do not exist yet, oldest first
}

// keep makes a recording the newest. It drops the oldest if there are more than Kept.
func (h *History) keep(r *Recording) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if i := slices.Index(h.kept, r); i >= 0 {
		h.kept = slices.Delete(h.kept, i, i+1)
	} else if len(h.kept) == Kept {
		h.kept = slices.Delete(h.kept, 0, 1)
	}
	h.kept = append(h.kept, r)
}

func (h *History) recordings() []*Recording {
	h.mu.Lock()
	defer h.mu.Unlock()
	return slices.Clone(h.kept)
}

// List returns summaries of all kept starts, newest first.
func (h *History) List() []Summary {
	all := []Summary{}
	for _, r := range h.recordings() {
		all = append(all, summarize(r.start()))
	}
	slices.SortFunc(all, func(a, b Summary) int { return b.Began.Compare(a.Began) })
	return all
}

// Find returns the start of the pod with that ID. The error is NotFound if the start is not kept.
func (h *History) Find(podID string) (Start, error) {
	for _, r := range h.recordings() {
		if r.pod.ID == podID {
			return r.start(), nil
		}
	}
	return Start{}, errdefs.NotFound("the start of pod sandbox %s is not among the last %d of this daemon", podID, Kept)
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
