package state

import (
	"slices"
	"testing"

	"google.golang.org/grpc/codes"

	"berth/internal/errdefs"
)

var (
	podPhases       = []Phase{PodStarting, PodReady, PodNotReady, PodStopping, PodStopped, Removing, Removed}
	containerPhases = []Phase{ContainerCreating, ContainerCreated, ContainerStarting, ContainerRunning, ContainerExited, Removing, Removed}
)

// Move changes the phase for each transition of the table. It refuses all other pairs with Internal
// and leaves the phase unchanged.
func TestPodTransitions(t *testing.T) {
	t.Parallel()
	allowed := []string{
		"starting→ready", "starting→removing",
		"ready→not ready", "ready→stopping", "ready→removing",
		"not ready→stopping", "not ready→removing",
		"stopping→stopped", "stopping→removing",
		"stopped→removing",
		"removing→removed",
	}
	for _, from := range podPhases {
		for _, to := range podPhases {
			name := string(from + "→" + to)
			t.Run(name, func(t *testing.T) {
				status := NewPodStatus(from)
				checkMove(t, status.Move(to), status.Phase(), from, to, slices.Contains(allowed, name))
			})
		}
	}
}

func TestContainerTransitions(t *testing.T) {
	t.Parallel()
	allowed := []string{
		"creating→created", "creating→removing",
		"created→starting", "created→exited", "created→removing",
		"starting→running", "starting→exited", "starting→created", "starting→removing",
		"running→exited", "running→created", "running→removing",
		"exited→removing",
		"removing→removed",
	}
	for _, from := range containerPhases {
		for _, to := range containerPhases {
			name := string(from + "→" + to)
			t.Run(name, func(t *testing.T) {
				status := NewContainerStatus(from)
				checkMove(t, status.Move(to), status.Phase(), from, to, slices.Contains(allowed, name))
			})
		}
	}
}

func checkMove(t *testing.T, err error, got, from, to Phase, allowed bool) {
	t.Helper()
	if allowed && (err != nil || got != to) {
		t.Errorf("phase %q, %v", got, err)
	}
	if !allowed && (errdefs.Code(err) != codes.Internal || got != from) {
		t.Errorf("phase %q, %v; want %q and an Internal error", got, err, from)
	}
}

// Each phase but Removed has a recorded name, so that the next daemon can restore it.
func TestEachPhaseIsRecorded(t *testing.T) {
	t.Parallel()
	for _, phase := range podPhases {
		if _, ok := podRecorded[phase]; ok == (phase == Removed) {
			t.Errorf("pod phase %q: recorded %t", phase, ok)
		}
	}
	for _, phase := range containerPhases {
		if _, ok := containerRecorded[phase]; ok == (phase == Removed) {
			t.Errorf("container phase %q: recorded %t", phase, ok)
		}
	}
}
