package history

import (
	"cmp"
	"slices"
	"sync"

	"berth/internal/trace"
)

const (
	// maxPulls is the number of images per pod whose newest pull is kept.
	maxPulls = 16
	// maxContainerOperations is the number of creations and starts of containers per pod. Only a
	// pod with many container names has more.
	maxContainerOperations = 256
)

// Recording collects the traces of one pod's start. All methods of a nil Recording do nothing. The
// lock guards entries.
type Recording struct {
	history *History
	pod     Pod

	mu sync.Mutex
	// +checklocks:mu
	entries []entry
}

// entry is a trace with its subject.
type entry struct {
	subject
	trace *trace.Trace
}

// subject is the pod or container of an operation.
type subject struct {
	operation string
	container string // name; empty: the pod
	image     string // of a pull
	attempt   uint32
}

// replaces reports whether an operation makes the trace of an earlier operation obsolete. That is
// so for the same operation, and for an earlier attempt of the same container.
func (s subject) replaces(o subject) bool {
	if s.image != o.image || s.container != o.container {
		return false
	}
	return s.operation == o.operation || s.container != "" && s.attempt > o.attempt
}

// Record returns a recording for a pod. The History lists it from its first operation on.
func (h *History) Record(pod Pod) *Recording {
	r := &Recording{history: h, pod: pod}
	for _, p := range h.take(pod) {
		r.AddPull(p.trace, p.image)
	}
	return r
}

// maxWaiting is the number of pulls that are kept for pods that do not exist yet.
const maxWaiting = 32

// waitingPull is a pull for a pod that does not exist yet. berth run pulls before it runs the pod.
type waitingPull struct {
	pod   Pod // without ID
	image string
	trace *trace.Trace
}

// AddPull keeps a pull for a pod that does not exist yet. pod has no ID.
func (h *History) AddPull(pod Pod, image string, t *trace.Trace) {
	if t == nil {
		return
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if len(h.waiting) == maxWaiting {
		h.waiting = slices.Delete(h.waiting, 0, 1)
	}
	h.waiting = append(h.waiting, waitingPull{pod, image, t})
}

// take removes and returns the pulls for a pod.
func (h *History) take(pod Pod) (pulls []waitingPull) {
	pod.ID = ""
	h.mu.Lock()
	defer h.mu.Unlock()
	h.waiting = slices.DeleteFunc(h.waiting, func(p waitingPull) bool {
		if p.pod == pod {
			pulls = append(pulls, p)
		}
		return p.pod == pod
	})
	return pulls
}

// AddPod adds the start of the pod.
func (r *Recording) AddPod(t *trace.Trace) { r.add(t, subject{}) }

// AddContainer adds the creation or the start of a container.
func (r *Recording) AddContainer(t *trace.Trace, name string, attempt uint32) {
	r.add(t, subject{container: name, attempt: attempt})
}

// AddPull adds the pull of an image for a container of the pod.
func (r *Recording) AddPull(t *trace.Trace, image string) { r.add(t, subject{image: image}) }

// add adds an operation, which may still run. t may be nil.
func (r *Recording) add(t *trace.Trace, s subject) {
	if r == nil || t == nil {
		return
	}
	s.operation = t.Name()
	r.mu.Lock()
	r.entries = slices.DeleteFunc(r.entries, func(e entry) bool { return s.replaces(e.subject) })
	r.entries = append(r.entries, entry{s, t})
	r.entries = keepNewest(r.entries, entry.isPull, maxPulls)
	r.entries = keepNewest(r.entries, entry.isContainer, maxContainerOperations)
	r.mu.Unlock()
	r.history.keep(r)
}

func (e entry) isPull() bool      { return e.image != "" }
func (e entry) isContainer() bool { return e.container != "" }

// keepNewest removes the oldest entries of a kind if there are more than limit.
func keepNewest(all []entry, is func(entry) bool, limit int) []entry {
	n := 0
	for _, e := range all {
		if is(e) {
			n++
		}
	}
	return slices.DeleteFunc(all, func(e entry) bool {
		drop := n > limit && is(e)
		if drop {
			n--
		}
		return drop
	})
}

// Operations returns the operations so far, sorted by their beginnings.
func (r *Recording) Operations() []trace.Operation {
	if r == nil {
		return nil
	}
	r.mu.Lock()
	entries := slices.Clone(r.entries)
	r.mu.Unlock()
	var all []trace.Operation
	for _, e := range entries {
		o := e.trace.Operation(e.container, e.attempt)
		o.Image = e.image
		all = append(all, o)
	}
	slices.SortFunc(all, func(a, b trace.Operation) int { return cmp.Compare(a.Monotonic, b.Monotonic) })
	return all
}

// start returns the start so far.
func (r *Recording) start() Start { return Start{Pod: r.pod, Operations: r.Operations()} }
