package state

import (
	"context"
	"time"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	"google.golang.org/protobuf/proto"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/cni"
	"berth/internal/nri"
	"berth/internal/task"
	"berth/oci"
	"berth/oci/users"
)

// Locked holds a value that only the holder of an object's lock can access. One operation at a time
// holds the lock. Others wait for it with a deadline, and verbose Status lists the wait.
type Locked[T any] struct {
	lock  task.Lock
	value *T
}

// NewLocked returns a value with a free lock.
func NewLocked[T any](value T) Locked[T] { return Locked[T]{task.NewLock(), &value} }

// With calls op with the value while it holds the lock. what and object name the operation. The
// error comes from op, or from ctx if ctx ends while op waits for the lock.
func (l *Locked[T]) With(ctx context.Context, tasks *task.Runner, what, object string, op func(*T) error) error {
	return tasks.WithLock(ctx, l.lock, what, object, func() error { return op(l.value) })
}

// Take acquires the lock and returns the value. The caller calls release.
func (l *Locked[T]) Take(
	ctx context.Context, tasks *task.Runner, what, object string,
) (value *T, release func(), err error) {
	release, err = tasks.Acquire(ctx, l.lock, what, object)
	if err != nil {
		return nil, nil, err
	}
	return l.value, release, nil
}

// Unshared returns the value without the lock, before any other goroutine can reach the object.
func (l *Locked[T]) Unshared() *T { return l.value }

// PodStatus holds the mutable properties of a pod. Access needs the pod's lock.
type PodStatus struct {
	phase      Phase
	RunID      string                                       `json:"runID,omitempty"`   // of the state directory (see Run); empty in records of earlier versions
	Resources  *runtimeapi.UpdatePodSandboxResourcesRequest `json:"-"`                 // of the last update; nil: as in the config
	Network    *cni.Attachment                              `json:"network,omitempty"` // set before CNI ADD, cleared after DEL
	IPs        []string                                     `json:"ips,omitempty"`     // primary address first; empty with the host's network
	PausePID   int                                          `json:"pausePID,omitempty"`
	PauseStart uint64                                       `json:"pauseStart,omitempty"` // start time of the pause, in clock ticks
	Undo       *Undo                                        `json:"undo,omitempty"`       // nil: no attempt to undo it has failed
	Restoring  bool                                         `json:"restoring,omitempty"`  // RestorePod has not created all containers; a later daemon removes the pod
	Presented  bool                                         `json:"-"`                    // plugins were called with it
	TakenDown  bool                                         `json:"-"`                    // takeDown has succeeded; a later daemon repeats it

	shown *runtimeapi.PodSandboxConfig // the config with the values of Resources; nil if there was no update
}

// Undo describes the failed attempts to undo a pod that no client can see.
type Undo struct {
	Failures int       `json:"failures"`
	Since    time.Time `json:"since"` // the first failure
	Error    string    `json:"error"` // of the last attempt
}

// NewPodStatus returns the status of a pod in that phase.
func NewPodStatus(phase Phase) PodStatus { return PodStatus{phase: phase} }

// Phase returns the pod's phase.
func (s *PodStatus) Phase() Phase { return s.phase }

// Move changes the phase. The error is Internal for a transition that the table lacks.
func (s *PodStatus) Move(to Phase) (err error) {
	s.phase, err = move(podMoves, "a pod", s.phase, to)
	return err
}

// SetResources replaces the pod's resources. It does not modify config, because the fingerprint of
// config identifies retries of RunPodSandbox.
func (s *PodStatus) SetResources(config *runtimeapi.PodSandboxConfig,
	update *runtimeapi.UpdatePodSandboxResourcesRequest) {
	s.Resources, s.shown = update, nil
	if update == nil {
		return
	}
	s.shown = proto.CloneOf(config)
	if s.shown.Linux == nil {
		s.shown.Linux = &runtimeapi.LinuxPodSandboxConfig{}
	}
	s.shown.Linux.Overhead, s.shown.Linux.Resources = update.GetOverhead(), update.GetResources()
}

// ContainerStatus holds the mutable properties of a container. Access needs the container's lock.
type ContainerStatus struct {
	phase     Phase
	RunID     string                              `json:"runID,omitempty"`  // of the state directory, as in PodStatus
	Resources *runtimeapi.LinuxContainerResources `json:"-"`                // in force; replaced, never modified
	Limits    *nri.Limits                         `json:"limits,omitempty"` // in force, set by plugins

	// The creation sets these before the container is published. They do not change afterwards.
	User       users.User            `json:"user"`
	Anonymous  []oci.AnonymousVolume `json:"anonymousVolumes,omitempty"` // at VOLUMEs of the image; versions up to 0.2.0 made none
	Adjustment *nri.Adjustment       `json:"adjustment,omitempty"`       // changes by plugins
	Process    *specs.Process        `json:"process,omitempty"`          // template of execs; nil until the creation is complete
	Described  *specs.Spec           `json:"described,omitempty"`        // what plugins see besides Process

	Filled    bool      `json:"filled,omitempty"`   // the writable layer has the files of the checkpoint, and no start has changed them
	StartedAt time.Time `json:"startedAt,omitzero"` // time of the StartContainer call; a snapshot of a running container has the time of init's start
	Exit      *Exit     `json:"exit,omitempty"`     // nil unless it has exited
	Lazy      bool      `json:"lazy,omitempty"`     // a layer was incomplete at its start, see proto.Launch.Keep
	// WrongFiles says why the container's files may be wrong. The container is then killed.
	WrongFiles string `json:"distrust,omitempty"`
	PID        int    `json:"-"` // of the init, on the host; 0 unless it runs
	Presented  bool   `json:"-"` // plugins were called with it
}

// NewContainerStatus returns the status of a container in that phase.
func NewContainerStatus(phase Phase) ContainerStatus { return ContainerStatus{phase: phase} }

// Phase returns the container's phase.
func (s *ContainerStatus) Phase() Phase { return s.phase }

// Move changes the phase. The error is Internal for a transition that the table lacks.
func (s *ContainerStatus) Move(to Phase) (err error) {
	s.phase, err = move(containerMoves, "a container", s.phase, to)
	return err
}

// Exit describes the exit of a container.
type Exit struct {
	Code       int32     `json:"code"`
	Reason     string    `json:"reason"`
	Message    string    `json:"message,omitempty"`
	StartedAt  time.Time `json:"startedAt,omitzero"`
	FinishedAt time.Time `json:"finishedAt"`
}

// Reasons of an exit. kubelet and users of other runtimes expect these names.
const (
	ReasonCompleted  = "Completed"
	ReasonError      = "Error"
	ReasonOOMKilled  = "OOMKilled"
	ReasonStartError = "StartError"
	ReasonShimLost   = "ShimLost" // the shim was killed, so the exit code is unknown
	ReasonUnknown    = "Unknown"  // the node was restarted

	// ReasonWrongFiles means that the files of the image may have been wrong, because the table of
	// contents of a layer was wrong or not proven.
	ReasonWrongFiles = "WrongFiles"
)

// CodeUnknown is the exit code of an unobserved exit. Other runtimes report the same.
const CodeUnknown = 255

// CodeStartError is the exit code of a container that never ran.
const CodeStartError = 128
