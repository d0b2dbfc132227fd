package shim

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"

	"berth/internal/errdefs"
	"berth/internal/pidfd"
	"berth/internal/testutil"
	"berth/shim/proto"
)

func testProcess(args ...string) *specs.Process {
	return &specs.Process{Args: args, Cwd: "/", Env: []string{"PATH=/bin"}}
}

// execIn runs a script in a container and returns its output and exit code.
func (c *container) execIn(id, script string, change ...func(*specs.Process)) (stdout, stderr string, code int32) {
	c.Helper()
	var files [2]*os.File
	var out [2]string
	var reading sync.WaitGroup
	for i := range files {
		r, w, err := os.Pipe()
		if err != nil {
			c.Fatal(err)
		}
		files[i] = w
		reading.Go(func() {
			data, err := io.ReadAll(r)
			if err = errors.Join(err, r.Close()); err != nil {
				c.Error(err)
			}
			out[i] = string(data)
		})
	}
	process := testProcess("sh", "-c", script)
	for _, f := range change {
		f(process)
	}
	x, err := c.Exec(c.ctx, &proto.Exec{ID: c.ID, ExecID: id, Process: process, Stdout: files[0], Stderr: files[1]})
	closeErr := closeFiles(files[:])
	reading.Wait()
	if err = errors.Join(err, closeErr); err != nil {
		c.Fatal(err)
	}
	defer func() {
		if err := x.Close(); err != nil {
			c.Error(err)
		}
	}()
	code, err = x.Wait(c.ctx)
	if err != nil {
		c.Fatal(err)
	}
	return out[0], out[1], code
}

func TestExec(t *testing.T) {
	e := newEnv(t)
	c := e.run("exec", "exec sleep 1000")
	for i, tt := range []struct {
		script, stdout, stderr string
		code                   int32
	}{
		{"echo out; echo err >&2; exit 5", "out\n", "err\n", 5},
		{"kill -9 $$", "", "", 137},
		{"cat", "", "", 0}, // stdin is /dev/null
		{"cat /proc/1/cmdline", "sleep\x001000\x00", "", 0},
		{"seq 100000 | tail -n 1", "100000\n", "", 0},
	} {
		stdout, stderr, code := c.execIn(itoa(i), tt.script)
		if stdout != tt.stdout || stderr != tt.stderr || code != tt.code {
			t.Errorf("%s: %q, %q, %d", tt.script, stdout, stderr, code)
		}
	}
	c.noExecCgroups()
}

// noExecCgroups checks that execs have removed their cgroups.
func (c *container) noExecCgroups() {
	c.Helper()
	for _, dir := range cgroupDirs() {
		left, err := filepath.Glob(filepath.Join(dir, c.ID, "exec-*"))
		if len(left) > 0 || err != nil {
			c.Errorf("left: %v, %v", left, err)
		}
	}
}

func TestExecStdin(t *testing.T) {
	e := newEnv(t)
	c := e.run("stdin", "exec sleep 1000")
	in, feed, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	read, out, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer read.Close()
	x, err := e.Exec(e.ctx, &proto.Exec{ID: c.ID, ExecID: "1", Process: testProcess("sort"), Stdin: in, Stdout: out})
	if err := errors.Join(err, in.Close(), out.Close()); err != nil {
		t.Fatal(err)
	}
	defer x.Close()
	if _, err := feed.WriteString("b\na\n"); err != nil {
		t.Fatal(err)
	}
	feed.Close()
	if got, err := io.ReadAll(read); string(got) != "a\nb\n" || err != nil {
		t.Errorf("stdout: %q, %v", got, err)
	}
	if code, err := x.Wait(e.ctx); code != 0 || err != nil {
		t.Errorf("Wait = %d, %v", code, err)
	}
}

func TestExecRightAfterStart(t *testing.T) {
	e := newEnv(t)
	for i := range 5 {
		c := e.run(fmt.Sprintf("fresh-%d", i), "exec sleep 1000")
		if stdout, _, code := c.execIn("post-start", "echo hook"); stdout != "hook\n" || code != 0 {
			t.Errorf("%q, %d", stdout, code)
		}
	}
}

