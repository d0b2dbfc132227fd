package shim

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"berth/internal/cgroup"
	"berth/internal/pidfd"
	"berth/internal/rootfs"
	"berth/shim/ociruntime"
	"berth/shim/proto"
)

// patience bounds each wait of a test. Only a failing test waits that long.
const patience = 60 * time.Second

// env is the environment of one test.
type env struct {
	*testing.T
	ctx   context.Context
	dir   string
	layer string // a root filesystem with busybox
	cfg   Config
	*Launchers
}

// newEnv starts a pool, and checks at the test's end that nothing is left.
func newEnv(t *testing.T, change ...func(*Config)) *env {
	t.Helper()
	return newEnvFor(t, t, change...)
}

func newEnvFor(t *testing.T, tb testing.TB, change ...func(*Config)) *env {
	work := os.Getenv(workEnv)
	dir, err := os.MkdirTemp(work, "env-")
	if err != nil {
		tb.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	e := &env{T: t, ctx: ctx, dir: dir, layer: filepath.Join(work, "busybox")}
	e.cfg = Config{
		ShimPath:    *shimPath,
		MonitorPath: filepath.Join(work, "berth-monitor"),
		StateRoot:   filepath.Join(dir, "libcontainer"),
		Idle:        1,
		Warm:        true,
		Log:         slog.New(slog.NewTextHandler(tb.Output(), nil)),
	}
	for _, c := range change {
		c(&e.cfg)
	}
	if err := makeBusybox(e.layer); err != nil {
		tb.Fatal(err)
	}
	before := traces(tb)
	if e.Launchers, err = New(e.cfg); err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() {
		defer cancel()
		if err := e.Launchers.Close(); err != nil {
			tb.Error(err)
		}
		checkTraces(tb, before)
		if err := os.RemoveAll(dir); err != nil {
			tb.Error(err)
		}
	})
	return e
}

func makeBusybox(dir string) error {
	if _, err := os.Stat(dir); err == nil {
		return nil
	}
	for _, d := range []string{"bin", "dev", "proc", "sys", "tmp", "etc", "mnt"} {
		if err := os.MkdirAll(filepath.Join(dir, d), 0o755); err != nil {
			return err
		}
	}
	data, err := os.ReadFile("/bin/busybox")
	if err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(dir, "bin/busybox"), data, 0o755); err != nil {
		return err
	}
	out, err := exec.Command("chroot", dir, "/bin/busybox", "--install", "-s", "/bin").CombinedOutput()
	if err != nil {
		return fmt.Errorf("install busybox: %w: %s", err, out)
	}
	return nil
}

// container is one launched container of a test.
type container struct {
	*env
	*proto.Launch
	*proto.Started
}

// request returns the launch of a container that runs a shell script.
func (e *env) request(id, script string) *proto.Launch {
	e.Helper()
	dir := filepath.Join(e.dir, id)
	for _, d := range []string{dir, filepath.Join(dir, "upper"), filepath.Join(dir, "work")} {
		if err := os.Mkdir(d, 0o700); err != nil {
			e.Fatal(err)
		}
	}
	return &proto.Launch{
		ID:      id,
		Dir:     dir,
		Spec:    testSpec(id, "/bin/sh", "-c", script),
		LogPath: filepath.Join(dir, "log"),
		Runtime: e.runtime(),
		Rootfs: rootfs.Spec{
			Layers: []rootfs.Layer{{Kind: rootfs.Directory, Path: e.layer}},
			Upper:  filepath.Join(dir, "upper"),
			Work:   filepath.Join(dir, "work"),
		},
	}
}

// runtime returns the OCI runtime to test, nil for libcontainer. It uses libcontainer's state
// directory.
func (e *env) runtime() *ociruntime.Runtime {
	if path := os.Getenv(runtimeEnv); path != "" {
		return &ociruntime.Runtime{Path: path, Root: e.cfg.StateRoot, SubCgroups: true}
	}
	return nil
}

// Exec executes a process in a container of this env.
func (e *env) Exec(ctx context.Context, req *proto.Exec) (*Exec, error) {
	req.Runtime, req.Dir = e.runtime(), filepath.Join(e.dir, req.ID)
	return e.Launchers.Exec(ctx, req)
}

