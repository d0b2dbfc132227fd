package sandbox

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"

	"google.golang.org/grpc/codes"

	"berth/checkpoint/process"
	"berth/checkpoint/process/archive"
	"berth/internal/errdefs"
	"berth/internal/testutil"
	"berth/sandbox/state"
)

// startTwo starts a pod with two containers that have writable layers.
func startTwo(t *testing.T, m *Manager) (pod string, ids []string) {
	t.Helper()
	pod = runPod(t, m)
	for _, name := range []string{"one", "two"} {
		config := containerConfig()
		config.Metadata.Name = name
		id, err := m.CreateContainer(t.Context(), pod, config, nil)
		testutil.Must(t, err)
		testutil.Must(t, m.StartContainer(t.Context(), id))
		testutil.Must(t, os.MkdirAll(filepath.Join(m.node.Writable(id), "upper"), 0o700))
		ids = append(ids, id)
	}
	return pod, ids
}

// order returns the calls with these names, in order.
func (f *fakeHost) order(names ...string) []string {
	f.mu.Lock()
	defer f.mu.Unlock()
	return slices.DeleteFunc(slices.Clone(f.calls), func(c string) bool { return !slices.Contains(names, c) })
}

var dumpCalls = []string{"prepare dump", "freeze", "dump", "thaw", "end dump"}

func TestCheckpointPodFreezesAllFirst(t *testing.T) {
	withFakes(t, func(t *testing.T, m *Manager, f *fakeHost) {
		pod, ids := startTwo(t, m)
		out := t.TempDir()
		testutil.Must(t, m.CheckpointPod(t.Context(), pod, out, ids, nil))
		want := []string{"prepare dump", "prepare dump", "freeze", "freeze", "dump", "dump", "thaw", "thaw", "end dump", "end dump"}
		if got := f.order(dumpCalls...); !slices.Equal(got, want) {
			t.Errorf("calls %q", got)
		}
		for _, name := range []string{"manifest.json", "one/rootfs-diff.tar", "two/config.dump", "pod.dump"} {
			if _, err := os.Stat(filepath.Join(out, name)); err != nil {
				t.Error(err)
			}
		}
		nothingLeft(t, m)
	})
}

// nothingLeft checks that no checkpoint has left files.
func nothingLeft(t *testing.T, m *Manager) {
	t.Helper()
	if left, err := os.ReadDir(m.node.Checkpoints()); err != nil && !os.IsNotExist(err) || len(left) > 0 {
		t.Errorf("left: %v, %v", left, err)
	}
}

// outputRecordPath returns the only record of a client's directory.
func outputRecordPath(t *testing.T, m *Manager) string {
	t.Helper()
	records, err := os.ReadDir(m.node.Checkpoints())
	testutil.Must(t, err)
	if len(records) != 1 {
		panic(fmt.Sprint("records: ", records)) // not the test's goroutine
	}
	return filepath.Join(m.node.Checkpoints(), records[0].Name())
}

// A checkpoint whose record cannot be removed fails, and leaves no file for the next daemon to
// empty.
func TestFailureToForgetOutput(t *testing.T) {
	withFakes(t, func(t *testing.T, m *Manager, f *fakeHost) {
		pod, ids := startTwo(t, m)
		out := t.TempDir()
		f.thawing = sync.OnceFunc(func() { // a directory with a file cannot be removed as a record
			record := outputRecordPath(t, m)
			testutil.Must(t, errors.Join(os.Remove(record), os.MkdirAll(filepath.Join(record, "x"), 0o700)))
		})
		failure := m.CheckpointPod(t.Context(), pod, out, ids, nil)
		if names, err := os.ReadDir(out); failure == nil || err != nil || len(names) > 0 {
			t.Errorf("%v; the output has %v, %v", failure, names, err)
		}
	})
}

