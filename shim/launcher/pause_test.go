package launcher

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"testing"
	"time"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"berth/internal/pidfd"
	"berth/shim/proto"
)

// pause.c counts sysctls from one, in the order of its arguments.
func TestPauseStepError(t *testing.T) {
	spec := &specs.Spec{Linux: &specs.Linux{}}
	spec.Linux.Sysctl = map[string]string{"net.b": "2", "net.a": "1"}
	for step, want := range map[int]string{
		stepClone:           "clone: invalid argument",
		stepSysctl + 2<<8:   `failed to write sysctl net.b = "2": invalid argument`, // package launcher knows it by that
		stepSysctl + 3<<8:   "step 772: invalid argument",
		len(pauseSteps) - 1: "execute it: invalid argument",
		len(pauseSteps):     "step 17: invalid argument",
	} {
		if got := (&pauseStepError{step: step, errno: 22, spec: spec}).Error(); got != want {
			t.Errorf("step %d: %q, want %q", step, got, want)
		}
	}
}

// It may fail to join a cgroup only in hierarchies that limit nothing.
func TestPauseTaskFiles(t *testing.T) {
	root := t.TempDir()
	dir := func(hierarchy, file string) string {
		path := filepath.Join(root, hierarchy)
		if err := errors.Join(os.Mkdir(path, 0o700), os.WriteFile(filepath.Join(path, file), nil, 0o600)); err != nil {
			t.Fatal(err)
		}
		return path
	}
	cpu, memory, shared := dir("cpu", "tasks"), dir("memory", "tasks"), dir("pids,misc", "tasks")
	systemd, misc, v2 := dir("systemd", "tasks"), dir("misc", "tasks"), dir("unified", "cgroup.procs")
	for name, test := range map[string]struct {
		paths   map[string]string
		lists   []string
		unified string
	}{
		"hybrid": {map[string]string{"cpu": cpu, "cpuacct": cpu, "memory": memory, "name=systemd": systemd, "misc": misc, "": v2},
			[]string{cpu + "/tasks", memory + "/tasks", "-" + misc + "/tasks", "-" + systemd + "/tasks"}, v2},
		"misc with another": {map[string]string{"pids": shared, "misc": shared}, []string{shared + "/tasks"}, ""},
		"systemd's is gone": {map[string]string{"cpu": cpu, "name=systemd": filepath.Join(root, "none")}, []string{cpu + "/tasks"}, ""},
	} {
		lists, unified := taskFilesOf(test.paths)
		if !slices.Equal(lists, test.lists) || unified != test.unified {
			t.Errorf("%s: %q, %q, want %q, %q", name, lists, unified, test.lists, test.unified)
		}
	}
}

// pauseStageEnv makes the test binary a second stage: it waits for a byte on descriptor 3 and then
// carries out the variable's command.
const pauseStageEnv = "BERTH_TEST_PAUSE"

func TestMain(m *testing.M) {
	if what := os.Getenv(pauseStageEnv); what != "" {
		fmt.Fprintln(os.Stderr, pauseStage(what))
		os.Exit(1)
	}
	os.Exit(m.Run())
}

func pauseStage(what string) error {
	if what == "hold" { // it is pause
		time.Sleep(time.Hour)
	}
	if n, err := unix.Read(3, make([]byte, 1)); n != 1 || err != nil {
		return fmt.Errorf("the second stage got no byte to continue: %d, %w", n, err)
	}
	switch what {
	case "executes":
		unix.CloseOnExec(3)
		return unix.Exec("/proc/self/exe", proto.PauseArgs, []string{pauseStageEnv + "=hold"})
	case "is killed":
		return unix.Kill(os.Getpid(), unix.SIGKILL)
	}
	_, err := unix.Write(3, binary.NativeEndian.AppendUint32(binary.NativeEndian.AppendUint32(nil, uint32(len(pauseSteps)-1)), uint32(unix.ENOENT)))
	return err
}

// The end of the second stage's socket says that it has executed pause, unless it was killed
// meanwhile.
func TestPauseExecute(t *testing.T) {
	for what, want := range map[string]string{"executes": "", "is killed": "pause was killed", "fails": "execute it: no such file or directory"} {
		t.Run(what, func(t *testing.T) {
			for range 10 { // the socket of one that is killed is closed a moment before it has ended
				m, second := startPauseStage(t, what)
				err := m.execute()
				switch {
				case want == "" && err != nil, want != "" && (err == nil || err.Error() != want):
					t.Errorf("execute: %v, want %q", err, want)
				}
				_ = second.Process.Kill() // it may have ended,
				_ = second.Wait()         // and been reaped
			}
		})
	}
}

// startPauseStage starts a second stage, which alone has the other end of m.child.
func startPauseStage(t *testing.T, what string) (*pauseBackend, *exec.Cmd) {
	t.Helper()
	second := exec.Command("/proc/self/exe")
	second.Env, second.Stderr = append(os.Environ(), pauseStageEnv+"="+what), t.Output()
	m := &pauseBackend{launch: &launch{Launch: &proto.Launch{Spec: &specs.Spec{Linux: &specs.Linux{}}}}, first: exec.Command("true")}
	for _, s := range []struct {
		cmd  *exec.Cmd
		ours **os.File
	}{{m.first, &m.parent}, {second, &m.child}} {
		fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			t.Fatal(err)
		}
		*s.ours = os.NewFile(uintptr(fds[0]), "ours")
		theirs := os.NewFile(uintptr(fds[1]), "theirs")
		s.cmd.ExtraFiles = []*os.File{theirs}
		if err := errors.Join(s.cmd.Start(), theirs.Close()); err != nil {
			t.Fatal(err)
		}
	}
	m.pid = second.Process.Pid
	var err error
	if m.second, err = pidfd.Open(m.pid); err != nil {
		t.Fatal(err)
	}
	return m, second
}
