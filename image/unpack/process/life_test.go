package process

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"

	"berth/image/unpack"
	"berth/image/unpack/worker"
	"berth/internal/errdefs"
)

// children returns the processes of this one that are called berth-unpack.
func children(t *testing.T) (pids []int) {
	t.Helper()
	lists, err := filepath.Glob("/proc/self/task/*/children")
	if err != nil {
		t.Fatal(err)
	}
	for _, list := range lists {
		text, err := os.ReadFile(list)
		if err != nil {
			continue // a thread that has ended
		}
		for _, field := range strings.Fields(string(text)) {
			pid, err := strconv.Atoi(field)
			if err != nil {
				t.Fatal(err)
			}
			pids = append(pids, pid)
		}
	}
	return pids
}

// paused is a blob that stops in the middle, once.
type paused struct {
	io.Reader
	reached, goOn chan struct{}
	rest          io.Reader
}

func pausing(data []byte, at int) *paused {
	return &paused{bytes.NewReader(data[:at]), make(chan struct{}), make(chan struct{}), bytes.NewReader(data[at:])}
}

func (p *paused) Read(b []byte) (int, error) {
	n, err := p.Reader.Read(b)
	if err == io.EOF && p.rest != nil {
		close(p.reached)
		<-p.goOn
		p.Reader, p.rest = p.rest, nil
		return p.Reader.Read(b)
	}
	return n, err
}

// pipeSize is the size of the pipe to a process, where the user's limit allows it.
const pipeSize = 1 << 20

// inTheMiddle starts to unpack data and calls do while the process waits for the rest of it.
func inTheMiddle(ctx context.Context, t *testing.T, p *Program, data []byte, do func(pid int)) (unpack.Result, error) {
	t.Helper()
	blob := pausing(data, min(len(data)/2, pipeSize/2)) // the pipe takes it, whether or not the process reads yet
	type answer struct {
		result unpack.Result
		err    error
	}
	done := make(chan answer)
	go func() {
		result, err := p.Unpack(ctx, tree(t), blob, job)
		done <- answer{result, err}
	}()
	select {
	case <-blob.reached:
	case a := <-done:
		t.Fatalf("it ended before the middle: %v", a.err)
	}
	pids := children(t)
	if len(pids) != 1 {
		t.Fatalf("processes %v", pids)
	}
	do(pids[0])
	close(blob.goOn)
	a := <-done
	if pids := children(t); len(pids) > 0 {
		t.Errorf("left: %v", pids)
	}
	return a.result, a.err
}

// A process that is killed is an error worth trying again.
func TestKilledProcessIsUnavailable(t *testing.T) {
	p := open(t, built, time.Minute)
	_, err := inTheMiddle(t.Context(), t, p, everyKind(t), func(pid int) {
		if err := unix.Kill(pid, unix.SIGKILL); err != nil {
			t.Error(err)
		}
	})
	if errdefs.Code(err) != codes.Unavailable || !strings.Contains(err.Error(), "signal: killed") {
		t.Errorf("%v: %v", errdefs.Code(err), err)
	}
}

// silent is a blob that stalls after a part until it is stopped.
type silent struct {
	io.Reader
	onSilence func()
	stopped   chan struct{}
}

func (s *silent) Read(b []byte) (int, error) {
	n, err := s.Reader.Read(b)
	if err == io.EOF {
		s.onSilence()
		<-s.stopped
		return 0, context.Canceled
	}
	return n, err
}

func (s *silent) Stop() { close(s.stopped) }

// Unpack does not wait for the blob once the process has ended.
func TestEndsWhileBlobStalls(t *testing.T) {
	p := open(t, built, time.Hour)
	full := errors.New("no room")
	ctx, cancel := context.WithCancelCause(t.Context())
	for _, c := range []struct {
		name      string
		onSilence func()
		text      string
	}{
		{"killed", func() {
			for _, pid := range children(t) {
				if err := unix.Kill(pid, unix.SIGKILL); err != nil {
					t.Error(err)
				}
			}
		}, "signal: killed"},
		{"given up", func() { cancel(full) }, full.Error()},
	} {
		blob := &silent{bytes.NewReader(everyKind(t)[:100_000]), c.onSilence, make(chan struct{})}
		if _, err := p.Unpack(ctx, tree(t), blob, job); err == nil || !strings.Contains(err.Error(), c.text) {
			t.Errorf("%s: %v, want %q", c.name, err, c.text)
		}
	}
}

// A layer is refused at once, even if the rest of its blob never arrives.
func TestRejectedWhileBlobStalls(t *testing.T) {
	eachBuild(t, time.Minute, func(t *testing.T, p *Program) {
		blob := &silent{strings.NewReader(strings.Repeat("no tar", 1<<17)), func() {}, make(chan struct{})}
		if _, err := p.Unpack(t.Context(), tree(t), blob, job); errdefs.Code(err) != codes.InvalidArgument {
			t.Errorf("%v", err)
		}
	})
}

// A process that is frozen is given up, and can be cancelled before that.
func TestFrozenProcessIsKilled(t *testing.T) {
	large := pack(t, file("f", strings.Repeat("x", 8*pipeSize)))
	stop := func(pid int) {
		if err := unix.Kill(pid, unix.SIGSTOP); err != nil {
			t.Error(err)
		}
	}
	p := open(t, built, 2*time.Second)
	if _, err := inTheMiddle(t.Context(), t, p, large, stop); errdefs.Code(err) != codes.Unavailable || !strings.Contains(err.Error(), "no progress") {
		t.Errorf("%v: %v", errdefs.Code(err), err)
	}
	p = open(t, built, time.Hour)
	ctx, cancel := context.WithCancel(t.Context())
	if _, err := inTheMiddle(ctx, t, p, large, func(pid int) { stop(pid); cancel() }); !errors.Is(err, context.Canceled) {
		t.Errorf("%v", err)
	}
}