// Each failure thaws what is frozen, ends CRIU before, and leaves no file.
func TestFailedCheckpoints(t *testing.T) {
	for _, failing := range dumpCalls {
		t.Run(failing, func(t *testing.T) {
			withFakes(t, func(t *testing.T, m *Manager, f *fakeHost) {
				pod, ids := startTwo(t, m)
				out := t.TempDir()
				f.failing(failing, 1)
				wantFailure(t, m.CheckpointPod(t.Context(), pod, out, ids, nil))
				if left, err := os.ReadDir(out); err != nil || len(left) > 0 {
					t.Errorf("left in the output: %v, %v", left, err)
				}
				nothingLeft(t, m)
				calls := f.order(dumpCalls...)
				count := func(name string) (n int) {
					for _, c := range calls {
						if c == name {
							n++
						}
					}
					return n
				}
				frozen, prepared := count("freeze"), count("prepare dump")
				if failing == "freeze" {
					frozen--
				}
				if failing == "prepare dump" {
					prepared--
				}
				if count("thaw") != frozen || count("end dump") != prepared {
					t.Errorf("calls %q", calls)
				}
				if failing == "dump" && calls[len(calls)-1] != "thaw" {
					t.Errorf("CRIU could freeze a container after the thaw: %q", calls)
				}
				direct := f.order("thaw directly", "end dump")
				if n := len(direct) - prepared; n != frozen || slices.Contains(direct[:prepared], "thaw directly") {
					t.Errorf("a container can stay frozen: %q", direct)
				}
				f.forget()
				testutil.Must(t, m.CheckpointPod(t.Context(), pod, out, ids, nil)) // it can be repeated
			})
		})
	}
}

func TestCheckpointPodRefusals(t *testing.T) {
	withFakes(t, func(t *testing.T, m *Manager, f *fakeHost) {
		pod, ids := startTwo(t, m)
		empty, full := t.TempDir(), t.TempDir()
		testutil.Must(t, os.WriteFile(filepath.Join(full, "file"), nil, 0o600))
		link := filepath.Join(t.TempDir(), "link")
		testutil.Must(t, os.Symlink(empty, link))
		other := addContainer(m, "other", "p2", state.ContainerCreated)
		for name, tt := range map[string]struct {
			pod, out string
			ids      []string
			options  map[string]string
			want     codes.Code
		}{
			"unknown pod":       {"unknown", empty, ids, nil, codes.NotFound},
			"unknown container": {pod, empty, []string{ids[0], "unknown"}, nil, codes.NotFound},
			"no containers":     {pod, empty, nil, nil, codes.InvalidArgument},
			"twice":             {pod, empty, []string{ids[0], ids[0]}, nil, codes.InvalidArgument},
			"of another pod":    {pod, empty, []string{ids[0], other.ID}, nil, codes.InvalidArgument},
			"not all":           {pod, empty, ids[:1], nil, codes.FailedPrecondition},
			"relative path":     {pod, "out", ids, nil, codes.InvalidArgument},
			"missing directory": {pod, empty + "/missing", ids, nil, codes.FailedPrecondition},
			"full directory":    {pod, full, ids, nil, codes.FailedPrecondition},
			"symbolic link":     {pod, link, ids, nil, codes.FailedPrecondition},
			"a file":            {pod, filepath.Join(full, "file"), ids, nil, codes.FailedPrecondition},
			"options":           {pod, empty, ids, map[string]string{"leaveStopped": "true"}, codes.InvalidArgument},
		} {
			err := m.CheckpointPod(t.Context(), tt.pod, tt.out, tt.ids, tt.options)
			if errdefs.Code(err) != tt.want {
				t.Errorf("%s: %v, want %v", name, err, tt.want)
			}
		}
		wantCalled(t, f, false, dumpCalls...)
		testutil.Must(t, m.StopContainer(t.Context(), ids[0], 0))
		if err := m.CheckpointPod(t.Context(), pod, empty, ids, nil); errdefs.Code(err) != codes.FailedPrecondition {
			t.Errorf("checkpoint of an exited container: %v", err)
		}
		testutil.Must(t, m.CheckpointPod(t.Context(), pod, empty, ids[1:], nil))
	})
}

func TestCheckpointContainer(t *testing.T) {
	withFakes(t, func(t *testing.T, m *Manager, f *fakeHost) {
		_, ids := startTwo(t, m)
		dir := t.TempDir()
		place := filepath.Join(dir, "archive.tar")
		for range 2 { // the second replaces the first
			testutil.Must(t, m.CheckpointContainer(t.Context(), ids[0], place, 0))
			info, err := os.Lstat(place)
			testutil.Must(t, err)
			if info.Mode() != 0o600 || info.Size() == 0 {
				t.Errorf("%v, %d bytes", info.Mode(), info.Size())
			}
		}
		nothingLeft(t, m)

		// The removal of an earlier checkpoint can still be in progress.
		left := filepath.Join(m.node.Checkpoints(), ids[0])
		testutil.Must(t, os.MkdirAll(filepath.Join(left, "checkpoint"), 0o700))
		testutil.Must(t, m.CheckpointContainer(t.Context(), ids[0], place, 0))
		if names, err := os.ReadDir(left); err != nil || len(names) != 1 {
			t.Errorf("the other directory has %v, %v", names, err)
		}
		testutil.Must(t, os.RemoveAll(left))
		nothingLeft(t, m)

		target := filepath.Join(dir, "target")
		testutil.Must(t, os.WriteFile(target, []byte("untouched"), 0o644))
		link := filepath.Join(dir, "link")
		testutil.Must(t, os.Symlink(target, link))
		testutil.Must(t, m.CheckpointContainer(t.Context(), ids[0], link, 0))
		if data, err := os.ReadFile(target); string(data) != "untouched" || err != nil {
			t.Errorf("the target of a link has %q, %v", data, err)
		}
		names, err := os.ReadDir(dir)
		if err != nil || len(names) != 3 {
			t.Errorf("files %v, %v", names, err)
		}
	})
}

