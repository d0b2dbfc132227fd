package shim

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"

	"berth/internal/errdefs"
	"berth/internal/pidfd"
	"berth/internal/rootfs"
	"berth/shim/proto"
)

func TestExit(t *testing.T) {
	e := newEnv(t)
	for _, tt := range []struct {
		name, script string
		want         proto.Exit
	}{
		{"zero", "exit 0", proto.Exit{}},
		{"three", "exit 3", proto.Exit{Code: 3}},
		{"subshell-killed", "sh -c 'kill -9 $$'; exit $?", proto.Exit{Code: 137}},
	} {
		got := e.run(tt.name, tt.script).wait()
		if got.Code != tt.want.Code || got.Signal != tt.want.Signal || got.OOMKilled {
			t.Errorf("%s: exit = %+v, want %+v", tt.name, got, tt.want)
		}
		if got.At.IsZero() {
			t.Errorf("%s: no time of the end", tt.name)
		}
	}
}

func TestSignals(t *testing.T) {
	e := newEnv(t)
	trap := e.run("trap", "trap 'exit 7' TERM; echo ready; while :; do sleep 1000 & wait; done")
	e.until("the trap is set", func() bool { return trap.output("stdout") != "" })
	if err := pidfd.Signal(trap.Init, unix.SIGTERM); err != nil {
		t.Fatal(err)
	}
	if got := trap.wait(); got.Code != 7 || got.Signal != 0 {
		t.Errorf("after SIGTERM: %+v, want code 7", got)
	}
	sleeping := e.run("sleeping", "exec sleep 1000")
	if err := pidfd.Signal(sleeping.Init, unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	if got := sleeping.wait(); got.Code != 137 || got.Signal != 9 {
		t.Errorf("after SIGKILL: %+v, want code 137, signal 9", got)
	}
}

func TestRecords(t *testing.T) {
	e := newEnv(t)
	c := e.run("records", "exec sleep 1000")
	got, err := ReadShim(c.Dir)
	if err != nil {
		t.Fatal(err)
	}
	want := c.PIDs
	if string(got.Encode()) != string(want.Encode()) {
		t.Errorf("ReadShim = %+v, want %+v", got, want)
	}
	for _, p := range []struct {
		pid   int
		start uint64
	}{{got.MonitorPID, got.MonitorStartTime}, {got.InitPID, got.InitStartTime}} {
		f, err := pidfd.OpenVerified(p.pid, p.start)
		if err != nil {
			t.Fatal(err)
		}
		f.Close()
	}
	if _, err := ReadExit(c.Dir); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("ReadExit of a running container = %v, want not exist", err)
	}
}

func TestMonitorRunsInHostMountNamespace(t *testing.T) {
	e := newEnv(t)
	c := e.run("ns", "exec sleep 1000")
	ns := func(pid string) string {
		link, err := os.Readlink("/proc/" + pid + "/ns/mnt")
		if err != nil {
			t.Fatal(err)
		}
		return link
	}
	shim := itoa(c.MonitorPID)
	e.until("the launcher is the monitor", func() bool {
		name, _ := os.ReadFile("/proc/" + shim + "/comm")
		return string(name) == "berth-monitor\n"
	})
	if got, want := ns(shim), ns("self"); got != want {
		t.Errorf("the monitor's mount namespace is %s, ours %s", got, want)
	}
	tasks, err := os.ReadDir("/proc/" + shim + "/task")
	if err != nil {
		t.Fatal(err)
	}
	for _, task := range tasks {
		if got, want := ns(shim+"/task/"+task.Name()), ns("self"); got != want {
			t.Errorf("thread %s's mount namespace is %s, ours %s", task.Name(), got, want)
		}
	}
	if cwd, err := os.Readlink("/proc/" + shim + "/cwd"); cwd != "/" || err != nil {
		t.Errorf("the monitor's working directory is %s, %v", cwd, err)
	}
	// Only the container's mount namespace has its root filesystem.
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		t.Fatal(err)
	}
	if strings.Contains(string(mounts), c.Dir) {
		t.Errorf("the root filesystem is mounted on the host:\n%s", mounts)
	}
}

