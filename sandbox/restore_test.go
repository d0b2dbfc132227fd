package sandbox

import (
	"slices"
	"strings"
	"testing"
	"testing/synctest"

	"google.golang.org/grpc/codes"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/internal/errdefs"
	"berth/internal/testutil"
	"berth/sandbox/state"
)

// restoreRequest is the request for the fake host's checkpoint.
func restoreRequest() state.RestoreRequest {
	side := containerConfig()
	side.Metadata.Name = "side"
	return state.RestoreRequest{Path: "/checkpoint", Config: podConfig(),
		Containers: []*runtimeapi.ContainerConfig{containerConfig(), side}}
}

func restorePod(t *testing.T, m *Manager) (podID string, containers []state.Restored) {
	t.Helper()
	podID, containers, err := m.RestorePod(t.Context(), restoreRequest())
	testutil.Must(t, err)
	return podID, containers
}

// If a step of RestorePod fails, all steps are undone. No record remains, and the same request
// succeeds afterwards.
func TestRestorePodFailures(t *testing.T) {
	for _, step := range []string{
		"import", "plan network", "plan pause", "record pod starting", "make files", "attach", "launch pause", "write hosts",
		"record pod ready", "fill shm", "find image", "find volumes", "record container creating", "make root filesystem",
		"resolve user", "validate", "compare", "fill layer", "record container created",
	} {
		t.Run(step, func(t *testing.T) {
			withFakes(t, func(t *testing.T, m *Manager, f *fakeHost) {
				f.failing(step, 1)
				_, _, err := m.RestorePod(t.Context(), restoreRequest())
				wantFailure(t, err)
				if len(f.podRecords()) > 0 || len(f.containerRecords()) > 0 || len(m.objects.pods.Snapshot()) > 0 || len(m.objects.containers.Snapshot()) > 0 {
					t.Errorf("left: records %v %v, pods %v, containers %v", f.podRecords(), f.containerRecords(), m.Pods(), m.Containers())
				}
				wantCalled(t, f, true, "import")
				if f.called("record pod starting") && step != "record pod starting" {
					wantCalled(t, f, true, podParts...) // the pod's removal includes its copy of the checkpoint
				} else {
					wantCalled(t, f, true, "discard layer")
				}
				restorePod(t, m)
			})
		})
	}
}

// RestorePod returns created containers, and executes nothing.
func TestRestorePod(t *testing.T) {
	withFakes(t, func(t *testing.T, m *Manager, f *fakeHost) {
		pod, containers := restorePod(t, m)
		if len(containers) != 2 || containers[0].Name != "main" || containers[1].Name != "side" {
			t.Fatalf("containers %v", containers)
		}
		for _, c := range containers {
			info, err := m.Container(c.ID)
			if err != nil || info.PodID != pod || info.Phase() != state.ContainerCreated || !info.Filled ||
				*info.Restore != (state.Restore{Name: c.Name, From: "/checkpoint"}) {
				t.Errorf("container %+v, %v", info, err)
			}
		}
		wantCalled(t, f, false, "launch")
		again, same := restorePod(t, m)
		if again != pod || !slices.Equal(same, containers) {
			t.Errorf("the same request returns %s %v, want %s %v", again, same, pod, containers)
		}
		f.forget()
		testutil.Must(t, m.StartContainer(t.Context(), containers[0].ID))
		wantCalled(t, f, true, "launch", "discard layer") // of the checkpoint
		wantCalled(t, f, false, "fill layer")
	})
}

func TestRestorePodRefusals(t *testing.T) {
	for _, test := range []struct {
		name   string
		change func(*state.RestoreRequest)
		want   codes.Code
	}{
		{"relative path", func(r *state.RestoreRequest) { r.Path = "checkpoint" }, codes.InvalidArgument},
		{"unknown handler", func(r *state.RestoreRequest) { r.Handler = "kata" }, codes.NotFound},
		{"no containers", func(r *state.RestoreRequest) { r.Containers = nil }, codes.InvalidArgument},
		{"same name twice", func(r *state.RestoreRequest) { r.Containers[1] = containerConfig() }, codes.InvalidArgument},
		{"a container less", func(r *state.RestoreRequest) { r.Containers = r.Containers[:1] }, codes.InvalidArgument},
		{"another container", func(r *state.RestoreRequest) { r.Containers[1].Metadata.Name = "other" }, codes.InvalidArgument},
		{"propagation", func(r *state.RestoreRequest) {
			r.Containers[0].Mounts = []*runtimeapi.Mount{{ContainerPath: "/x", HostPath: "/tmp",
				Propagation: runtimeapi.MountPropagation_PROPAGATION_BIDIRECTIONAL}}
		}, codes.FailedPrecondition},
		{"target namespace", func(r *state.RestoreRequest) {
			r.Containers[0].Linux = &runtimeapi.LinuxContainerConfig{SecurityContext: &runtimeapi.LinuxContainerSecurityContext{
				NamespaceOptions: &runtimeapi.NamespaceOption{Pid: runtimeapi.NamespaceMode_TARGET, TargetId: "c"}}}
		}, codes.FailedPrecondition},
	} {
		t.Run(test.name, func(t *testing.T) {
			withFakes(t, func(t *testing.T, m *Manager, f *fakeHost) {
				r := restoreRequest()
				test.change(&r)
				if _, _, err := m.RestorePod(t.Context(), r); errdefs.Code(err) != test.want {
					t.Errorf("RestorePod: %v, want %v", err, test.want)
				}
				if len(f.podRecords()) > 0 {
					t.Errorf("left: %v", f.podRecords())
				}
			})
		})
	}
}