func TestCheckpointContainerRefusals(t *testing.T) {
	withFakes(t, func(t *testing.T, m *Manager, f *fakeHost) {
		_, ids := startTwo(t, m)
		dir := t.TempDir()
		for name, tt := range map[string]struct {
			id, place string
			want      codes.Code
		}{
			"unknown":          {"unknown", dir + "/a", codes.NotFound},
			"relative":         {ids[0], "a", codes.InvalidArgument},
			"a directory":      {ids[0], dir + "/", codes.InvalidArgument},
			"missing folder":   {ids[0], dir + "/missing/a", codes.FailedPrecondition},
			"parent directory": {ids[0], dir + "/..", codes.InvalidArgument},
		} {
			if err := m.CheckpointContainer(t.Context(), tt.id, tt.place, 0); errdefs.Code(err) != tt.want {
				t.Errorf("%s: %v, want %v", name, err, tt.want)
			}
		}
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		if err := m.CheckpointContainer(ctx, ids[0], dir+"/a", 0); errdefs.Code(err) != codes.Canceled {
			t.Errorf("cancelled: %v", err)
		}
		if left, err := os.ReadDir(dir); err != nil || len(left) > 0 {
			t.Errorf("left %v, %v", left, err)
		}
		nothingLeft(t, m)
	})
}

// A daemon that died during a checkpoint leaves its files to the next one.
func TestLeftCheckpointsAreRemoved(t *testing.T) {
	withFakes(t, func(t *testing.T, m *Manager, f *fakeHost) {
		out := t.TempDir()
		dir, err := process.OpenEmpty(out)
		testutil.Must(t, err)
		defer dir.Close()
		_ = recordOutput(t, m, dir)
		m.outputs = process.NewOutputs(m.node.Checkpoints()) // the next daemon reads the record
		testutil.Must(t, os.MkdirAll(filepath.Join(out, "one/checkpoint"), 0o700))
		left := filepath.Join(m.node.Checkpoints(), testID)
		testutil.Must(t, os.MkdirAll(filepath.Join(left, "checkpoint"), 0o700))
		testutil.Must(t, m.checkpoints.undoLeft(t.Context()))
		nothingLeft(t, m)
		if names, err := os.ReadDir(out); err != nil || len(names) > 0 {
			t.Errorf("the output has %v, %v", names, err)
		}

		// A complete checkpoint stays: a power cut has brought its record back.
		complete := recordOutput(t, m, dir)
		record := outputRecordPath(t, m)
		saved, err := os.ReadFile(record)
		testutil.Must(t, err)
		testutil.Must(t, os.Mkdir(filepath.Join(out, "one"), 0o700))
		testutil.Must(t, os.WriteFile(filepath.Join(out, archive.ManifestFile), []byte("{}"), 0o600))
		testutil.Must(t, m.outputs.Forget(complete))
		nothingLeft(t, m)
		testutil.Must(t, os.WriteFile(record, saved, 0o600))
		testutil.Must(t, m.checkpoints.undoLeft(t.Context()))
		nothingLeft(t, m)
		if names, err := os.ReadDir(out); err != nil || len(names) != 2 {
			t.Errorf("the output has %v, %v", names, err)
		}

		// A directory that replaced the client's stays as it is.
		_ = recordOutput(t, m, dir)
		testutil.Must(t, os.Rename(out, out+".old"))
		testutil.Must(t, os.MkdirAll(filepath.Join(out, "other"), 0o700))
		testutil.Must(t, m.checkpoints.undoLeft(t.Context()))
		nothingLeft(t, m)
		if _, err := os.Stat(filepath.Join(out, "other")); err != nil {
			t.Error(err)
		}

		// A record that an earlier failure left of the same directory is outdated.
		m.outputs.Leave(recordOutput(t, m, dir))
		current := recordOutput(t, m, dir)

		// Two checkpoints cannot fill one directory.
		if _, err := m.outputs.Record(dir); errdefs.Code(err) != codes.FailedPrecondition {
			t.Errorf("a second record of the directory: %v", err)
		}
		testutil.Must(t, m.outputs.Forget(current))
		nothingLeft(t, m)
	})
}