func TestMonitorInheritsNothingElse(t *testing.T) {
	e := newEnv(t)
	c := e.run("fds", "exec sleep 1000")
	if err := OpenMonitor(c.Dir).ReopenLog(e.ctx); err != nil { // Go's runtime has started when it answers
		t.Fatal(err)
	}
	allowed := []string{"/dev/null", "socket:", "pipe:", c.LogPath, "anon_inode:", "pidfd", "memory.oom_control", "memory.events"}
	dir := "/proc/" + itoa(c.MonitorPID) + "/fd"
	fds, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range fds {
		target, err := os.Readlink(dir + "/" + f.Name())
		ok := err != nil // closed meanwhile
		for _, a := range allowed {
			ok = ok || strings.Contains(target, a)
		}
		if !ok {
			t.Errorf("the monitor has %s open", target)
		}
	}
}

func TestMonitorIgnoresSignals(t *testing.T) {
	e := newEnv(t)
	c := e.run("signals", "read x; exit 5", func(r *proto.Launch) { r.Stdin = true })
	if err := OpenMonitor(c.Dir).ReopenLog(e.ctx); err != nil { // the answer comes from the monitor
		t.Fatal(err)
	}
	for _, sig := range []unix.Signal{unix.SIGHUP, unix.SIGINT, unix.SIGQUIT, unix.SIGTERM, unix.SIGUSR1, unix.SIGUSR2, unix.SIGPIPE, unix.SIGALRM, unix.SIGTTOU} {
		if err := pidfd.Signal(c.Shim, sig); err != nil {
			t.Fatal(err)
		}
	}
	if err := OpenMonitor(c.Dir).CloseStdin(e.ctx); err != nil {
		t.Fatal(err)
	}
	if got := c.wait(); got.Code != 5 {
		t.Errorf("exit = %+v, want code 5", got)
	}
}

func TestLaunchErrors(t *testing.T) {
	e := newEnv(t)
	for _, tt := range []struct {
		name   string
		change func(*proto.Launch)
		code   codes.Code
		want   string
	}{
		{"no-command", func(r *proto.Launch) { r.Spec.Process.Args = []string{"no-such-command", "x"} }, codes.InvalidArgument, "no-such-command"},
		{"no-path", func(r *proto.Launch) { r.Spec.Process.Args = []string{"/no/such/file"} }, codes.InvalidArgument, "/no/such/file"},
		{"not-executable", func(r *proto.Launch) { r.Spec.Process.Args = []string{"/etc"} }, codes.InvalidArgument, "/etc"},
		{"empty-command", func(r *proto.Launch) { r.Spec.Process.Args = nil }, codes.InvalidArgument, "no command"},
		{"cwd-is-file", func(r *proto.Launch) { r.Spec.Process.Cwd = "/bin/sh" }, codes.InvalidArgument, "/bin/sh"},
		{"mount-source", func(r *proto.Launch) {
			r.Spec.Mounts = append(r.Spec.Mounts, specs.Mount{Destination: "/mnt", Source: "/no/such/source", Options: []string{"bind"}})
		}, codes.Internal, "/no/such/source"},
		{"layer", func(r *proto.Launch) {
			r.Rootfs.Layers = []rootfs.Layer{{Kind: rootfs.Directory, Path: "/no/such/layer"}}
		}, codes.Unknown, "/no/such/layer"},
		{"log", func(r *proto.Launch) { r.LogPath = "/no/such/dir/0.log" }, codes.Internal, "/no/such/dir/0.log"},
		{"namespace", func(r *proto.Launch) {
			r.Spec.Linux.Namespaces = append(r.Spec.Linux.Namespaces, specs.LinuxNamespace{Type: specs.NetworkNamespace, Path: "/no/such/ns"})
		}, codes.Internal, "/no/such/ns"},
		{"rlimit", func(r *proto.Launch) {
			r.Spec.Process.Rlimits = []specs.POSIXRlimit{{Type: "RLIMIT_WISHES"}}
		}, codes.InvalidArgument, "RLIMIT_WISHES"},
	} {
		req := e.request(tt.name, "exit 0")
		tt.change(req)
		_, err := e.Launch(e.ctx, req)
		if err == nil {
			t.Fatalf("%s: no error", tt.name)
		}
		if !strings.Contains(err.Error(), tt.want) || tt.code != codes.Unknown && errdefs.Code(err) != tt.code {
			t.Errorf("%s: %v (%v), want %q (%v)", tt.name, err, errdefs.Code(err), tt.want, tt.code)
		}
		e.nothingLeft(req)
	}
}

