package sandbox

import (
	"os"
	"testing"
	"testing/synctest"
	"time"

	"github.com/opencontainers/go-digest"
	"google.golang.org/grpc/codes"

	"berth/internal/errdefs"
	"berth/internal/pidfd"
	"berth/internal/testutil"
	"berth/sandbox/state"
	"berth/shim/proto"
)

// A container is killed only if its layers were incomplete at its start, still are, and nothing has
// kept their fanotify group.
func TestContainersOfLostLayersAreKilled(t *testing.T) {
	for name, test := range map[string]struct {
		lost, lazy, incomplete, killed bool
	}{
		"lost":              {true, true, true, true},
		"kept":              {false, true, true, false},
		"complete since":    {true, true, false, false},
		"complete at start": {true, false, true, false},
	} {
		t.Run(name, func(t *testing.T) {
			withFakes(t, func(t *testing.T, m *Manager, f *fakeHost) {
				start, err := pidfd.StartTime(os.Getpid())
				testutil.Must(t, err)
				f.running["c"] = proto.PIDs{InitPID: 78, StartedAt: time.Unix(100, 0)}
				f.loaded = func(f *fakeHost, found *fakeLoad) {
					recovered(state.PodReady, state.ContainerStarting)(f, found)
					status := found.pods[0].status.Unshared()
					status.PausePID, status.PauseStart = os.Getpid(), start
					found.containers[0].status.Unshared().Lazy = test.lazy
				}
				f.incomplete, m.cfg.LayersLost = test.incomplete, test.lost
				testutil.Must(t, (&recovery{m}).run(t.Context()))
				synctest.Wait()
				wantCalled(t, f, test.killed, "kill")
			})
		})
	}
}

// A start records that the layers are incomplete, and execs hold the files of the layers open.
func TestStartOnIncompleteLayers(t *testing.T) {
	for _, incomplete := range []bool{false, true} {
		withFakes(t, func(t *testing.T, m *Manager, f *fakeHost) {
			f.incomplete = incomplete
			c := startContainer(t, m, runPod(t, m))
			found, err := m.objects.containers.Find(c)
			testutil.Must(t, err)
			if got := found.status.Unshared().Lazy; got != incomplete {
				t.Errorf("recorded %v, want %v", got, incomplete)
			}
			target, err := streamTargets{m.objects, m.images}.StreamContainer(c)
			testutil.Must(t, err)
			if (len(target.Keep) == proto.KeptFDs) != incomplete {
				t.Errorf("execs keep %d files", len(target.Keep))
			}
		})
	}
}

var testLayer = digest.FromString("layer")

// A container on a layer with a wrong table of contents is killed, whether it runs or is being
// started, and its exit says why. Others are not.
func TestContainersWithWrongFilesAreKilled(t *testing.T) {
	for name, test := range map[string]struct {
		layer  digest.Digest
		killed bool
	}{
		"its layer":     {testLayer, true},
		"another layer": {digest.FromString("other"), false},
	} {
		t.Run(name, func(t *testing.T) {
			withFakes(t, func(t *testing.T, m *Manager, f *fakeHost) {
				f.layers = []digest.Digest{testLayer}
				id := startContainer(t, m, runPod(t, m))
				m.KillOnLayer(test.layer, "the table lied")
				synctest.Wait()
				c, err := m.objects.containers.Find(id)
				testutil.Must(t, err)
				exit := c.Info().Exit
				wantCalled(t, f, test.killed, "kill")
				if (exit != nil) != test.killed {
					t.Fatalf("exit %+v", exit)
				}
				if exit != nil && (exit.Reason != state.ReasonWrongFiles || exit.Message != "the table lied") {
					t.Errorf("exit %+v", exit)
				}
			})
		})
	}
}

// A created container whose files were wrong does not start, also after a restart of the daemon.
func TestCreatedWithWrongFilesDoesNotStart(t *testing.T) {
	withFakes(t, func(t *testing.T, m *Manager, f *fakeHost) {
		f.layers = []digest.Digest{testLayer}
		id := createContainer(t, m, runPod(t, m))
		m.KillOnLayer(testLayer, "the table lied")
		synctest.Wait()
		testutil.WantError(t, m.StartContainer(t.Context(), id), codes.FailedPrecondition)
		wantCalled(t, f, false, "launch", "kill")
		c, err := m.objects.containers.Find(id)
		testutil.Must(t, err)
		var noted string
		testutil.Must(t, m.control.lockContainer(t.Context(), c, "read", func(c lockedContainer) error { noted = c.WrongFiles; return nil }))
		if noted != "the table lied" {
			t.Errorf("noted %q", noted)
		}
	})
}

// A container does not start on a layer that cannot be completed. If the layer turns out to be
// wrong during the start, the container is killed after it.
func TestStartOnWrongLayer(t *testing.T) {
	wrong := errdefs.New(codes.DataLoss, "the table lied")
	withFakes(t, func(t *testing.T, m *Manager, f *fakeHost) {
		id := createContainer(t, m, runPod(t, m))
		f.unusable.Store(&wrong)
		testutil.WantError(t, m.StartContainer(t.Context(), id), codes.DataLoss)
		wantCalled(t, f, false, "launch")
		f.unusable.Store(nil)
		f.launched = func() { f.unusable.Store(&wrong) }
		testutil.Must(t, m.StartContainer(t.Context(), id))
		synctest.Wait()
		c, err := m.objects.containers.Find(id)
		testutil.Must(t, err)
		if exit := c.Info().Exit; exit == nil || exit.Reason != state.ReasonWrongFiles {
			t.Errorf("exit %+v", exit)
		}
	})
}

// A container that is being started when its layer turns out to be wrong is killed after the start,
// however long that takes.
func TestStartingContainerWithWrongFilesIsKilled(t *testing.T) {
	for _, takes := range []time.Duration{0, noteTimeout / 2, 10 * noteTimeout} {
		withFakes(t, func(t *testing.T, m *Manager, f *fakeHost) {
			f.layers = []digest.Digest{testLayer}
			id := createContainer(t, m, runPod(t, m))
			f.launched = func() {
				m.KillOnLayer(testLayer, "the table lied")
				time.Sleep(takes) // in the bubble's time
			}
			testutil.Must(t, m.StartContainer(t.Context(), id))
			testutil.Eventually(t, "the container is killed", func() bool {
				c, err := m.objects.containers.Find(id)
				testutil.Must(t, err)
				exit := c.Info().Exit
				return exit != nil && exit.Reason == state.ReasonWrongFiles && exit.Message == "the table lied"
			})
		})
	}
}
