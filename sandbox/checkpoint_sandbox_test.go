package sandbox

import (
	"context"
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/synctest"

	"google.golang.org/grpc/codes"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/checkpoint/process/archive"
	"berth/internal/errdefs"
	"berth/internal/testutil"
	"berth/sandbox/handler"
	"berth/sandbox/state"
)

// withSandboxes adds two handlers: gvisor, whose program has one sandbox per pod, and crun.
func withSandboxes(t *testing.T, m *Manager) {
	t.Helper()
	program := func(name, version, help string) handler.Config {
		path := filepath.Join(t.TempDir(), name)
		script := "#!/bin/sh\ncase \"$*\" in --version) echo " + version + ";; \"help wait\") " + help + ";; features) echo '{}';; esac\n"
		testutil.Must(t, os.WriteFile(path, []byte(script), 0o700))
		return handler.Config{Path: path}
	}
	testutil.Must(t, m.handlers.Replace(t.Context(), map[string]handler.Config{
		"gvisor": program("runsc", "runsc version 1", "echo wait for it"), "crun": program("crun", "crun version 1", "exit 1"),
	}, ""))
}

// startSandbox starts containers in a pod with a sandbox.
func startSandbox(t *testing.T, m *Manager, names ...string) (pod string, ids []string) {
	t.Helper()
	withSandboxes(t, m)
	pod, err := m.RunPodSandbox(t.Context(), podConfig(), "gvisor")
	testutil.Must(t, err)
	for _, name := range names {
		config := containerConfig()
		config.Metadata.Name = name
		id, err := m.CreateContainer(t.Context(), pod, config, nil)
		testutil.Must(t, err)
		testutil.Must(t, m.StartContainer(t.Context(), id))
		ids = append(ids, id)
	}
	return pod, ids
}

// A sandbox is saved without CRIU and without a freeze. The manifest names its runtime.
func TestSaveSandbox(t *testing.T) {
	withFakes(t, func(t *testing.T, m *Manager, f *fakeHost) {
		pod, ids := startSandbox(t, m, "one")
		out := t.TempDir()
		testutil.Must(t, m.CheckpointPod(t.Context(), pod, out, ids, nil))
		wantCalled(t, f, true, "save sandbox")
		wantCalled(t, f, false, dumpCalls...)
		key, err := m.signing()
		testutil.Must(t, err)
		dir, err := os.Open(out)
		testutil.Must(t, err)
		defer dir.Close()
		copied, err := os.Open(t.TempDir())
		testutil.Must(t, err)
		defer copied.Close()
		a, err := archive.Import(t.Context(), dir, copied, key)
		testutil.Must(t, err)
		if a.Manifest.Runtime != "runsc version 1" || a.Signer != archive.ThisNode || a.Manifest.Node.CRIU != 0 {
			t.Errorf("manifest %+v", a.Manifest)
		}
		location := filepath.Join(t.TempDir(), "archive.tar")
		testutil.Must(t, m.CheckpointContainer(t.Context(), ids[0], location, 0))
		nothingLeft(t, m)
	})
}

// A failed save, and refusals, leave no file.
func TestSaveSandboxFailures(t *testing.T) {
	for _, test := range []struct {
		name   string
		names  []string
		change func(*fakeHost, *runtimeapi.ContainerConfig)
		want   codes.Code
	}{
		{"save", []string{"one"}, func(f *fakeHost, _ *runtimeapi.ContainerConfig) { f.failing("save sandbox", 1) }, codes.Unavailable},
		{"two containers", []string{"one", "two"}, func(*fakeHost, *runtimeapi.ContainerConfig) {}, codes.FailedPrecondition},
		{"terminal", []string{"one"}, func(_ *fakeHost, c *runtimeapi.ContainerConfig) { c.Tty = true }, codes.FailedPrecondition},
	} {
		t.Run(test.name, func(t *testing.T) {
			withFakes(t, func(t *testing.T, m *Manager, f *fakeHost) {
				pod, ids := startSandbox(t, m, test.names...)
				c, err := m.objects.containers.Find(ids[0])
				testutil.Must(t, err)
				test.change(f, c.Config)
				out := t.TempDir()
				if err := m.CheckpointPod(t.Context(), pod, out, ids, nil); errdefs.Code(err) != test.want {
					t.Errorf("%v, want %v", err, test.want)
				}
				if left, err := os.ReadDir(out); err != nil || len(left) > 0 {
					t.Errorf("left: %v, %v", left, err)
				}
			})
		})
	}
}