func testSpec(id string, args ...string) *specs.Spec {
	return &specs.Spec{
		Version: specs.Version,
		Process: &specs.Process{Args: args, Cwd: "/", Env: []string{"PATH=/bin"}},
		Mounts: []specs.Mount{
			{Destination: "/proc", Type: "proc", Source: "proc"},
			{Destination: "/dev", Type: "tmpfs", Source: "tmpfs", Options: []string{"nosuid", "strictatime", "mode=755", "size=65536k"}},
			{Destination: "/dev/pts", Type: "devpts", Source: "devpts", Options: []string{"nosuid", "noexec", "newinstance", "ptmxmode=0666", "mode=0620"}},
		},
		Linux: &specs.Linux{
			CgroupsPath: cgroupRoot + "/" + id,
			Namespaces:  []specs.LinuxNamespace{{Type: specs.PIDNamespace}, {Type: specs.IPCNamespace}, {Type: specs.UTSNamespace}, {Type: specs.MountNamespace}},
			Resources:   &specs.LinuxResources{},
		},
	}
}

// launch starts a container, and removes it at the test's end.
func (e *env) launch(req *proto.Launch) *container {
	e.Helper()
	started, err := e.Launch(e.ctx, req)
	if err != nil {
		e.Fatalf("launch %s: %v", req.ID, err)
	}
	c := &container{env: e, Launch: req, Started: started}
	e.Cleanup(c.remove)
	if req.Pause != "" {
		c.awaitOurs()
	}
	return c
}

// awaitOurs waits until a pause is a child of this process, which is process 1. Before that, only
// the pause's launcher can reap it.
func (c *container) awaitOurs() {
	c.Helper()
	c.until("pause is ours to reap", func() bool {
		stat, err := os.ReadFile("/proc/" + itoa(c.InitPID) + "/stat")
		return err == nil && strings.Contains(string(stat), ") S 1 ")
	})
}

// run launches a container that runs a script.
func (e *env) run(id, script string, change ...func(*proto.Launch)) *container {
	e.Helper()
	req := e.request(id, script)
	for _, c := range change {
		c(req)
	}
	return e.launch(req)
}

// remove kills the container's processes and removes its cgroup and state.
func (c *container) remove() {
	c.Helper()
	group := c.group()
	ctx, cancel := context.WithTimeout(context.Background(), patience) // the test may have used up its own
	defer cancel()
	if err := group.Kill(ctx); err != nil {
		c.Error(err)
	}
	for _, f := range []*os.File{c.Init, c.Shim} {
		if f == nil {
			continue
		}
		if err := pidfd.Wait(ctx, f); err != nil {
			c.Errorf("container %s: %v", c.ID, err)
		}
		if err := f.Close(); err != nil {
			c.Error(err)
		}
	}
	if err := errors.Join(KillAndDestroy(ctx, c.ID, c.Dir, group), os.RemoveAll(filepath.Join(c.cfg.StateRoot, c.ID))); err != nil {
		c.Error(err)
	}
}

func (c *container) group() *cgroup.Group {
	c.Helper()
	g, err := cgroup.Open(c.Spec.Linux.CgroupsPath, false)
	if err != nil {
		c.Fatal(err)
	}
	return g
}

// wait waits for the container's end and returns its exit record.
func (c *container) wait() proto.Exit {
	c.Helper()
	if err := pidfd.Wait(c.ctx, c.Shim); err != nil {
		c.Fatalf("wait for %s: %v\n%s", c.ID, err, c.log())
	}
	exit, err := ReadExit(c.Dir)
	if err != nil {
		c.Fatalf("%s: %v", c.ID, err)
	}
	return exit
}

// log returns the log's raw content.
func (c *container) log() string {
	c.Helper()
	data, err := os.ReadFile(c.LogPath)
	if err != nil {
		c.Fatal(err)
	}
	return string(data)
}

// output returns the content of a stream's records in the log.
func (c *container) output(stream string) string {
	c.Helper()
	return decodeLog(c.env, c.log(), stream)
}