func TestExecInParallel(t *testing.T) {
	e := newEnv(t, func(c *Config) { c.Idle = 3 })
	c := e.run("parallel", "exec sleep 1000")
	var running sync.WaitGroup
	for i := range 8 {
		running.Go(func() {
			stdout, _, code := c.execIn(itoa(i), fmt.Sprintf("echo %d; exit %d", i, i))
			if stdout != itoa(i)+"\n" || code != int32(i) {
				t.Errorf("exec %d: %q, %d", i, stdout, code)
			}
		})
	}
	running.Wait()
	c.noExecCgroups()
}

func TestExecTerminal(t *testing.T) {
	e := newEnv(t)
	c := e.run("tty", "exec sleep 1000")
	p := testProcess("sh", "-c", "test -t 0 && test -t 1 && read x && stty size; exit 6")
	p.Terminal, p.ConsoleSize = true, &specs.Box{Width: 90, Height: 30}
	x, err := e.Exec(e.ctx, &proto.Exec{ID: c.ID, ExecID: "1", Process: p})
	if err != nil {
		t.Fatal(err)
	}
	defer x.Close()
	if err := x.Resize(100, 40); err != nil {
		t.Error(err)
	}
	if _, err := x.Console().WriteString("go\n"); err != nil {
		t.Fatal(err)
	}
	var out strings.Builder
	_, err = io.Copy(&out, x.Console())
	if !strings.Contains(out.String(), "40 100\r\n") || err != nil && !errors.Is(err, unix.EIO) {
		t.Errorf("the terminal said %q, %v", out.String(), err)
	}
	if code, err := x.Wait(e.ctx); code != 6 || err != nil {
		t.Errorf("Wait = %d, %v", code, err)
	}
}

func TestExecErrors(t *testing.T) {
	e := newEnv(t)
	c := e.run("errors", "exec sleep 1000")
	for _, tt := range []struct {
		name    string
		id      string
		process *specs.Process
		code    codes.Code
		want    string
	}{
		{"command", c.ID, testProcess("no-such-command"), codes.InvalidArgument, "no-such-command"},
		{"path", c.ID, testProcess("/no/such/file"), codes.InvalidArgument, "/no/such/file"},
		{"nothing", c.ID, testProcess(), codes.InvalidArgument, "no command"},
		{"cwd", c.ID, &specs.Process{Args: []string{"true"}, Cwd: "/no/such/dir", Env: []string{"PATH=/bin"}}, codes.InvalidArgument, "/no/such/dir"},
		{"container", "no-such-container", testProcess("true"), codes.FailedPrecondition, "it is not running"},
	} {
		x, err := e.Exec(e.ctx, &proto.Exec{ID: tt.id, ExecID: tt.name, Process: tt.process})
		if err == nil {
			t.Errorf("%s: no error", tt.name)
			x.Close()
			continue
		}
		if errdefs.Code(err) != tt.code || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%s: %v (%v), want %q (%v)", tt.name, err, errdefs.Code(err), tt.want, tt.code)
		}
	}
	c.noExecCgroups()
	if stdout, _, _ := c.execIn("good", "echo still works"); stdout != "still works\n" {
		t.Errorf("after errors: %q", stdout)
	}
}

func TestExecInEndedContainer(t *testing.T) {
	e := newEnv(t)
	c := e.run("ended", "exit 0")
	c.wait()
	if _, err := e.Exec(e.ctx, &proto.Exec{ID: c.ID, ExecID: "1", Process: testProcess("true")}); errdefs.Code(err) != codes.FailedPrecondition {
		t.Errorf("Exec = %v, want FailedPrecondition", err)
	}
}