// While a sandbox is saved, no container starts in it, and a cancelled checkpoint waits for the
// save.
func TestSaveSandboxExcludesStarts(t *testing.T) {
	withFakes(t, func(t *testing.T, m *Manager, f *fakeHost) {
		pod, ids := startSandbox(t, m, "one")
		other, err := m.CreateContainer(t.Context(), pod, containerConfig(), nil)
		testutil.Must(t, err)
		f.forget()
		f.holdSave = make(chan struct{})
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		out := t.TempDir()
		saved, started := make(chan error, 1), make(chan error, 1)
		go func() { saved <- m.CheckpointPod(ctx, pod, out, ids, nil) }()
		synctest.Wait()
		go func() { started <- m.StartContainer(t.Context(), other) }()
		cancel()
		synctest.Wait()
		wantCalled(t, f, false, "launch")
		if len(saved) > 0 {
			t.Errorf("the checkpoint ended before the save: %v", <-saved)
		}
		close(f.holdSave)
		if err := <-saved; errdefs.Code(err) != codes.Canceled {
			t.Errorf("the checkpoint: %v", err)
		}
		testutil.Must(t, <-started)
		synctest.Wait()
		if left, err := os.ReadDir(out); err != nil || len(left) > 0 {
			t.Errorf("left: %v, %v", left, err)
		}
	})
}

// Only a handler with the same version of the runtime restores a sandbox. The pod's pause and its
// container continue the checkpoint.
func TestRestoreSandbox(t *testing.T) {
	for _, test := range []struct{ name, savedBy, handler, want string }{
		{"same version", "runsc version 1", "gvisor", ""},
		{"another version", "runsc version 2", "gvisor", "the versions must be equal"},
		{"the built-in handler", "runsc version 1", "", "cannot restore a checkpoint of"},
		{"another runtime", "runsc version 1", "crun", "cannot restore a checkpoint of"},
		{"a checkpoint of CRIU", "", "gvisor", "cannot restore checkpoints of the built-in handler"},
	} {
		t.Run(test.name, func(t *testing.T) {
			withFakes(t, func(t *testing.T, m *Manager, f *fakeHost) {
				withSandboxes(t, m)
				f.savedBy = test.savedBy
				r := restoreRequest()
				r.Handler = test.handler
				if test.savedBy != "" {
					r.Containers = r.Containers[:1]
				}
				id, _, err := m.RestorePod(t.Context(), r)
				if test.want != "" {
					if errdefs.Code(err) != codes.FailedPrecondition || !strings.Contains(err.Error(), test.want) {
						t.Errorf("%v, want %q", err, test.want)
					}
					wantCalled(t, f, false, "record pod starting")
					return
				}
				testutil.Must(t, err)
				pod, err := m.Pod(id)
				testutil.Must(t, err)
				record, err := json.Marshal(pod.PodSpec)
				testutil.Must(t, err)
				want := state.Restore{Name: r.Containers[0].Metadata.Name, From: r.Path}
				if pod.Restore == nil || *pod.Restore != want || !strings.Contains(string(record), `"restore":{"name":"main"`) {
					t.Errorf("the pod continues %+v, recorded as %s", pod.Restore, record)
				}
				if calls := f.order("launch pause"); !slices.Equal(calls, []string{"launch pause"}) {
					t.Errorf("calls %q", calls)
				}
			})
		})
	}
}
