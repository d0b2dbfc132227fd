package runtime

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/sys/unix"

	"berth/internal/pidfd"
	"berth/internal/task"
	"berth/internal/testutil"
	"berth/sandbox/state"
	"berth/shim/proto"
)

func testProcesses(t *testing.T) Processes {
	t.Helper()
	log := slog.New(slog.DiscardHandler)
	return Processes{Node: state.Node{Dirs: state.Dirs{State: t.TempDir()}}, Tasks: task.NewRunner(log, nil), Log: log}
}

// leave writes a file into the shim directory, like a shim that has exited.
func leave(t *testing.T, k Processes, id, name string, content []byte) {
	t.Helper()
	testutil.Must(t, os.MkdirAll(k.Node.Shim(id), 0o700))
	testutil.Must(t, os.WriteFile(filepath.Join(k.Node.Shim(id), name), content, 0o600))
}

// A valid record gives the exit. Without a valid record the exit is unknown.
func TestReadExit(t *testing.T) {
	started, ended := time.Unix(100, 0), time.Unix(200, 0)
	exit := func(code int32, oom bool) []byte {
		return proto.Exit{Code: code, OOMKilled: oom, At: ended}.Encode()
	}
	for name, test := range map[string]struct {
		record []byte // nil: none
		code   int32
		reason string
		lost   bool
	}{
		"success":                     {exit(0, false), 0, state.ReasonCompleted, false},
		"error":                       {exit(7, false), 7, state.ReasonError, false},
		"out of memory":               {exit(137, true), 137, state.ReasonOOMKilled, false},
		"success, a child was killed": {exit(0, true), 0, state.ReasonCompleted, false},
		"no record":                   {nil, state.CodeUnknown, state.ReasonShimLost, true},
		"truncated record":            {exit(0, false)[:5], state.CodeUnknown, state.ReasonShimLost, true},
		"zeros":                       {make([]byte, 64), state.CodeUnknown, state.ReasonShimLost, true},
	} {
		k := testProcesses(t)
		if test.record != nil {
			leave(t, k, "c", proto.ExitFile, test.record)
		}
		got, lost, err := k.ReadExit(t.Context(), "c", started)
		if err != nil || lost != test.lost || got.Code != test.code || got.Reason != test.reason || !got.StartedAt.Equal(started) {
			t.Errorf("%s: %+v, lost %t, %v", name, got, lost, err)
		}
		if !lost && !got.FinishedAt.Equal(ended) || lost && (got.FinishedAt.IsZero() || got.Message == "") {
			t.Errorf("%s: %+v", name, got)
		}
	}
}

// A lack of resources does not mean that a container failed.
func TestTransientErrors(t *testing.T) {
	for _, errno := range []unix.Errno{unix.EMFILE, unix.ENFILE, unix.ENOMEM, unix.EIO} {
		if !isTransient(fmt.Errorf("read: %w", &os.PathError{Op: "open", Err: errno})) {
			t.Errorf("%v is not transient", errno)
		}
	}
	for _, err := range []error{nil, errors.New("checksum"), &os.PathError{Op: "open", Err: unix.ENOENT}} {
		if isTransient(err) {
			t.Errorf("%v is transient", err)
		}
	}
}

// A missing shim is no error. An unreadable record is one.
func TestFindWithoutShim(t *testing.T) {
	k := testProcesses(t)
	if found, _, err := k.Find(t.Context(), "c"); found != nil || err != nil {
		t.Errorf("without a shim directory: %v, %v", found, err)
	}
	// This process's ID with another start time stands for a reused ID.
	gone := proto.PIDs{MonitorPID: os.Getpid(), MonitorStartTime: 1, InitPID: os.Getpid(), InitStartTime: 1, StartedAt: time.Unix(100, 0)}
	leave(t, k, "c", proto.ShimFile, gone.Encode())
	found, ids, err := k.Find(t.Context(), "c")
	if found != nil || err != nil || ids.InitPID != os.Getpid() || !ids.StartedAt.Equal(time.Unix(100, 0)) {
		t.Errorf("exited shim: %v, %+v, %v", found, ids, err)
	}
	leave(t, k, "c", proto.ShimFile, []byte("no record"))
	if found, _, err := k.Find(t.Context(), "c"); found != nil || err == nil {
		t.Errorf("damaged record: %v, %v", found, err)
	}
}