// nothingLeft checks that a failed launch has undone everything.
func (e *env) nothingLeft(req *proto.Launch) {
	e.Helper()
	entries, err := os.ReadDir(req.Dir)
	if err != nil {
		e.Fatal(err)
	}
	for _, entry := range entries {
		switch entry.Name() {
		case "upper", "work", "log": // the caller's
		default:
			e.Errorf("%s: left %s", req.ID, entry.Name())
		}
	}
	if state, err := os.ReadDir(e.cfg.StateRoot); err == nil && len(state) > 0 {
		e.Errorf("%s: left in libcontainer's state: %v", req.ID, state)
	}
	for _, dir := range cgroupDirs() {
		if _, err := os.Stat(filepath.Join(dir, req.ID)); err == nil {
			e.Errorf("%s: left cgroup in %s", req.ID, dir)
		}
	}
}

func TestDuplicateID(t *testing.T) {
	e := newEnv(t)
	c := e.run("twice", "read x; exit 4", func(r *proto.Launch) { r.Stdin = true })
	other := filepath.Join(e.dir, "other")
	if err := os.Mkdir(other, 0o700); err != nil {
		t.Fatal(err)
	}
	req := *c.Launch
	req.Dir, req.Rootfs.Upper, req.Rootfs.Work = other, "", ""
	if _, err := e.Launch(e.ctx, &req); err == nil {
		t.Fatal("a second container with the same ID was launched")
	}
	if err := OpenMonitor(c.Dir).CloseStdin(e.ctx); err != nil {
		t.Fatal(err)
	}
	if got := c.wait(); got.Code != 4 {
		t.Errorf("the first container did not survive: %+v", got)
	}
}

func TestLaunchCancelled(t *testing.T) {
	e := newEnv(t)
	req := e.request("cancelled", "exec sleep 1000")
	// A source that never answers needs a FUSE filesystem. A context that ends at once reaches the
	// launcher at some point of the launch instead.
	ctx, cancel := context.WithCancel(e.ctx)
	var launched sync.WaitGroup
	var started *proto.Started
	var err error
	launched.Go(func() { started, err = e.Launch(ctx, req) })
	cancel()
	launched.Wait()
	if err == nil { // it was faster
		(&container{env: e, Launch: req, Started: started}).remove()
		return
	}
	if !errors.Is(err, context.Canceled) {
		t.Errorf("Launch = %v, want canceled", err)
	}
	e.nothingLeft(req)
}

// pauseRequest returns the launch of a pause, berth's own.
func (e *env) pauseRequest(id string) *proto.Launch {
	e.Helper()
	req := e.request(id, "")
	req.Spec = testSpec(id, "/pause")
	req.Spec.Root = &specs.Root{Readonly: true}
	req.Spec.Process.Capabilities = &specs.LinuxCapabilities{}
	req.Spec.Mounts = req.Spec.Mounts[:2] // /proc and /dev
	req.Rootfs = rootfs.Spec{Layers: []rootfs.Layer{{Kind: rootfs.Directory, Path: os.Getenv(workEnv) + "/pause-root"}}}
	req.LogPath, req.Pause = "", proto.ContainerPause
	if req.FitsPlainPause() {
		req.Pause = proto.PlainPause
	}
	return req
}

