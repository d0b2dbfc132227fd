package sandbox

import (
	"os"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/internal/pidfd"
	"berth/internal/task"
	"berth/internal/testutil"
	"berth/sandbox/state"
	"berth/shim/proto"
)

// podParts are the calls that remove a pod from the host.
var podParts = []string{"remove processes", "remove mounts", "remove netns", "remove runtime state", "remove files", "remove pod record"}

// containerParts are the calls that remove a container from the host.
var containerParts = []string{"remove processes", "release layers", "release volumes", "discard layer", "remove container record"}

// If a step of RunPodSandbox fails, all steps are undone. No record remains, and the same request
// succeeds afterwards.
func TestRunPodSandboxFailures(t *testing.T) {
	for _, test := range []struct {
		step     string
		recorded bool // the pod was recorded before, so its parts may exist
	}{
		{"plan network", false},
		{"plan pause", false},
		{"record pod starting", false},
		{"make files", true},
		{"attach", true},
		{"launch pause", true},
		{"write hosts", true},
		{"record pod ready", true},
	} {
		t.Run(test.step, func(t *testing.T) {
			withFakes(t, func(t *testing.T, m *Manager, f *fakeHost) {
				f.failing(test.step, 1)
				_, err := m.RunPodSandbox(t.Context(), podConfig(), "")
				wantFailure(t, err)
				if len(f.podRecords()) > 0 || len(m.objects.pods.Snapshot()) > 0 || len(m.Pods()) > 0 {
					t.Errorf("left: records %v, pods %v", f.podRecords(), m.Pods())
				}
				wantCalled(t, f, test.recorded, podParts...)
				wantCalled(t, f, test.recorded, "detach")
				id := runPod(t, m)
				if p, err := m.Pod(id); err != nil || !p.Ready() || f.recordedPod(id) != state.PodReady {
					t.Errorf("second attempt: %+v, %v", p, err)
				}
			})
		})
	}
}

// The kind of pause is decided once, in the plan. All later steps get it.
func TestPauseKindIsPlanned(t *testing.T) {
	for _, kind := range []proto.PauseKind{proto.PlainPause, proto.ContainerPause} {
		t.Run(string(kind), func(t *testing.T) {
			withFakes(t, func(t *testing.T, m *Manager, f *fakeHost) {
				f.kind = kind
				runPod(t, m)
				want := []string{"plan", "expect", "record", "launch", "record"}
				for i := range want {
					want[i] += " " + string(kind)
				}
				if !slices.Equal(f.kinds, want) {
					t.Errorf("steps %q, want %q", f.kinds, want)
				}
			})
		})
	}
}

// A failed undo step is retried in the background.
func TestUndoOfRunPodSandboxIsRetried(t *testing.T) {
	for _, step := range append([]string{"detach"}, podParts...) {
		t.Run(step, func(t *testing.T) {
			withFakes(t, func(t *testing.T, m *Manager, f *fakeHost) {
				f.failing("record pod ready", 1)
				f.failing(step, 3)
				_, err := m.RunPodSandbox(t.Context(), podConfig(), "")
				wantFailure(t, err)
				if len(f.podRecords()) != 1 {
					t.Errorf("records %v: the record must stay until all steps are undone", f.podRecords())
				}
				time.Sleep(time.Minute)
				synctest.Wait()
				if len(f.podRecords()) > 0 || len(m.objects.pods.Snapshot()) > 0 {
					t.Errorf("left: %v", f.podRecords())
				}
			})
		})
	}
}

// A plugin that hangs longer than an undo may take is a failure as any other: the pod counts as
// unreleased, and after some attempts it has only its record.
func TestUndoOfHangingPlugin(t *testing.T) {
	withFakes(t, func(t *testing.T, m *Manager, f *fakeHost) {
		f.detachTime = task.Timeout + time.Second
		f.failing("record pod ready", 1)
		f.failing("detach", 1000)
		_, err := m.RunPodSandbox(t.Context(), podConfig(), "")
		wantFailure(t, err)
		if m.Unreleased() != 1 {
			t.Errorf("%d pods are unreleased", m.Unreleased())
		}
		time.Sleep(2 * strippedAfter * task.Timeout)
		wantCalled(t, f, true, "remove netns", "remove files")
		f.failing("detach", 0)
		time.Sleep(2 * task.Timeout)
		synctest.Wait()
		if len(f.podRecords()) > 0 || m.Unreleased() != 0 {
			t.Errorf("left: %v", f.podRecords())
		}
	})
}

