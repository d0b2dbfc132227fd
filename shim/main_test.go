package shim

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/opencontainers/cgroups"
	_ "github.com/opencontainers/runc/libcontainer/nsenter"
	"golang.org/x/sys/unix"

	"berth/internal/testutil"
	program "berth/shim/launcher"
	"berth/shim/proto"
	"berth/shim/running"
)

// The test binary is the launcher, too: current, and checked for races if the
// tests are.
func init() {
	if len(os.Args) == 2 && os.Args[1] == "init" {
		program.Init()
	}
	if settings, err := proto.ParseLauncherArgs(os.Args[1:]); err == nil {
		os.Exit(program.Main(settings))
	}
}

var shimPath = flag.String("shim", "/proc/self/exe", "the berth-shim to test or measure; default: the test binary")

var programs = flag.String("programs", "", "folder with pause and monitor, where there is no compiler; default: they are built")

// The environment of TestMain's inner process.
const (
	workEnv    = "BERTH_TEST_WORK"    // a private folder, with the programs in it
	cgroupEnv  = "BERTH_TEST_CGROUP"  // the cgroup version to use
	runtimeEnv = "BERTH_TEST_RUNTIME" // path of the OCI runtime to use; empty: libcontainer
)

// cgroupRoot is the cgroup of this run's containers.
var cgroupRoot = "/" + filepath.Base(os.Getenv(workEnv))

// TestMain runs the tests as process 1 of a new PID namespace, so that no process can outlive them.
// The root of their mount namespace is shared, as on a host with systemd. On a host with cgroup v1
// they also run with a cgroup v2 hierarchy, which then has no resource controllers. If crun is
// installed, they also run with crun instead of libcontainer.
func TestMain(m *testing.M) {
	flag.Parse()
	if os.Getenv(workEnv) != "" {
		os.Exit(inner(m))
	}
	testutil.MainNeedsRoot()
	code, err := outer()
	if err != nil {
		fmt.Fprintln(os.Stderr, "set-up of the tests:", err)
		code = 1
	}
	os.Exit(code)
}

func outer() (code int, err error) {
	work, err := os.MkdirTemp("", "berth-shim-test-")
	if err != nil {
		return 1, err
	}
	defer os.RemoveAll(work)
	if *programs != "" {
		err = takePrograms(work)
	} else {
		err = buildPrograms(work)
	}
	if err != nil {
		return 1, err
	}
	versions := []string{"v2"}
	if !onlyV2() {
		versions = []string{"v1", "v2"}
	}
	runtimes := runtimes()
	for i, runtime := range runtimes {
		for j, v := range versions {
			if !testutil.AllTests() && i%len(versions) != j%len(runtimes) {
				continue // each runtime and each cgroup version once
			}
			c, err := runInner(work, v, runtime)
			if err != nil {
				return 1, err
			}
			if c != 0 {
				fmt.Fprintf(os.Stderr, "(that was with cgroup %s and %s)\n", v, cmp.Or(runtime, "libcontainer"))
				code = c
			}
		}
	}
	return code, nil
}

// runtimes returns the runtimes to test: libcontainer, which is "", and crun.
func runtimes() []string {
	crun, err := exec.LookPath("crun")
	if err != nil {
		fmt.Fprintln(os.Stderr, "NOT TESTED with crun, which is not installed")
		return []string{""}
	}
	return []string{"", crun}
}

func onlyV2() bool {
	var st unix.Statfs_t
	return unix.Statfs("/sys/fs/cgroup", &st) == nil && st.Type == unix.CGROUP2_SUPER_MAGIC
}

// makePauseRoot makes the folders of pause's root and returns its path.
func makePauseRoot(work string) (string, error) {
	root := filepath.Join(work, "pause-root")
	for _, d := range []string{"proc", "dev", "sys"} {
		if err := os.MkdirAll(filepath.Join(root, d), 0o755); err != nil {
			return "", err
		}
	}
	return root, nil
}

// takePrograms copies what contrib/build has made.
func takePrograms(work string) error {
	root, err := makePauseRoot(work)
	if err != nil {
		return err
	}
	for from, to := range map[string]string{"pause": filepath.Join(root, "pause"), "monitor": filepath.Join(work, "berth-monitor")} {
		content, err := os.ReadFile(filepath.Join(*programs, from))
		if err != nil {
			return err
		}
		if err := os.WriteFile(to, content, 0o755); err != nil {
			return err
		}
	}
	return nil
}