func TestPause(t *testing.T) {
	e := newEnv(t)
	req := e.pauseRequest("pause")
	pause := e.launch(req)
	if pause.Shim != nil || pause.MonitorPID != 0 {
		t.Errorf("a pause has a shim: %+v", pause.Started)
	}
	rec, err := ReadShim(req.Dir)
	if err != nil || rec.MonitorPID != 0 || rec.InitPID != pause.InitPID || rec.InitStartTime != pause.InitStartTime {
		t.Errorf("ReadShim = %+v, %v", rec, err)
	}

	// Pause is process 1 of the PID namespace for other containers, and reaps their orphans.
	c := e.run("in-pod", "(sleep 0 &); echo $$; exec sleep 1000", func(r *proto.Launch) {
		for i, ns := range r.Spec.Linux.Namespaces {
			if ns.Type == specs.PIDNamespace {
				r.Spec.Linux.Namespaces[i].Path = "/proc/" + itoa(pause.InitPID) + "/ns/pid"
			}
		}
	})
	e.until("the container has written its PID", func() bool { return c.output("stdout") != "" })
	if pid := strings.TrimSpace(c.output("stdout")); pid == "1" {
		t.Error("the container does not share pause's PID namespace")
	}
	if err := pidfd.Signal(pause.Init, unix.SIGTERM); err != nil {
		t.Fatal(err)
	}
	if err := pidfd.Wait(e.ctx, pause.Init); err != nil {
		t.Fatal(err)
	}
	if got := c.wait(); got.Signal != int(unix.SIGKILL) {
		t.Errorf("the PID namespace's end left the container with %+v", got)
	}
}

func TestSharedPIDNamespaceLeavesNoProcess(t *testing.T) {
	e := newEnv(t)
	c := e.run("host-pid", "sleep 1000 & sleep 1001 & echo both; exit 6", func(r *proto.Launch) {
		r.Spec.Linux.Namespaces = r.Spec.Linux.Namespaces[1:] // without a PID namespace
	})
	if got := c.wait(); got.Code != 6 {
		t.Errorf("exit = %+v, want code 6", got)
	}
	if pids, err := c.group().Procs(); len(pids) != 0 || err != nil {
		t.Errorf("processes after the end: %v, %v", pids, err)
	}
}

func TestShimLost(t *testing.T) {
	e := newEnv(t)
	c := e.run("lost", "exec sleep 1000")
	if err := pidfd.Signal(c.Shim, unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	if err := pidfd.Wait(e.ctx, c.Shim); err != nil {
		t.Fatal(err)
	}
	if _, err := ReadExit(c.Dir); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("ReadExit = %v, want not exist", err)
	}
	if err := OpenMonitor(c.Dir).ReopenLog(e.ctx); errdefs.Code(err) != codes.FailedPrecondition {
		t.Errorf("ReopenLog = %v, want FailedPrecondition", err)
	}
}