// A request with the identity of a pod that it did not create is refused.
func TestRestorePodOfExistingPod(t *testing.T) {
	withFakes(t, func(t *testing.T, m *Manager, _ *fakeHost) {
		runPod(t, m)
		if _, _, err := m.RestorePod(t.Context(), restoreRequest()); errdefs.Code(err) != codes.AlreadyExists {
			t.Errorf("RestorePod: %v", err)
		}
	})
}

// An interrupted start may have changed the writable layer. The next start fills it again.
func TestStartFillsUsedLayerAgain(t *testing.T) {
	withFakes(t, func(t *testing.T, m *Manager, f *fakeHost) {
		_, containers := restorePod(t, m)
		c, err := m.objects.containers.Find(containers[0].ID)
		testutil.Must(t, err)
		c.unshared().Filled = false // as a daemon that loads the record of the interrupted start
		f.forget()
		testutil.Must(t, m.StartContainer(t.Context(), c.ID))
		want := []string{"record container starting", "discard layer", "make root filesystem", "fill layer", "launch"}
		if got := f.calls[:len(want)]; !slices.Equal(got, want) {
			t.Errorf("calls %q, want %q", got, want)
		}
	})
}

// A pod whose restore was interrupted by the end of the daemon is removed by the next one.
func TestInterruptedRestoreIsUndone(t *testing.T) {
	withFakes(t, func(t *testing.T, m *Manager, f *fakeHost) {
		f.loaded = func(f *fakeHost, found *fakeLoad) {
			spec := &state.PodSpec{ID: "p", BootID: "boot", Config: podConfig()}
			status := state.NewPodStatus(state.PodReady)
			status.Restoring, status.RunID = true, "run"
			found.pods = append(found.pods, newPod(spec, status, nil))
		}
		testutil.Must(t, (&recovery{m}).run(t.Context()))
		synctest.Wait()
		if len(f.podRecords()) > 0 {
			t.Errorf("left: %v", f.podRecords())
		}
	})
}

// While CRIU may not restore, RestorePod makes nothing, and a container of an earlier RestorePod
// stays created. gVisor's restores go on.
func TestRestoresAreRefused(t *testing.T) {
	for _, tt := range []struct {
		name           string
		refuse, permit func(*Manager)
		want           string
	}{
		{"off", func(m *Manager) { m.cfg.Restores = state.RestoreOff },
			func(m *Manager) { m.cfg.Restores = state.RestoreTrusted }, "checkpoint.restore is off"},
		{"SELinux", func(m *Manager) { m.node.Host.SELinux = true },
			func(m *Manager) { m.node.Host.SELinux = false }, "this node has SELinux"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			withFakes(t, func(t *testing.T, m *Manager, f *fakeHost) {
				wantRefusal := func(err error) {
					t.Helper()
					if errdefs.Code(err) != codes.FailedPrecondition || !strings.Contains(err.Error(), tt.want) {
						t.Errorf("%v", err)
					}
				}
				_, containers := restorePod(t, m)
				tt.refuse(m)
				f.forget()
				wantRefusal(m.StartContainer(t.Context(), containers[0].ID))
				info, err := m.Container(containers[0].ID)
				testutil.Must(t, err)
				if info.Phase() != state.ContainerCreated {
					t.Errorf("the container is %v", info.Phase())
				}
				r := restoreRequest()
				r.Config.Metadata.Name = "other"
				_, _, err = m.RestorePod(t.Context(), r)
				wantRefusal(err)
				wantCalled(t, f, false, "import", "launch", "record container starting")
				tt.permit(m)
				testutil.Must(t, m.StartContainer(t.Context(), containers[0].ID))
			})
			withFakes(t, func(t *testing.T, m *Manager, f *fakeHost) {
				withSandboxes(t, m)
				tt.refuse(m)
				f.savedBy = "runsc version 1"
				r := restoreRequest()
				r.Handler, r.Containers = "gvisor", r.Containers[:1]
				_, containers, err := m.RestorePod(t.Context(), r)
				testutil.Must(t, err)
				testutil.Must(t, m.StartContainer(t.Context(), containers[0].ID))
			})
		})
	}
}