// The kernel kills an exec's process before the container's init becomes a zombie, so an exec that
// cannot start may find an init that still looks alive. The many processes delay init's end.
func TestExecWhileContainerEnds(t *testing.T) {
	e := newEnv(t)
	for round := range 8 {
		c := e.run("ends"+itoa(round), "for i in $(seq 100); do sleep 1000 & done; echo up; exec sleep 1000")
		c.until("all children run", func() bool { return strings.Contains(c.output("stdout"), "up") })
		var execs sync.WaitGroup
		var started atomic.Int32
		for i := range 6 {
			execs.Go(func() {
				for n := 0; ; n++ {
					x, err := e.Exec(e.ctx, &proto.Exec{ID: c.ID, ExecID: itoa(i) + "-" + itoa(n), Process: testProcess("true")})
					if err != nil {
						if errdefs.Code(err) != codes.FailedPrecondition {
							t.Errorf("round %d: Exec = %v (%v), want FailedPrecondition", round, err, errdefs.Code(err))
						}
						return
					}
					started.Add(1)
					_, _ = x.Wait(e.ctx) // the end of the container kills it
					_ = x.Close()
				}
			})
		}
		c.until("execs run", func() bool { return started.Load() > 6 })
		if round%2 == 0 {
			testutil.Must(t, unix.Kill(c.InitPID, unix.SIGKILL))
		} else {
			testutil.Must(t, c.group().Kill(e.ctx))
		}
		execs.Wait()
		c.wait()
	}
}

// grandchildren starts an exec whose processes would survive it, and returns it
// with the number of processes that the container had before.
func (c *container) grandchildren() (x *Exec, before int) {
	c.Helper()
	if os.Getenv(runtimeEnv) != "" && os.Getenv(cgroupEnv) == "v1" {
		c.Skip("crun puts an exec into the container's cgroup: with cgroup v1 it is moved to its own a moment later, and what it has left to init by then is missed")
	}
	before = c.countProcesses()
	read, out, err := os.Pipe()
	if err != nil {
		c.Fatal(err)
	}
	defer read.Close()
	x, err = c.Exec(c.ctx, &proto.Exec{ID: c.ID, ExecID: "tree", Stdout: out,
		Process: testProcess("sh", "-c", "(setsid sleep 1001 &); setsid sleep 1002 & trap '' TERM; echo up; sleep 1003; exit 1")})
	if err := errors.Join(err, out.Close()); err != nil {
		c.Fatal(err)
	}
	if _, err := read.Read(make([]byte, 8)); err != nil {
		c.Fatal(err)
	}
	c.until("all are there", func() bool { return c.countProcesses() == before+4 })
	return x, before
}

func (c *container) countProcesses() int {
	c.Helper()
	pids, err := c.group().Procs()
	if err != nil {
		c.Fatal(err)
	}
	return len(pids)
}

func TestExecKillTakesGrandchildren(t *testing.T) {
	e := newEnv(t)
	c := e.run("kill", "exec sleep 1000")
	x, before := c.grandchildren()
	defer x.Close()
	ctx, cancel := context.WithCancel(e.ctx)
	cancel()
	if _, err := x.Wait(ctx); !errors.Is(err, context.Canceled) {
		t.Errorf("Wait = %v, want canceled", err)
	}
	if err := x.Kill(); err != nil {
		t.Fatal(err)
	}
	if code, err := x.Wait(e.ctx); code != 137 || err != nil {
		t.Errorf("Wait = %d, %v, want 137", code, err)
	}
	if n := c.countProcesses(); n != before {
		t.Errorf("%d processes, %d before", n, before)
	}
	c.noExecCgroups()
	if err := x.Kill(); err != nil {
		t.Errorf("Kill after the end = %v", err)
	}
}

func TestExecClosedKillsTree(t *testing.T) {
	e := newEnv(t)
	c := e.run("close", "exec sleep 1000")
	x, before := c.grandchildren()
	if err := x.Close(); err != nil {
		t.Fatal(err)
	}
	e.until("the exec's processes are gone", func() bool { return c.countProcesses() == before })
}