// If a step of CreateContainer fails, all steps are undone. No record remains, and the same request
// succeeds afterwards.
func TestCreateContainerFailures(t *testing.T) {
	for _, test := range []struct {
		step     string
		recorded bool
	}{
		{"find image", false},
		{"find volumes", false},
		{"record container creating", false},
		{"make root filesystem", true},
		{"resolve user", true},
		{"validate", true},
		{"record container created", true},
	} {
		t.Run(test.step, func(t *testing.T) {
			withFakes(t, func(t *testing.T, m *Manager, f *fakeHost) {
				pod := runPod(t, m)
				f.forget()
				f.failing(test.step, 1)
				_, err := m.CreateContainer(t.Context(), pod, containerConfig(), nil)
				wantFailure(t, err)
				if len(f.containerRecords()) > 0 || len(m.objects.containers.Snapshot()) > 0 {
					t.Errorf("left: %v", f.containerRecords())
				}
				wantCalled(t, f, test.recorded, containerParts...)
				if id := createContainer(t, m, pod); f.recordedContainer(id) != state.ContainerCreated {
					t.Errorf("recorded as %q", f.recordedContainer(id))
				}
			})
		})
	}
}

// If the start cannot be recorded, the container stays created. If the launch fails, the container
// has exited.
func TestStartContainerFailures(t *testing.T) {
	for _, test := range []struct {
		step  string
		state runtimeapi.ContainerState
		phase state.Phase // recorded
	}{
		{"record container starting", runtimeapi.ContainerState_CONTAINER_CREATED, state.ContainerCreated},
		{"launch", runtimeapi.ContainerState_CONTAINER_EXITED, state.ContainerExited},
	} {
		t.Run(test.step, func(t *testing.T) {
			withFakes(t, func(t *testing.T, m *Manager, f *fakeHost) {
				id := createContainer(t, m, runPod(t, m))
				f.failing(test.step, 1)
				wantFailure(t, m.StartContainer(t.Context(), id))
				c, err := m.Container(id)
				if err != nil || c.State() != test.state || f.recordedContainer(id) != test.phase {
					t.Fatalf("%v, recorded %q, %v", c.State(), f.recordedContainer(id), err)
				}
				if exit := c.Ended(); test.phase == state.ContainerExited && (exit.Code != state.CodeStartError || exit.Reason != state.ReasonStartError) {
					t.Errorf("exit %+v", exit)
				}
				wantCalled(t, f, test.phase == state.ContainerExited, "remove processes")
				if test.phase == state.ContainerCreated {
					if err := m.StartContainer(t.Context(), id); err != nil {
						t.Errorf("second attempt: %v", err)
					}
				}
			})
		})
	}
}

// An exit that cannot be recorded is published. The runtime state is then the only record, and
// stays until the exit is recorded.
func TestUnrecordedExitIsPublished(t *testing.T) {
	withFakes(t, func(t *testing.T, m *Manager, f *fakeHost) {
		id := startContainer(t, m, runPod(t, m))
		f.failing("record container exited", 3)
		testutil.Must(t, m.StopContainer(t.Context(), id, time.Second))
		if c, err := m.Container(id); err != nil || c.State() != runtimeapi.ContainerState_CONTAINER_EXITED || c.Ended().Code != 137 {
			t.Errorf("%+v, %v", c, err)
		}
		if f.recordedContainer(id) == state.ContainerExited {
			t.Error("the record was written")
		}
		wantCalled(t, f, false, "remove processes")
		time.Sleep(time.Minute)
		synctest.Wait()
		if f.recordedContainer(id) != state.ContainerExited {
			t.Errorf("recorded as %q", f.recordedContainer(id))
		}
		wantCalled(t, f, true, "remove processes")
	})
}

// If a stop fails, the container stays running, and the stop can be repeated.
func TestStopContainerFailures(t *testing.T) {
	withFakes(t, func(t *testing.T, m *Manager, f *fakeHost) {
		id := startContainer(t, m, runPod(t, m))
		f.failing("stop", 1)
		wantFailure(t, m.StopContainer(t.Context(), id, time.Second))
		if c, err := m.Container(id); err != nil || c.State() != runtimeapi.ContainerState_CONTAINER_RUNNING {
			t.Errorf("%+v, %v", c, err)
		}
		testutil.Must(t, m.StopContainer(t.Context(), id, time.Second))
		if c, err := m.Container(id); err != nil || c.State() != runtimeapi.ContainerState_CONTAINER_EXITED || f.recordedContainer(id) != state.ContainerExited {
			t.Errorf("%v, recorded %q, %v", c.State(), f.recordedContainer(id), err)
		}
	})
}