func decodeLog(e *env, log, stream string) string {
	e.Helper()
	var b strings.Builder
	for line := range strings.Lines(log) {
		f := strings.SplitN(strings.TrimSuffix(line, "\n"), " ", 4)
		if len(f) != 4 || f[1] != "stdout" && f[1] != "stderr" || f[2] != "F" && f[2] != "P" {
			e.Fatalf("bad log record %q", line)
		}
		if _, err := time.Parse(time.RFC3339Nano, f[0]); err != nil {
			e.Fatal(err)
		}
		if f[1] == stream {
			b.WriteString(f[3])
			if f[2] == "F" {
				b.WriteByte('\n')
			}
		}
	}
	return b.String()
}

// until waits for a condition.
func (e *env) until(what string, condition func() bool) {
	e.Helper()
	for !condition() {
		select {
		case <-e.ctx.Done():
			e.Fatalf("timed out waiting until: %s", what)
		case <-time.After(time.Millisecond):
		}
	}
}

// traces lists what could leak: processes, open files, mounts, cgroups.
func traces(tb testing.TB) map[string]bool {
	tb.Helper()
	all := map[string]bool{}
	procs, err := filepath.Glob("/proc/[0-9]*")
	if err != nil {
		tb.Fatal(err)
	}
	for _, p := range procs {
		if cmdline, err := os.ReadFile(p + "/cmdline"); err == nil && !isKernelThread(p) {
			all[fmt.Sprintf("process %s %q", p, cmdline)] = true
		}
	}
	fds, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		tb.Fatal(err)
	}
	kinds := map[string]int{}
	for _, f := range fds {
		if target, err := os.Readlink("/proc/self/fd/" + f.Name()); err == nil {
			kind, _, _ := strings.Cut(target, ":[")
			kinds[kind]++
		}
	}
	for kind, n := range kinds {
		for i := range n {
			all["file "+kind+" "+strconv.Itoa(i)] = true
		}
	}
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		tb.Fatal(err)
	}
	for line := range strings.Lines(string(mounts)) {
		all["mount "+line] = true
	}
	for _, dir := range cgroupDirs() {
		groups, _ := filepath.Glob(dir + "/*/")
		for _, g := range groups {
			all["cgroup "+g] = true
		}
	}
	return all
}

// isKernelThread reads the parent in /proc/PID/stat: kthreadd is process 2 where it can be seen,
// as in a guest. The kernel starts and ends its children at any time.
func isKernelThread(proc string) bool {
	stat, err := os.ReadFile(proc + "/stat")
	if err != nil {
		return false
	}
	fields := strings.Fields(string(stat[bytes.LastIndexByte(stat, ')')+1:]))
	kthreadd, err := os.ReadFile("/proc/2/comm")
	return err == nil && string(kthreadd) == "kthreadd\n" && fields[1] == "2"
}

// checkTraces reports files and processes that did not exist before. It waits for the runtime's
// poller and for processes that are being reaped.
func checkTraces(tb testing.TB, before map[string]bool) {
	tb.Helper()
	var more []string
	for deadline := time.Now().Add(patience); ; time.Sleep(time.Millisecond) {
		reapOrphans()
		more = nil
		for trace := range traces(tb) {
			if !before[trace] && !strings.HasPrefix(trace, "file anon_inode:[event") && !strings.HasPrefix(trace, "file anon_inode:[pidfd] ") {
				more = append(more, trace)
			}
		}
		if len(more) == 0 || time.Now().After(deadline) {
			break
		}
	}
	for _, trace := range slices.Sorted(slices.Values(more)) {
		var stat []byte
		if fields := strings.Fields(trace); fields[0] == "process" {
			stat, _ = os.ReadFile(fields[1] + "/stat") // a zombie's name and parent are only there
		}
		tb.Errorf("leaked: %s %s", trace, stat)
	}
}

// reapOrphans reaps the ended children, as process 1 does on a host: a launcher that ends leaves
// the inits and monitors of its launches.
func reapOrphans() {
	for {
		if pid, err := unix.Wait4(-1, nil, unix.WNOHANG, nil); err != unix.EINTR && pid <= 0 {
			return
		}
	}
}

func itoa(n int) string { return strconv.Itoa(n) }