func TestExecLeavesBackgroundChild(t *testing.T) {
	e := newEnv(t)
	c := e.run("background", "exec sleep 1000")
	if _, _, code := c.execIn("1", "sleep 1001 >/dev/null 2>&1 & exit 0"); code != 0 {
		t.Errorf("code %d", code)
	}
	if n := c.countProcesses(); n != 2 {
		t.Errorf("%d processes, want 2", n)
	}
}

func TestExecEndsWithTheContainer(t *testing.T) {
	e := newEnv(t)
	c := e.run("dies", "exec sleep 1000")
	x, err := e.Exec(e.ctx, &proto.Exec{ID: c.ID, ExecID: "1", Process: testProcess("sleep", "1000")})
	if err != nil {
		t.Fatal(err)
	}
	defer x.Close()
	if err := pidfd.Signal(c.Init, unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	if code, err := x.Wait(e.ctx); code != 137 || err != nil {
		t.Errorf("Wait = %d, %v", code, err)
	}
	c.wait()
}

func TestLauncherServesAgainAfterExec(t *testing.T) {
	e := newEnv(t, func(c *Config) { c.Warm, c.Idle = false, 1 })
	c := e.run("again", "exec sleep 1000")
	seen := map[int]bool{}
	for i := range 3 {
		x, err := e.Exec(e.ctx, &proto.Exec{ID: c.ID, ExecID: itoa(i), Process: testProcess("true")})
		if err != nil {
			t.Fatal(err)
		}
		seen[x.p.pid] = true
		if code, err := x.Wait(e.ctx); code != 0 || err != nil {
			t.Errorf("Wait = %d, %v", code, err)
		}
		if err := x.Close(); err != nil {
			t.Error(err)
		}
	}
	if len(seen) != 1 {
		t.Errorf("%d launchers were used for three execs", len(seen))
	}
}

// A launcher keeps the state of the container of its last exec and notices when it changes.
func TestLauncherNoticesReplacedContainer(t *testing.T) {
	e := newEnv(t, func(c *Config) { c.Warm, c.Idle = false, 1 }) // so that one launcher serves all execs
	for _, says := range []string{"first", "second"} {            // a second container with the same ID, which does not happen otherwise
		req := e.request("again", "echo "+says+" >/name; exec sleep 1000")
		started, err := e.Launch(e.ctx, req)
		if err != nil {
			t.Fatal(err)
		}
		c := &container{env: e, Launch: req, Started: started}
		c.until("it has said its name", func() bool {
			name, _ := os.ReadFile(filepath.Join(req.Rootfs.Upper, "name"))
			return string(name) == says+"\n"
		})
		for i := range 2 {
			if stdout, _, code := c.execIn(says+itoa(i), "cat /name"); stdout != says+"\n" || code != 0 {
				t.Errorf("it is called %q (%d), want %s", stdout, code, says)
			}
		}
		fails := func(when string) {
			t.Helper()
			if _, err := e.Exec(e.ctx, &proto.Exec{ID: c.ID, ExecID: when, Process: testProcess("true")}); errdefs.Code(err) != codes.FailedPrecondition {
				t.Errorf("%s: Exec = %v, want FailedPrecondition", when, err)
			}
		}
		if err := pidfd.Signal(c.Init, unix.SIGKILL); err != nil {
			t.Fatal(err)
		}
		c.wait()
		fails("ended")
		c.remove()
		fails("removed")
		if err := os.RemoveAll(c.Dir); err != nil {
			t.Fatal(err)
		}
	}
}

// Launchers that have served concurrent execs are kept for the next ones for a limited time.
func TestSpareLaunchers(t *testing.T) {
	e := newEnv(t)
	setSpareTime := func(d time.Duration) { e.mu.Lock(); e.spareTime = d; e.mu.Unlock() }
	setSpareTime(time.Hour)
	c := e.run("busy", "exec sleep 1000")
	used := func(round string) (pids []int) {
		t.Helper()
		var execs []*Exec
		for i := range 3 {
			x, err := e.Exec(e.ctx, &proto.Exec{ID: c.ID, ExecID: round + itoa(i), Process: testProcess("cat"), Stdin: closedBy(t)})
			if err != nil {
				t.Fatal(err)
			}
			execs, pids = append(execs, x), append(pids, x.p.pid)
		}
		for _, x := range execs {
			if err := x.Kill(); err != nil {
				t.Error(err)
			}
			if code, err := x.Wait(e.ctx); code != 137 || err != nil {
				t.Errorf("Wait = %d, %v", code, err)
			}
			if err := x.Close(); err != nil {
				t.Error(err)
			}
		}
		return pids
	}
	first := used("first")
	for _, pid := range used("second") {
		if !slices.Contains(first, pid) {
			t.Errorf("launcher %d was used, though there are %v", pid, first)
		}
	}
	if n := len(e.idlePIDs()); n <= e.cfg.Idle || n > e.cfg.Idle+maxSpare {
		t.Errorf("%d launchers are idle", n)
	}
	setSpareTime(time.Millisecond)
	e.until("there is none but that of an exec, while execs come and go", func() bool {
		if _, _, code := c.execIn("probe", "true"); code != 0 {
			t.Errorf("an exec ended with %d", code)
		}
		return len(e.idlePIDs()) <= e.cfg.Idle+1
	})
	e.until("there are as many as before", func() bool { return len(e.idlePIDs()) == e.cfg.Idle })
}

// A launcher that returns from an exec never makes the pool start another one.
func TestReturningLauncherStartsNoOther(t *testing.T) {
	e := newEnv(t, func(c *Config) { c.Idle = 2 })
	e.awaitLaunchers()
	ctx, stop := context.WithCancel(e.ctx)
	var looking sync.WaitGroup
	looking.Go(func() {
		for ctx.Err() == nil {
			if n := e.missing(); n > 0 {
				t.Errorf("%d launchers seem to be needed", n)
				return
			}
		}
	})
	for range 3000 {
		e.lend(1)
		e.giveBack(e.pop("", false))
	}
	stop()
	looking.Wait()
}

// idleAs puts a launcher without a process into the pool.
func (l *Launchers) idleAs(pid int, knows string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.idle = append(l.idle, idleLauncher{&launcher{pid: pid, loaded: knows}, func() {}, time.Now()})
}

// idleNow returns how many launchers are idle, and how many of them the pool keeps.
func (l *Launchers) idleNow() (n, enough int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.idle), l.enough()
}

