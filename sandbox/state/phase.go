package state

import (
	"slices"

	"berth/internal/errdefs"
)

// Phase is a step in the lifecycle of a pod or container. Only PodStatus.Move and
// ContainerStatus.Move change it, and only along the tables below.
type Phase string

// Phases of a pod. Its record is written before a pod enters Starting, and again at Ready, Stopping
// and Removing.
const (
	PodStarting Phase = "starting"  // its parts may exist on the host; no client has seen it
	PodReady    Phase = "ready"     // its pause runs and its network is up
	PodNotReady Phase = "not ready" // its pause has exited; its network remains until StopPodSandbox
	PodStopping Phase = "stopping"  // nothing new starts in it; network, pause and mounts are being removed
	PodStopped  Phase = "stopped"   // only its files remain
)

// Phases of a container. Its record is written before a container enters Creating, and again at
// Created, Starting, Exited and Removing. It is not written at Running, because the shim directory
// records the start.
const (
	ContainerCreating Phase = "creating" // its parts may exist on the host; no client has seen it
	ContainerCreated  Phase = "created"
	ContainerStarting Phase = "starting" // a launcher has the request; the shim directory records its progress
	ContainerRunning  Phase = "running"
	ContainerExited   Phase = "exited"
)

// Phases of both. Removing is recorded. Removed means that everything is removed, even the record.
const (
	Removing Phase = "removing"
	Removed  Phase = "removed"
)

// podMoves are the transitions of a pod.
var podMoves = map[Phase][]Phase{
	PodStarting: {PodReady, Removing},
	// A ready pod becomes Removing if its record could not be written, or if it is removed without
	// a stop.
	PodReady:    {PodNotReady, PodStopping, Removing},
	PodNotReady: {PodStopping, Removing},
	PodStopping: {PodStopped, Removing},
	PodStopped:  {Removing},
	Removing:    {Removed},
}

// containerMoves are the transitions of a container.
var containerMoves = map[Phase][]Phase{
	ContainerCreating: {ContainerCreated, Removing},
	// To Exited: a restart of the node ended the pod.
	ContainerCreated:  {ContainerStarting, ContainerExited, Removing},
	ContainerStarting: {ContainerRunning, ContainerExited, ContainerCreated, Removing},
	// After a restart of the daemon: to Created if no process was started, to Removing if the pod's
	// record was lost.
	ContainerRunning: {ContainerExited, ContainerCreated, Removing},
	ContainerExited:  {Removing},
	Removing:         {Removed},
}

// IsContainerPhase reports whether this version knows the phase of a container.
func IsContainerPhase(p Phase) bool {
	_, known := containerMoves[p]
	return known
}

// move returns the new phase. The error is Internal, because a transition that is not in the table
// is a bug.
func move(moves map[Phase][]Phase, object string, from, to Phase) (Phase, error) {
	if !slices.Contains(moves[from], to) {
		return from, errdefs.Internal("%s cannot change its phase from %q to %q", object, from, to)
	}
	return to, nil
}

// Recorded names of the phases. Earlier versions read these records too. A phase unknown to them is
// therefore recorded as the nearest known phase, and recovery restores the difference.
var (
	podRecorded = map[Phase]Phase{
		PodStarting: "starting",
		PodReady:    "ready",
		PodNotReady: "ready",
		PodStopping: "stopped",
		PodStopped:  "stopped",
		Removing:    "removing",
	}
	containerRecorded = map[Phase]Phase{
		ContainerCreating: "created",
		ContainerCreated:  "created",
		ContainerStarting: "starting",
		ContainerRunning:  "running",
		ContainerExited:   "exited",
		Removing:          "removing",
	}
)

// loadedPodPhase returns the phase for a recorded pod phase. A recorded stop may be incomplete. An
// unknown phase stays unchanged. Recovery refuses it, and the daemon does not start.
func loadedPodPhase(recorded Phase) Phase {
	switch recorded {
	case podRecorded[PodStopped]:
		return PodStopping
	case PodNotReady, PodStopping, Removed: // no version records these
		return "unknown: " + recorded
	}
	return recorded
}

// loadedContainerPhase returns the phase for a recorded container phase. published reports whether
// its creation was completed.
func loadedContainerPhase(recorded Phase, published bool) Phase {
	if !published && recorded != Removing {
		return ContainerCreating
	}
	return recorded
}