func recordOutput(t *testing.T, m *Manager, dir *os.File) (name string) {
	t.Helper()
	name, err := m.outputs.Record(dir)
	testutil.Must(t, err)
	return name
}

// A container can exit and be removed while its checkpoint is hashed and written, and other
// operations need not wait.
func TestCheckpointIsWrittenWithoutLocks(t *testing.T) {
	withFakes(t, func(t *testing.T, m *Manager, f *fakeHost) {
		podID, ids := startTwo(t, m)
		dir, err := process.OpenEmpty(t.TempDir())
		testutil.Must(t, err)
		defer dir.Close()
		p, err := m.objects.pods.Find(podID)
		testutil.Must(t, err)
		c, err := m.objects.containers.Find(ids[0])
		testutil.Must(t, err)
		job := &checkpointJob{k: m.checkpoints, pod: p, dir: dir}
		defer job.close()
		key, err := m.signing()
		testutil.Must(t, err)
		manifest, err := job.recordLocked(t.Context(), []*container{c})
		testutil.Must(t, err)
		testutil.Must(t, m.StopContainer(t.Context(), c.ID, 0))
		testutil.Must(t, m.RemovePodSandbox(t.Context(), podID))
		testutil.Must(t, archive.Seal(t.Context(), dir, manifest, key, job.early, false))
		place := filepath.Join(t.TempDir(), "archive.tar")
		testutil.Must(t, process.WriteArchive(t.Context(), dir, place))
	})
}

// A stop cancels a checkpoint that runs, one that waits for it, and one that begins during the
// stop.
func TestStopCancelsCheckpoints(t *testing.T) {
	withFakes(t, func(t *testing.T, m *Manager, f *fakeHost) {
		pod, ids := startTwo(t, m)
		f.holdDumps = true
		dir := t.TempDir()
		results := make(chan error, 3)
		go func() { results <- m.CheckpointPod(t.Context(), pod, t.TempDir(), ids, nil) }()
		synctest.Wait()
		go func() { results <- m.CheckpointContainer(t.Context(), ids[0], dir+"/waits.tar", 0) }()
		synctest.Wait()
		c, err := m.objects.containers.Find(ids[0])
		testutil.Must(t, err)
		end := c.dumping.Stop()
		go func() { results <- m.CheckpointContainer(t.Context(), ids[0], dir+"/late.tar", 0) }()
		synctest.Wait()
		for range cap(results) {
			select {
			case err := <-results:
				if errdefs.Code(err) != codes.FailedPrecondition || !strings.Contains(err.Error(), "stopped") {
					t.Error(err)
				}
			default:
				t.Error("a checkpoint was not cancelled")
			}
		}
		end()
		f.holdDumps = false
		testutil.Must(t, m.CheckpointContainer(t.Context(), ids[0], dir+"/a.tar", 0))
	})
}

// A daemon that cannot undo the checkpoints of an earlier one starts none, which it would undo,
// too.
func TestCheckpointsWaitForRecovery(t *testing.T) {
	withFakes(t, func(t *testing.T, m *Manager, f *fakeHost) {
		pod, ids := startTwo(t, m)
		f.failing("end left dumps", 1)
		testutil.Must(t, m.checkpoints.undoLeft(t.Context()))
		out := t.TempDir()
		if err := m.CheckpointPod(t.Context(), pod, out, ids, nil); errdefs.Code(err) != codes.Unavailable {
			t.Errorf("before the recovery: %v", err)
		}
		if err := m.CheckpointContainer(t.Context(), ids[0], out+"/a", 0); errdefs.Code(err) != codes.Unavailable {
			t.Errorf("before the recovery: %v", err)
		}
		wantCalled(t, f, false, dumpCalls...)
		testutil.Must(t, m.undoCheckpoints(t.Context()))
		testutil.Must(t, m.CheckpointPod(t.Context(), pod, out, ids, nil))
	})
}

const testID = "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef"