// A launcher is spare if it has been idle for long itself, however many others were used meanwhile.
func TestSpareLaunchersRetireWhileOthersServe(t *testing.T) {
	for name, takenFor := range map[string]func(i int) string{
		"pauses":                             func(int) string { return "" },
		"probes of one container":            func(int) string { return "0" },
		"probes of more than are kept":       func(i int) string { return itoa(i % 3) },
		"probes of more than there ever are": func(i int) string { return itoa(i % 100) },
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				l := &Launchers{cfg: Config{Idle: 2}, spareTime: spareTime}
				burst := l.cfg.Idle + maxSpare
				for pid := range burst {
					l.idleAs(pid, "")
				}
				serve := func(i int) (left int) {
					id := takenFor(i)
					p := l.pop(id, false)
					l.idleAs(p.pid, cmp.Or(id, p.loaded))
					_, rest := l.takeSpare()
					left, enough := l.idleNow()
					if left > enough && rest <= 0 {
						t.Fatalf("%d launchers are idle, and their owner does not look again", left)
					}
					return left
				}
				const pace = 100 * time.Millisecond
				began := time.Now()
				i := 0
				for ; time.Since(began) < spareTime-pace; i++ {
					if left := serve(i); left != burst {
						t.Fatalf("after %v %d launchers are left", time.Since(began), left)
					}
					time.Sleep(pace)
				}
				for ; time.Since(began) < 2*spareTime; i++ {
					serve(i)
					time.Sleep(pace)
				}
				if left, _ := l.idleNow(); left != l.cfg.Idle {
					t.Errorf("after %v there are %d launchers", time.Since(began), left)
				}
			})
		})
	}
}