// If a step of RemoveContainer fails, the record stays, and the next call continues. A removal that
// cannot be recorded continues at once, because it frees space on a full disk.
func TestRemoveContainerFailures(t *testing.T) {
	for _, test := range []struct {
		step      string
		continues bool
	}{
		{"kill", false},
		{"record container removing", true},
		{"remove processes", false},
		{"release layers", false},
		{"release volumes", false},
		{"discard layer", false},
		{"remove container record", false},
	} {
		t.Run(test.step, func(t *testing.T) {
			withFakes(t, func(t *testing.T, m *Manager, f *fakeHost) {
				id := startContainer(t, m, runPod(t, m))
				if test.step == "remove processes" { // the exit removes and retries them, too
					testutil.Must(t, m.StopContainer(t.Context(), id, 0))
					synctest.Wait()
				}
				f.failing(test.step, 1)
				err := m.RemoveContainer(t.Context(), id)
				if f.called("wait for deletion") != test.continues {
					t.Errorf("waited for free space: %v", !test.continues)
				}
				if test.continues {
					if err != nil || len(f.containerRecords()) > 0 {
						t.Errorf("%v, left %v", err, f.containerRecords())
					}
					return
				}
				wantFailure(t, err)
				if len(f.containerRecords()) != 1 {
					t.Errorf("records %v: the record must stay", f.containerRecords())
				}
				if err := m.RemoveContainer(t.Context(), id); err != nil || len(f.containerRecords()) > 0 || len(m.objects.containers.Snapshot()) > 0 {
					t.Errorf("second attempt: %v, left %v", err, f.containerRecords())
				}
			})
		})
	}
}

// A stop of a pod runs all steps even if some fail, and can be repeated.
func TestStopPodSandboxFailures(t *testing.T) {
	steps := []string{"kill", "detach", "remove netns", "remove mounts"}
	for _, failing := range append(steps, "record pod stopping") {
		t.Run(failing, func(t *testing.T) {
			withFakes(t, func(t *testing.T, m *Manager, f *fakeHost) {
				id := runPod(t, m)
				startContainer(t, m, id)
				f.forget()
				f.failing(failing, 1)
				if failing == "record pod stopping" {
					f.failing("record pod stopped", 2)
				}
				err := m.StopPodSandbox(t.Context(), id)
				if failing == "record pod stopping" { // a full disk does not keep a pod running
					if err != nil {
						t.Error(err)
					}
				} else {
					wantFailure(t, err)
				}
				if p, err := m.Pod(id); err != nil || p.Ready() {
					t.Errorf("the pod is ready, %v", err)
				}
				wantCalled(t, f, true, "kill", "detach", "remove mounts", "kill pause")
				if err := m.StopPodSandbox(t.Context(), id); err != nil {
					t.Errorf("second attempt: %v", err)
				}
				time.Sleep(time.Minute)
				synctest.Wait()
				if phase := f.recordedPod(id); phase != state.PodStopped && (phase != state.PodStopping || failing == "record pod stopping") {
					t.Errorf("recorded as %q", phase)
				}
			})
		})
	}
}

// If a step of RemovePodSandbox fails, the record stays, and the next call continues. It removes
// the pod's network and mounts again only if the first call could not.
func TestRemovePodSandboxFailures(t *testing.T) {
	for _, test := range []struct {
		step      string
		times     int
		continues bool // the removal continues despite the failure
		repeated  []string
	}{
		{"remove container record", 1, false, nil},
		{"detach", 2, false, []string{"detach", "remove netns", "remove mounts"}}, // the stop before the removal fails, too
		{"remove mounts", 2, false, []string{"remove netns", "remove mounts"}},
		{"remove runtime state", 1, false, nil},
		{"remove files", 1, false, nil},
		{"remove pod record", 1, false, nil},
		{"record pod removing", 1, true, nil},
	} {
		t.Run(test.step, func(t *testing.T) {
			withFakes(t, func(t *testing.T, m *Manager, f *fakeHost) {
				id := runPod(t, m)
				startContainer(t, m, id)
				f.failing(test.step, test.times)
				err := m.RemovePodSandbox(t.Context(), id)
				if test.continues {
					if err != nil || len(f.podRecords()) > 0 {
						t.Errorf("%v, left %v", err, f.podRecords())
					}
					return
				}
				wantFailure(t, err)
				if len(f.podRecords()) != 1 {
					t.Errorf("records %v: the record must stay", f.podRecords())
				}
				f.forget()
				if err := m.RemovePodSandbox(t.Context(), id); err != nil || len(f.podRecords())+len(f.containerRecords())+len(m.objects.pods.Snapshot()) > 0 {
					t.Errorf("second attempt: %v, left %v, %v", err, f.podRecords(), f.containerRecords())
				}
				for _, call := range []string{"detach", "remove netns", "remove mounts"} {
					wantCalled(t, f, slices.Contains(test.repeated, call), call)
				}
			})
		})
	}
}