// Waiting for the network does not count as a standstill. Waiting for the process does.
func TestStandsStill(t *testing.T) {
	const stall = 20 * time.Millisecond
	w := &work{}
	w.awaiting.Store(true)
	ctx, cancel := context.WithTimeout(t.Context(), 20*stall)
	defer cancel()
	if w.standsStill(ctx, stall) {
		t.Error("the network was waited for")
	}
	w.awaiting.Store(false)
	if !w.standsStill(t.Context(), stall) {
		t.Error("it did nothing")
	}
}

// The process can do everything it needs and nothing else.
func TestConfined(t *testing.T) { eachBuild(t, time.Minute, testConfined) }

func testConfined(t *testing.T, p *Program) {
	_, err := inTheMiddle(t.Context(), t, p, everyKind(t), func(pid int) {
		dir := "/proc/" + strconv.Itoa(pid)
		waitUntilItReads(t, dir)
		threads, err := filepath.Glob(dir + "/task/*")
		if err != nil || len(threads) < 2 {
			t.Errorf("threads %v: %v", threads, err)
		}
		for _, thread := range threads {
			for field, want := range map[string]string{
				"CapEff": keptCapabilities, "CapPrm": keptCapabilities, "CapInh": noCapabilities, "CapAmb": noCapabilities, "NoNewPrivs": "1", "Seccomp": "2",
			} {
				checkField(t, thread, field, want)
			}
		}
		for _, ns := range []string{"pid", "net", "ipc"} {
			theirs, err := os.Readlink(dir + "/ns/" + ns)
			ours, err2 := os.Readlink("/proc/self/ns/" + ns)
			if err != nil || err2 != nil || theirs == ours {
				t.Errorf("%s namespace %s, ours %s: %v, %v", ns, theirs, ours, err, err2)
			}
		}
		// Its root is the tree; nothing of ours is open in it.
		names, err := os.ReadDir(dir + "/root/")
		if err != nil || slices.ContainsFunc(names, func(e os.DirEntry) bool { return e.Name() == "proc" || e.Name() == "etc" }) || len(names) == 0 {
			t.Errorf("its root has %v: %v", names, err)
		}
		fds, err := os.ReadDir(dir + "/fd")
		if err != nil {
			t.Error(err)
		}
		for _, fd := range fds {
			target, err := os.Readlink(dir + "/fd/" + fd.Name())
			if err == nil && strings.Contains(target, "berth-unpack") {
				t.Errorf("it has %s open", target)
			}
		}
		limits, err := os.ReadFile(dir + "/limits")
		cpu := fmt.Sprintf("Max cpu time              %-20d %-20[1]d ", int(worker.CPULimit(unpack.DefaultLimits).Seconds()))
		if err != nil || !strings.Contains(string(limits), "Max core file size        0 ") || !strings.Contains(string(limits), cpu) {
			t.Errorf("limits %s: %v", limits, err)
		}
		if adj, err := os.ReadFile(dir + "/oom_score_adj"); err != nil || strings.TrimSpace(string(adj)) != "1000" {
			t.Errorf("oom_score_adj %s: %v", adj, err)
		}
	})
	if err != nil {
		t.Error(err)
	}
}

// keptCapabilities are CHOWN (0), DAC_OVERRIDE (1), FOWNER (3), FSETID (4), MKNOD (27), SETFCAP
// (31).
const (
	keptCapabilities = "000000008800001b"
	noCapabilities   = "0000000000000000"
)

// waitUntilItReads waits until the process has made a file: it is confined before it reads a byte.
func waitUntilItReads(t *testing.T, dir string) {
	t.Helper()
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(time.Millisecond) {
		if _, err := os.Lstat(dir + "/root/d/f"); err == nil {
			return
		}
		if time.Now().After(deadline) {
			t.Fatal("it makes no files")
		}
	}
}

func checkField(t *testing.T, dir, field, want string) {
	t.Helper()
	text, err := os.ReadFile(dir + "/status")
	if err != nil {
		t.Error(err)
		return
	}
	for line := range strings.Lines(string(text)) {
		if value, ok := strings.CutPrefix(line, field+":"); ok {
			if got := strings.TrimSpace(value); got != want {
				t.Errorf("%s: %s is %s, want %s", dir, field, got, want)
			}
			return
		}
	}
	t.Errorf("%s has no %s", dir, field)
}

// Descriptors and goroutines are as before, whatever happens.
func TestNoDescriptorsOrGoroutinesLeak(t *testing.T) {
	p := open(t, built, time.Minute)
	data := gzipped(t, everyKind(t))
	count := func() (int, int) {
		fds, err := os.ReadDir("/proc/self/fd")
		if err != nil {
			t.Fatal(err)
		}
		return len(fds), runtime.NumGoroutine()
	}
	once := func() {
		root := tree(t)
		if _, err := p.Unpack(t.Context(), root, bytes.NewReader(data), job); err != nil {
			t.Error(err)
		}
		if _, err := p.Unpack(t.Context(), root, bytes.NewReader(data[:1000]), job); err == nil {
			t.Error("half a layer is one")
		}
		root.Close()
	}
	once()
	fds, goroutines := count()
	for range 5 {
		once()
	}
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(time.Millisecond) { // an ended process may still be in the process table
		f, g := count()
		if f <= fds && g <= goroutines {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("%d descriptors, %d goroutines; before %d, %d", f, g, fds, goroutines)
		}
	}
}