// An exec takes the launcher that has loaded its container. A launch takes one that has loaded no
// container. Otherwise an exec takes a launcher without a container, or else the launcher that has
// been idle longest. It never takes a spare one.
func TestExecTakesLauncherWithItsContainer(t *testing.T) {
	type pool []string // what each launcher knows; its PID is its index
	for name, test := range map[string]struct {
		idle   pool
		execIn string
		want   int
	}{
		"the last that knows it":             {pool{"a", "", "a", "b"}, "a", 2},
		"a spare one that knows it":          {pool{"a", "", "", "b"}, "a", 0},
		"the last that knows none":           {pool{"", "", "a", "b"}, "", 1},
		"one that knows none for an exec":    {pool{"a", ""}, "b", 1},
		"the longest idle for an exec":       {pool{"a", "b"}, "c", 0},
		"the longest idle for a launch":      {pool{"a", "b"}, "", 0},
		"none that is spare for an exec":     {pool{"", "a", "b", "c"}, "d", 2},
		"none that is spare for a launch":    {pool{"a", "b", "c"}, "", 1},
		"the only one for an exec":           {pool{"a"}, "b", 0},
		"the only one for a launch":          {pool{"a"}, "", 0},
		"one that knows none where some are": {pool{"a", "", "b", ""}, "c", 3},
	} {
		l := &Launchers{cfg: Config{Idle: 2}}
		for pid, knows := range test.idle {
			l.idleAs(pid, knows)
		}
		p := l.pop(test.execIn, false)
		if left, _ := l.idleNow(); p == nil || p.pid != test.want || left != len(test.idle)-1 {
			t.Errorf("%s: launcher %+v, want %d; there are %d", name, p, test.want, left)
		}
	}
	if p := (&Launchers{}).pop("a", false); p != nil {
		t.Errorf("of none there is %+v", p)
	}
}

// An OCI runtime's launch gets no launcher that is the parent of containers.
func TestChooseAChildlessLauncher(t *testing.T) {
	l := &Launchers{cfg: Config{Idle: 2}}
	l.idleAs(0, "a")
	l.idleAs(1, "")
	l.idle[1].parent = true
	if p := l.pop("", true); p == nil || p.pid != 0 {
		t.Errorf("launcher %+v, want 0", p)
	}
	if p := l.pop("", true); p != nil {
		t.Errorf("launcher %+v is a parent", p)
	}
	if p := l.pop("", false); p == nil || p.pid != 1 {
		t.Errorf("launcher %+v, want 1", p)
	}
}

// Each of two containers that are probed in turn keeps its launcher. A launch can take a launcher
// that has served execs.
func TestAlternatingProbesKeepTheirLaunchers(t *testing.T) {
	e := newEnv(t, func(c *Config) { c.Idle = 2 })
	names := []string{"a", "b"}
	containers := map[string]*container{}
	for _, name := range names {
		containers[name] = e.run(name, "exec sleep 1000")
	}
	e.until("there are launchers", func() bool { return len(e.idlePIDs()) == e.cfg.Idle })
	served := map[string]int{}
	for round := range 3 {
		for _, name := range names {
			x, err := e.Exec(e.ctx, &proto.Exec{ID: containers[name].ID, ExecID: name + itoa(round), Process: testProcess("true")})
			if err != nil {
				t.Fatal(err)
			}
			if code, err := x.Wait(e.ctx); code != 0 || err != nil {
				t.Errorf("Wait = %d, %v", code, err)
			}
			if err := x.Close(); err != nil {
				t.Error(err)
			}
			if before := served[name]; round > 0 && x.p.pid != before {
				t.Errorf("round %d: launcher %d serves %s, not %d", round, x.p.pid, name, before)
			}
			served[name] = x.p.pid
		}
	}
	if served["a"] == served["b"] {
		t.Error("one launcher serves both")
	}
	third := e.run("c", "echo here; exec sleep 1000")
	if out, _, code := third.execIn("x", "echo here"); out != "here\n" || code != 0 {
		t.Errorf("an exec in what was launched after execs wrote %q and ended with %d", out, code)
	}
}