// AwaitExit waits for the publication of the exit, its context or its limit.
func TestAwaitExit(t *testing.T) {
	k := testProcesses(t)
	run := newRunning(nil, nil, 0, time.Time{})
	if k.AwaitExit(t.Context(), run, time.Millisecond) {
		t.Error("AwaitExit returned true before the exit")
	}
	cancelled, cancel := context.WithCancel(t.Context())
	cancel()
	if k.AwaitExit(cancelled, run, time.Hour) {
		t.Error("AwaitExit returned true for a cancelled context")
	}
	close(run.Exited)
	if !k.AwaitExit(t.Context(), run, time.Hour) {
		t.Error("AwaitExit returned false after the exit")
	}
	if !run.HasEnded() {
		t.Error("HasEnded is false without an init")
	}
}

// AwaitStop returns early for a stopped shim, and waits until the timeout for a working one.
func TestAwaitStop(t *testing.T) {
	_, file := startProcess(t, "sleep", "1000")
	defer file.Close()
	synctest.Test(t, func(t *testing.T) {
		k, run := testProcesses(t), newRunning(nil, file, 0, time.Time{})
		const grace = time.Minute
		begin := time.Now()
		if k.AwaitStop(t.Context(), "c", run, grace) || time.Since(begin) < grace {
			t.Errorf("working shim: waited %v", time.Since(begin))
		}
		testutil.Must(t, pidfd.Signal(file, unix.SIGSTOP))
		for !run.shimIsStopped() { // SIGSTOP takes effect after a moment
		}
		begin = time.Now()
		if k.AwaitStop(t.Context(), "c", run, grace) || time.Since(begin) > MonitorTimeout {
			t.Errorf("stopped shim: waited %v", time.Since(begin))
		}
	})
}

// After the shim's exit UnreadableExit returns the transient error of reading its record.
func TestUnreadableExit(t *testing.T) {
	k := testProcesses(t)
	leave(t, k, "c", proto.ExitFile, nil)
	cmd, file := startProcess(t, "sleep", "1000")
	defer file.Close()
	run := newRunning(nil, file, 0, time.Time{})
	if err := withoutDescriptors(t, func() error { return k.UnreadableExit("c", newRunning(nil, nil, 0, time.Time{})) }); err != nil {
		t.Errorf("without a shim: %v", err)
	}
	if err := withoutDescriptors(t, func() error { return k.UnreadableExit("c", run) }); err != nil {
		t.Errorf("while the shim runs: %v", err)
	}
	testutil.Must(t, errors.Join(cmd.Process.Kill(), pidfd.Wait(t.Context(), file)))
	if err := withoutDescriptors(t, func() error { return k.UnreadableExit("c", run) }); !errors.Is(err, unix.EMFILE) {
		t.Errorf("without descriptors: %v", err)
	}
	for name, id := range map[string]string{"damaged record": "c", "no record": "d"} {
		if err := k.UnreadableExit(id, run); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// withoutDescriptors calls do while this process can open no file descriptor.
func withoutDescriptors(t *testing.T, do func() error) error {
	t.Helper()
	var old unix.Rlimit
	testutil.Must(t, unix.Prlimit(0, unix.RLIMIT_NOFILE, nil, &old))
	testutil.Must(t, unix.Prlimit(0, unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: 1, Max: old.Max}, nil)) // poll(2) of one descriptor needs a limit of 1
	err := do()
	testutil.Must(t, unix.Prlimit(0, unix.RLIMIT_NOFILE, &old, nil))
	return err
}