// recovered adds the records of a pod and a container, which an earlier daemon of this boot wrote.
func recovered(podPhase, containerPhase state.Phase) func(*fakeHost, *fakeLoad) {
	return func(_ *fakeHost, found *fakeLoad) {
		p := newPod(&state.PodSpec{ID: "p", BootID: "boot", Config: podConfig(), NetNS: "/netns"}, state.NewPodStatus(podPhase), nil)
		p.status.Unshared().RunID = "run"
		c := newContainer(&state.ContainerSpec{ID: "c", PodID: "p", BootID: "boot", Config: containerConfig()}, state.NewContainerStatus(containerPhase))
		c.status.Unshared().RunID = "run"
		found.pods, found.containers = []*pod{p}, []*container{c}
	}
}

func TestRecoveryByPhase(t *testing.T) {
	running := proto.PIDs{InitPID: 78, StartedAt: time.Unix(100, 0)}
	for _, test := range []struct {
		name           string
		pod, container state.Phase
		shim           bool
		podLeft, ready bool
		state          runtimeapi.ContainerState
		containerLeft  bool
	}{
		{"pod was starting", state.PodStarting, state.ContainerCreated, false, false, false, 0, false},
		{"pod was being removed", state.Removing, state.ContainerExited, false, false, false, 0, false},
		{"pod was stopping", state.PodStopping, state.ContainerExited, false, true, false, runtimeapi.ContainerState_CONTAINER_EXITED, true},
		{"pause has exited", state.PodReady, state.ContainerExited, false, true, false, runtimeapi.ContainerState_CONTAINER_EXITED, true},
		{"container was being created", state.PodStopping, state.ContainerCreating, false, true, false, 0, false},
		{"container was being removed", state.PodStopping, state.Removing, false, true, false, 0, false},
		{"shim runs", state.PodReady, state.ContainerStarting, true, true, true, runtimeapi.ContainerState_CONTAINER_RUNNING, true},
		{"launch did not start", state.PodReady, state.ContainerStarting, false, true, false, runtimeapi.ContainerState_CONTAINER_CREATED, true},
	} {
		t.Run(test.name, func(t *testing.T) {
			withFakes(t, func(t *testing.T, m *Manager, f *fakeHost) {
				start, err := pidfd.StartTime(os.Getpid())
				testutil.Must(t, err)
				f.loaded = recovered(test.pod, test.container)
				if test.shim {
					f.running["c"] = running
					f.loaded = func(f *fakeHost, found *fakeLoad) {
						recovered(test.pod, test.container)(f, found)
						status := found.pods[0].status.Unshared()
						status.PausePID, status.PauseStart = os.Getpid(), start
					}
				}
				testutil.Must(t, (&recovery{m}).run(t.Context()))
				time.Sleep(time.Minute)
				synctest.Wait()
				p, err := m.Pod("p")
				if (err == nil) != test.podLeft || err == nil && p.Ready() != test.ready {
					t.Errorf("pod %+v, %v", p, err)
				}
				c, err := m.Container("c")
				if (err == nil) != test.containerLeft || err == nil && (c.State() != test.state || (c.PID == 78) != test.shim) {
					t.Errorf("container %+v, %v", c, err)
				}
			})
		})
	}
}

// A failed look-up prevents the daemon's start. Nothing is stopped or removed.
func TestRecoveryFailures(t *testing.T) {
	for _, failing := range []string{"load pod CIDR", "load pods", "load containers", "find shim", "find orphans"} {
		t.Run(failing, func(t *testing.T) {
			withFakes(t, func(t *testing.T, m *Manager, f *fakeHost) {
				f.loaded = recovered(state.PodStopping, state.ContainerStarting)
				f.running["c"] = proto.PIDs{InitPID: 78}
				f.failing(failing, 1)
				wantFailure(t, (&recovery{m}).run(t.Context()))
				wantCalled(t, f, false, "kill", "detach", "remove files", "remove pod record", "remove container record")
			})
		})
	}
}