// A frozen launcher does not read its request: another one gets the request long before the time
// limit for slow launchers.
func TestOrderOfFrozenLauncherGoesToAnother(t *testing.T) {
	for name, freeze := range map[string]func(t *testing.T, pid int) (thaw func()){
		"stopped":   func(t *testing.T, pid int) func() { stop(t, pid); return func() {} },
		"by cgroup": freezeInCgroup,
	} {
		t.Run(name, func(t *testing.T) {
			e := newEnv(t)
			ends := func(p *launcher, thaw func()) {
				thaw()
				e.until("the frozen one is gone", func() bool { return unix.Kill(p.pid, 0) == unix.ESRCH })
			}
			frozen := e.idleLauncher()
			thaw, begin := freeze(t, frozen.pid), time.Now()
			c := e.run("c", "exec sleep 1000")
			took := time.Since(begin)
			ends(frozen, thaw)
			frozen = e.idleLauncher()
			thaw, begin = freeze(t, frozen.pid), time.Now()
			if out, _, code := c.execIn("x", "echo here"); out != "here\n" || code != 0 {
				t.Errorf("the exec wrote %q and ended with %d", out, code)
			}
			took = max(took, time.Since(begin))
			ends(frozen, thaw)
			if took >= slowOrderTimeout {
				t.Errorf("a launch or an exec took %v", took)
			}
			t.Logf("TOOK %v at most", took)
		})
	}
}

// A launcher that dies before it has read its request: another one gets the request.
func TestOrderOfDeadLauncherGoesToAnother(t *testing.T) {
	e := newEnv(t)
	killed := func() (await func()) {
		p := e.idleLauncher()
		stop(t, p.pid)
		died := make(chan struct{})
		go func() {
			defer close(died)
			e.until("it has its request", func() bool { n, err := p.conn.Unread(); return err == nil && n > 0 })
			if err := unix.Kill(p.pid, unix.SIGKILL); err != nil {
				t.Error(err)
			}
		}()
		return func() { <-died }
	}
	await := killed()
	c := e.run("c", "exec sleep 1000")
	await()
	await = killed()
	if out, _, code := c.execIn("x", "echo here"); out != "here\n" || code != 0 {
		t.Errorf("the exec wrote %q and ended with %d", out, code)
	}
	await()
}

// idleLauncher waits until there is one idle launcher.
func (e *env) idleLauncher() *launcher {
	e.Helper()
	e.until("a launcher is idle", func() bool { e.mu.Lock(); defer e.mu.Unlock(); return len(e.idle) == 1 })
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.idle[0].launcher
}

// A request that is cancelled while its launcher is frozen goes to no other launcher: the pod may
// be gone by then.
func TestCancelledOrderGoesToNoOtherLauncher(t *testing.T) {
	var log testutil.Buffer
	e := newEnv(t, func(c *Config) { c.Log = slog.New(slog.NewTextHandler(&log, nil)) })
	frozen := e.idleLauncher()
	stop(t, frozen.pid)
	ctx, cancel := context.WithCancel(e.ctx)
	defer cancel()
	req, ended := e.request("c", "exec sleep 1000"), make(chan error, 1)
	go func() { _, err := e.Launch(ctx, req); ended <- err }()
	e.until("it has its request", func() bool { n, err := frozen.conn.Unread(); return err == nil && n > 0 })
	cancel()
	if err := <-ended; !errors.Is(err, context.Canceled) {
		t.Errorf("error %v", err)
	}
	if strings.Contains(log.String(), "sending it to another") {
		t.Errorf("another launcher got the request: %s", log.String())
	}
	e.until("the frozen one is gone", func() bool { return unix.Kill(frozen.pid, 0) == unix.ESRCH })
}