func TestIdleLauncherDies(t *testing.T) {
	e := newEnv(t)
	var p *launcher
	e.until("a launcher is idle", func() bool { p = e.pop("", false); return p != nil })
	e.put(p)
	if err := pidfd.Signal(p.proc, unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	e.until("it is reaped without a launch", func() bool {
		_, err := os.Stat("/proc/" + strconv.Itoa(p.pid))
		return errors.Is(err, fs.ErrNotExist)
	})
	if got := e.run("next", "exit 2").wait(); got.Code != 2 {
		t.Errorf("exit = %+v", got)
	}
	e.until("the pool is full again", func() bool {
		e.mu.Lock()
		defer e.mu.Unlock()
		return len(e.idle) == e.cfg.Idle
	})
}

func TestColdLaunch(t *testing.T) {
	e := newEnv(t, func(c *Config) { c.Warm = false })
	if got := e.run("cold", "exit 9").wait(); got.Code != 9 {
		t.Errorf("exit = %+v", got)
	}
}

func TestBidirectionalMount(t *testing.T) {
	e := newEnv(t)
	shared := filepath.Join(t.TempDir(), "volume")
	if err := os.Mkdir(shared, 0o700); err != nil {
		t.Fatal(err)
	}
	c := e.run("csi", "mount -t tmpfs tmpfs /mnt && echo hello >/mnt/file && echo done; exec sleep 1000", func(r *proto.Launch) {
		r.Spec.Linux.RootfsPropagation = "shared"
		r.Spec.Mounts = append(r.Spec.Mounts, specs.Mount{Destination: "/mnt", Source: shared, Options: []string{"rbind", "rshared"}})
		all := []string{"CAP_SYS_ADMIN"}
		r.Spec.Process.Capabilities = &specs.LinuxCapabilities{Bounding: all, Effective: all, Permitted: all}
	})
	e.until("it has mounted", func() bool { return c.output("stdout") != "" })
	if got, err := os.ReadFile(filepath.Join(shared, "file")); string(got) != "hello\n" || err != nil {
		t.Errorf("on the host: %q, %v", got, err)
	}
	if err := unix.Unmount(shared, unix.MNT_DETACH); err != nil {
		t.Error(err)
	}
}

func TestOOM(t *testing.T) {
	if controllers, err := os.ReadFile("/sys/fs/cgroup/cgroup.controllers"); err == nil && !strings.Contains(string(controllers), "memory") {
		t.Skip("this machine's cgroup v2 hierarchy has no memory controller; it is v1's")
	}
	e := newEnv(t)
	limit := int64(64 << 20) // init is the test binary, which takes 17 MiB with the race detector
	c := e.run("oom", "x=a; while :; do x=$x$x; done", func(r *proto.Launch) {
		r.Spec.Linux.Resources.Memory = &specs.LinuxMemory{Limit: &limit, Swap: &limit}
	})
	if got := c.wait(); !got.OOMKilled || got.Code != 137 {
		t.Errorf("exit = %+v, want an OOM kill", got)
	}
}

// Nobody with a descriptor of the launchers' program can make it unexecutable.
func TestSealedCopyStaysExecutable(t *testing.T) {
	f, err := sealedCopy("/bin/true")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	probe, err := unix.MemfdCreate("probe", unix.MFD_EXEC)
	if errors.Is(err, unix.EINVAL) {
		t.Skip("NOT TESTED: F_SEAL_EXEC is Linux 6.3, as MFD_EXEC is")
	}
	defer unix.Close(probe)
	if err := f.Chmod(0o600); !errors.Is(err, unix.EPERM) {
		t.Errorf("chmod: %v", err)
	}
	if err := f.Truncate(0); !errors.Is(err, unix.EPERM) {
		t.Errorf("truncate: %v", err)
	}
	if err := exec.Command(fmt.Sprintf("/proc/self/fd/%d", f.Fd())).Run(); err != nil {
		t.Errorf("execute it: %v", err)
	}
}

// Init reads its configuration from a socket. A configuration that does not fit into the socket
// arrives, too.
func TestLargeEnvironment(t *testing.T) {
	e := newEnv(t)
	value := strings.Repeat("x", 4000)
	c := e.run("large", "env | grep -c xxxxx", func(r *proto.Launch) {
		for i := range 200 {
			r.Spec.Process.Env = append(r.Spec.Process.Env, fmt.Sprintf("V%d=%s", i, value))
		}
	})
	if exit := c.wait(); exit.Code != 0 {
		t.Errorf("exit = %+v", exit)
	}
	if got := c.output("stdout"); got != "200\n" {
		t.Errorf("output = %q", got)
	}
}
