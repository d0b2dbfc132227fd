package sandbox

import (
	"os"
	"sync/atomic"
	"time"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/internal/task"
	"berth/sandbox/history"
	"berth/sandbox/runtime"
	"berth/sandbox/state"
	"berth/sandbox/stats"
	"berth/shim/ociruntime"
)

// objects are all pods and containers, including unpublished ones.
type objects struct {
	pods       *state.Index[*pod]
	containers *state.Index[*container]
}

func newObjects() objects {
	return objects{state.NewIndex[*pod]("pod sandbox"), state.NewIndex[*container]("container")}
}

func (o objects) containersOf(podID string) []*container {
	var of []*container
	for _, c := range o.containers.Snapshot() {
		if c.PodID == podID {
			of = append(of, c)
		}
	}
	return of
}

// has reports whether a pod or container has that ID.
func (o objects) has(id string) bool {
	_, pod := o.pods.Get(id)
	_, ctr := o.containers.Get(id)
	return pod || ctr
}

// visible reports whether clients see a pod or container with that ID.
func (o objects) visible(id string) bool {
	pod, isPod := o.pods.Get(id)
	ctr, isContainer := o.containers.Get(id)
	return isPod && pod.Visible() || isContainer && ctr.Visible()
}

// runtimeOf returns the runtime of a container. It is nil for libcontainer, and if the pod's record
// was lost.
func (o objects) runtimeOf(c *container) *ociruntime.Runtime {
	p, known := o.pods.Get(c.PodID)
	if !known {
		return nil
	}
	return p.Runtime.Program()
}

// pod owns a pod: its Spec, its Status and its pause. Only lockPod gives access to the Status.
type pod struct {
	*state.PodSpec
	status   state.Locked[state.PodStatus]
	info     atomic.Pointer[state.Pod]      // the published snapshot; nil until the pod is ready
	pause    atomic.Pointer[os.File]        // pidfd, owned by the pod's watcher
	meter    atomic.Pointer[stats.PodMeter] // nil if there is no pause; owned by the pod's watcher
	launched atomic.Int64                   // process ID of the pause before info has it; 0: not launched yet, or launched by an earlier daemon
	start    *history.Recording             // the traces of its start; may be nil; never changed
	stopped  atomic.Bool                    // this daemon has started the pod's stop, and logs the end of the stop

	planned *specs.Spec // runtime-spec of the pause, until the launch; access needs the pod's lock

	undoing    atomic.Bool // no client can see it, and it is being removed
	unreleased atomic.Bool // its undo has failed, and CNI DEL is due

	// sandbox is held while a container starts in the pod's sandbox, and while the sandbox is
	// saved. It is acquired after the locks of containers. Only sandboxing runtimes use it.
	sandbox task.Lock
}

// lockedPod is a pod whose lock the caller holds.
type lockedPod struct {
	*pod
	*state.PodStatus
}

func newPod(spec *state.PodSpec, status state.PodStatus, start *history.Recording) *pod {
	return &pod{PodSpec: spec, status: state.NewLocked(status), start: start, sandbox: task.NewLock()}
}

// Visible implements state.Indexed.
func (p *pod) Visible() bool { return p.info.Load() != nil }

// Info implements state.Published.
func (p *pod) Info() *state.Pod { return p.info.Load() }

// Birth implements state.Published.
func (p *pod) Birth() state.Birth { return state.Birth{At: p.CreatedAt, ID: p.ID} }

// unshared gives access to a pod that is not locked. Planning and recovery use it, while no other
// goroutine can reach the pod.
func (p *pod) unshared() lockedPod { return lockedPod{p, p.status.Unshared()} }

func (p lockedPod) snapshot() *state.Pod { return p.PodStatus.Snapshot(p.PodSpec) }

// container owns a container: its Spec, its Status and its process. Only lockContainer gives access
// to the Status.
type container struct {
	*state.ContainerSpec
	status state.Locked[state.ContainerStatus]

	stopNotified atomic.Pointer[chan struct{}]   // closed when plugins have been notified of the exit; nil: no notification is pending
	running      atomic.Pointer[running]         // nil without a shim
	launching    runtime.CancelSlot              // cancels its creation or launch
	dumping      runtime.StopGate                // stops cancel its checkpoints
	info         atomic.Pointer[state.Container] // the published snapshot; nil until created
	sample       stats.SampleState               // of its writable layer
	describing   atomic.Bool                     // a RuntimeSpec call inspects its mounts

	// planned is the runtime-spec until the start. Access needs the container's lock. It is nil if
	// the spec must be built from the record. This happens after a restart of the daemon, and after
	// a change of the limits. It also happens if the container joins the PID namespace of another
	// container, which may end before the start.
	planned *specs.Spec
}

// running is a container that has a shim.
type running struct {
	*runtime.Running
	meter *stats.ContainerMeter
}

// lockedContainer is a container whose lock the caller holds.
type lockedContainer struct {
	*container
	*state.ContainerStatus
}

func newContainer(spec *state.ContainerSpec, status state.ContainerStatus) *container {
	return &container{ContainerSpec: spec, status: state.NewLocked(status)}
}

// joinsTarget reports whether the container joins the PID namespace of another container (ephemeral
// containers).
func (c *container) joinsTarget() bool {
	return c.Config.GetLinux().GetSecurityContext().GetNamespaceOptions().GetPid() == runtimeapi.NamespaceMode_TARGET
}

// Visible implements state.Indexed.
func (c *container) Visible() bool { return c.info.Load() != nil }

// Info implements state.Published.
func (c *container) Info() *state.Container { return c.info.Load() }

// Birth implements state.Published.
func (c *container) Birth() state.Birth { return state.Birth{At: c.CreatedAt, ID: c.ID} }

// unshared is pod.unshared for a container.
func (c *container) unshared() lockedContainer { return lockedContainer{c, c.status.Unshared()} }

func (c lockedContainer) snapshot() *state.Container {
	var pid int
	var startedAt time.Time
	if run := c.running.Load(); run != nil {
		pid, startedAt = run.PID, run.StartedAt
	}
	return c.ContainerStatus.Snapshot(c.ContainerSpec, pid, startedAt)
}
