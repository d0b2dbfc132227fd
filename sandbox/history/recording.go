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
	adopted bool // an earlier daemon started the pod

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

func subjectOf(o trace.Operation) subject {
	return subject{operation: o.Name(), container: o.Object, image: o.Image, attempt: o.Attempt}
}

// Record returns a recording for a new pod. A nil History records nothing.
func (h *History) Record(pod Pod) *Recording {
	if h == nil {
		return nil
	}
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
	if h == nil || t == nil {
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

// Adopt returns a recording for a pod of an earlier daemon. Its operations are added to the
// operations on disk.
func (h *History) Adopt(pod Pod) *Recording {
	r := h.Record(pod)
	if r != nil {
		r.adopted = true
	}
	return r
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
	r.history.note(r)
}

func (e entry) isPull() bool      { return e.image != "" }
func (e entry) isContainer() bool { return e.container != "" }

// keepNewest removes the oldest elements of a kind if there are more than limit.
func keepNewest[T any](all []T, is func(T) bool, limit int) []T {
	n := 0
	for _, e := range all {
		if is(e) {
			n++
		}
	}
	return slices.DeleteFunc(all, func(e T) bool {
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
	slices.SortFunc(all, compare)
	return all
}

// start returns the start so far. running reports whether one of its operations still runs.
func (r *Recording) start() (s Start, running bool) {
	s = Start{Pod: r.pod, Operations: r.Operations()}
	for _, o := range s.Operations {
		_, ended := o.Took()
		running = running || !ended
	}
	return s, running
}

// merge adds operations to earlier ones, and drops those that they replace.
func merge(earlier, later []trace.Operation) []trace.Operation {
	all := slices.DeleteFunc(slices.Clone(earlier), func(old trace.Operation) bool {
		return slices.ContainsFunc(later, func(o trace.Operation) bool { return subjectOf(o).replaces(subjectOf(old)) })
	})
	all = append(all, later...)
	slices.SortFunc(all, compare)
	return keepNewest(all, func(o trace.Operation) bool { return o.Object != "" }, maxContainerOperations)
}

func compare(a, b trace.Operation) int { return cmp.Compare(a.Monotonic, b.Monotonic) }