// buildPrograms makes what contrib/build makes, so that the tests never run old ones.
func buildPrograms(work string) error {
	root, err := makePauseRoot(work)
	if err != nil {
		return err
	}
	pause := exec.Command("cc", "-Os", "-static", "-nostdlib", "-ffreestanding", "-fno-stack-protector", "-fno-pie", "-no-pie",
		"-o", filepath.Join(root, "pause"), "pause/pause.c")
	monitor := exec.Command("monitor/build", append(monitorOptions, filepath.Join(work, "berth-monitor"))...)
	for _, cmd := range []*exec.Cmd{pause, monitor} {
		if out, err := cmd.CombinedOutput(); err != nil {
			return fmt.Errorf("%s: %w\n%s", cmd, err, out)
		}
	}
	return nil
}

func runInner(work, cgroup, runtime string) (int, error) {
	cmd := exec.Command("/proc/self/exe", os.Args[1:]...)
	cmd.Args[0] = os.Args[0]
	cmd.Env = append(os.Environ(), workEnv+"="+work, cgroupEnv+"="+cgroup, runtimeEnv+"="+runtime)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Unshareflags: syscall.CLONE_NEWNS, // makes every mount private, too
		Cloneflags:   syscall.CLONE_NEWPID,
		Pdeathsig:    syscall.SIGKILL,
	}
	err := cmd.Run()
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		return exit.ExitCode(), nil
	}
	return 0, err
}

func inner(m *testing.M) int {
	if err := enter(os.Getenv(workEnv)); err != nil {
		fmt.Fprintln(os.Stderr, "set-up of the tests:", err)
		return 1
	}
	// The cgroup library opens the root of the hierarchies once, for good. Any
	// access does it, and must not look like a leak later.
	_, _ = cgroups.ReadFile("/sys/fs/cgroup", "cgroup.procs")
	code := m.Run()
	if err := removeCgroups(); err != nil {
		fmt.Fprintln(os.Stderr, "left by the tests:", err)
		return 1
	}
	return code
}

// enter arranges the mounts.
func enter(work string) error {
	if err := unix.Mount("proc", "/proc", "proc", 0, ""); err != nil {
		return fmt.Errorf("mount /proc: %w", err)
	}
	if os.Getenv(cgroupEnv) == "v2" && !onlyV2() {
		if err := unix.Mount("cgroup2", "/sys/fs/cgroup", "cgroup2", 0, ""); err != nil {
			return fmt.Errorf("mount cgroup v2: %w", err)
		}
	}
	if err := hideUnifiedControllers(work); err != nil {
		return err
	}
	if err := unix.Mount("", "/", "", unix.MS_SHARED|unix.MS_REC, ""); err != nil {
		return fmt.Errorf("make mounts shared: %w", err)
	}
	if err := unix.Mount(work, work, "", unix.MS_BIND, ""); err != nil {
		return fmt.Errorf("bind %s: %w", work, err)
	}
	return unix.Mount("", work, "", unix.MS_PRIVATE, "")
}

// hideUnifiedControllers makes a hybrid cgroup setup look like pure v1, because crun refuses hybrid
// setups. The tests use no controller of the v2 hierarchy.
func hideUnifiedControllers(work string) error {
	const file = "/sys/fs/cgroup/unified/cgroup.controllers"
	if _, err := os.Stat(file); err != nil {
		return nil // it is not hybrid
	}
	empty := filepath.Join(work, "empty")
	if err := os.WriteFile(empty, nil, 0o600); err != nil {
		return err
	}
	if err := unix.Mount(empty, file, "", unix.MS_BIND, ""); err != nil {
		return fmt.Errorf("hide %s: %w", file, err)
	}
	return nil
}

// cgroupDirs returns the tests' cgroup in every hierarchy.
func cgroupDirs() []string {
	if os.Getenv(cgroupEnv) == "v2" {
		return []string{"/sys/fs/cgroup" + cgroupRoot}
	}
	dirs, _ := filepath.Glob("/sys/fs/cgroup/*" + cgroupRoot)
	return dirs
}

// removeCgroups removes the tests' cgroups, which must be empty by now.
func removeCgroups() error {
	var left []string
	for _, dir := range cgroupDirs() {
		if err := unix.Rmdir(dir); err != nil && err != unix.ENOENT {
			left = append(left, fmt.Sprintf("%s: %v", dir, err))
		}
	}
	if left != nil {
		return errors.New(strings.Join(left, ", "))
	}
	return nil
}

// attachTo connects streams to a container until one of both ends.
func attachTo(ctx context.Context, m *Monitor, streams running.AttachIO) error {
	a, err := m.OpenAttach(ctx, streams.Wants())
	if err != nil {
		return err
	}
	return a.Copy(ctx, streams)
}
