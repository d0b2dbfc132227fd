package crash

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/integration/harness"
	"berth/integration/machine"
	"berth/sandbox/state"
)

// shimRestores make and restore checkpoints. Launchers, monitors and CRIU are killed.
var shimRestores = []shimOperation{
	{operation: restores[0], next: again(checkpointContainer), launches: true, criuRuns: dumps, crashed: dumpFailed},
	{operation: restores[1], next: again(checkpointPod), launches: true, criuRuns: dumps, crashed: dumpFailed},
	{operation: restores[2], launches: true},
	{operation: restores[3], next: restoreAgain, launches: true, criuRuns: [2]string{"launcher.namespace-left", "launcher.restored"}, crashed: startFailed},
	{operation: restores[4], noMonitor: true},
	{operation: restores[5]},
}

// dumps are the points while CRIU runs for a checkpoint.
var dumps = [2]string{"launcher.criu-started", "launcher.criu-dumped"}

// criuProgram is the name of CRIU in the names of cases.
const criuProgram = "criu"

// dumpFailed checks the end of a checkpoint during which a program died. The container is thawed,
// or lost with its monitor. A failed checkpoint has left no file, a successful one is complete.
func dumpFailed(t *testing.T, w *world, program string, err error) {
	t.Helper()
	ended := false
	switch program {
	case harness.MonitorProgram:
		w.isLost(t)
		ended = true
	case criuProgram:
		ended = thawedOrEndedWithCRIU(t, w)
		w.removeTemporaryMounts(t)
	default:
		thawed(t, w)
	}
	left := harness.Get(os.ReadDir(w.checkpoint))(t)
	if err == nil {
		isValid(t, w, w.made())
		return
	}
	if len(left) > 0 {
		t.Errorf("a failed checkpoint has left %v", left)
	}
	var want []codes.Code
	if program != harness.MonitorProgram {
		want = append(want, codes.Internal) // a program of berth, or CRIU, has ended
	}
	if ended { // the answer may tell this instead
		want = append(want, codes.FailedPrecondition, codes.Unavailable)
	}
	if code := harness.CodeOf(err); !slices.Contains(want, code) {
		t.Errorf("code %v, want %v: %v", code, want, err)
	}
}

// made returns the path of the checkpoint that an operation has made.
func (w *world) made() string {
	if _, err := os.Stat(w.archivePath()); err == nil {
		return w.archivePath()
	}
	return w.checkpoint
}

// isLost checks that the container has ended because its monitor was killed.
func (w *world) isLost(t *testing.T) {
	t.Helper()
	c := &harness.Container{Pod: &harness.Pod{D: w.d, Id: w.podID, Config: w.pod}, Id: w.id, Config: w.container}
	status := c.WaitExited(t)
	if status.ExitCode != state.CodeUnknown || status.Reason != state.ReasonShimLost {
		t.Errorf("exit code %d, reason %q", status.ExitCode, status.Reason)
	}
}

// thawedOrEndedWithCRIU waits until the container is thawed or has ended. A process that CRIU has
// changed ends when it is thawed, which may be after the end of the request.
func thawedOrEndedWithCRIU(t *testing.T, w *world) (ended bool) {
	t.Helper()
	harness.Eventually(t, "the container is thawed or has ended", func() error {
		if pids := waiting(); len(pids) > 0 {
			return isThawed(pids[0])
		}
		return nil
	})
	if len(waiting()) > 0 {
		return false
	}
	w.endedWithCRIU(t)
	return true
}

// removeTemporaryMounts removes the directories in the container's /tmp on which a killed CRIU had
// a tmpfs mounted to save its files. They are the container's, and stay until its removal.
func (w *world) removeTemporaryMounts(t *testing.T) {
	t.Helper()
	for _, dir := range harness.Get(filepath.Glob(filepath.Join(w.d.Root, "rootfs/*/upper/tmp/cr-tmpfs.*")))(t) {
		harness.Must(t, os.Remove(dir))
	}
}

// endedWithCRIU checks the verdict of a container whose process CRIU has changed when it was
// killed: CRIU executes its own instructions in the process (compel), and a process goes on there
// after CRIU's death.
func (w *world) endedWithCRIU(t *testing.T) {
	t.Helper()
	c := &harness.Container{Pod: &harness.Pod{D: w.d, Id: w.podID, Config: w.pod}, Id: w.id, Config: w.container}
	status := c.WaitExited(t)
	signal := unix.Signal(status.ExitCode - 128)
	if !slices.Contains([]unix.Signal{unix.SIGTRAP, unix.SIGSEGV, unix.SIGILL, unix.SIGBUS}, signal) || status.Reason != state.ReasonError {
		t.Errorf("exit code %d, reason %q", status.ExitCode, status.Reason)
	}
	t.Logf("the container ended with its CRIU: %v", signal)
}

// again repeats a checkpoint, as kubelet's client does. A container that was lost is replaced
// before.
func again(request func(*testing.T, *world) error) func(*testing.T, *world) error {
	return func(t *testing.T, w *world) error {
		w.checkpoint = t.TempDir()
		if err := startNext(t, w); err != nil {
			return err
		}
		c := &harness.Container{Pod: &harness.Pod{D: w.d, Id: w.podID, Config: w.pod}, Id: w.id, Config: w.container}
		c.WaitOutput(t, "ready")
		return request(t, w)
	}
}

// startFailed checks the end of the start of a restored container during which a program died.
func startFailed(t *testing.T, w *world, program string, err error) {
	t.Helper()
	status := harness.Get(w.d.Cri.ContainerStatus(t.Context(), w.id, false))(t).Status
	switch {
	case err == nil && program == harness.MonitorProgram:
		w.isLost(t)
	case err == nil && status.State == runtimeapi.ContainerState_CONTAINER_EXITED: // a launcher that has answered, but is no monitor yet
		w.isLost(t)
	case err == nil:
		harness.Equal(t, "state after the start", status.State, runtimeapi.ContainerState_CONTAINER_RUNNING)
	default:
		harness.Equal(t, "reason after the failed start", status.Reason, state.ReasonStartError)
		if code := harness.CodeOf(err); code != codes.Internal && code != codes.FailedPrecondition {
			t.Errorf("code %v: %v", code, err)
		}
	}
	if left := criuProcesses(); len(left) > 0 {
		t.Errorf("processes of CRIU are left: %v", left)
	}
}

// restoreAgain restores a pod again if its container does not run.
func restoreAgain(t *testing.T, w *world) error {
	status := harness.Get(w.d.Cri.ContainerStatus(t.Context(), w.id, false))(t).Status
	if status.State == runtimeapi.ContainerState_CONTAINER_RUNNING {
		return nil
	}
	if err := removePod(t, w); err != nil {
		return err
	}
	harness.Must(t, os.RemoveAll(w.pod.LogDirectory))
	w.nameLog(t)
	if err := restorePod(t, w); err != nil {
		return err
	}
	return startContainer(t, w)
}

// runCRIU kills CRIU while the launcher waits at each of its points, and at any time of its work.
func (e *shimEnumeration) runCRIU(t *testing.T, cases []shimPoint) {
	kill := func(name string, how killing) {
		e.cases++
		if !t.Run(criuProgram+"/"+name, func(t *testing.T) { e.crash(t, how, false, e.after) }) {
			e.failed++
			e.startOver(t)
		}
	}
	runs := false
	for _, c := range cases {
		runs = runs || c.point.point == e.criuRuns[0]
		if c.point.point == e.criuRuns[1] {
			break
		}
		if runs && c.program == harness.LauncherProgram {
			kill(fmt.Sprintf("%s/%d", c.point.point, c.n), e.criuAt(c.point))
		}
	}
	const times = 8
	for i := range times {
		kill(fmt.Sprintf("time-%d", i), e.criuAfter(criuRuns, time.Duration(i)*time.Millisecond))
		if e.criuRuns == dumps {
			kill(fmt.Sprintf("traced-%d", i), e.criuAfter(isTraced, time.Duration(i)*200*time.Microsecond))
		}
	}
}

// criuAt kills CRIU while the launcher waits at a point.
func (e *shimEnumeration) criuAt(at point) killing {
	return killing{
		program: criuProgram,
		arm:     func(t *testing.T) { e.fp.FreezeNext(t, harness.LauncherProgram, at.point, at.n) },
		reached: func() bool {
			reached := e.fp.WaitReached(deathPatience) && isStopped()
			killed := killCRIU()
			machine.ContinueAll()
			return reached && killed
		},
		disarm:  func() { e.fp.Disarm() },
		mayMiss: true, // CRIU does not run at each point
	}
}

// isStopped waits for a stopped process: a launcher stops after it has reported the point. A
// SIGCONT before that would have no effect.
func isStopped() bool {
	return harness.PollUpTo(deathPatience, time.Millisecond, func() error {
		if len(machine.Stopped()) == 0 {
			return errors.New("no process is stopped")
		}
		return nil
	}) == nil
}

// criuAfter kills CRIU at a time after an event. CRIU's children live on, as after a kill by the
// kernel's OOM killer.
func (e *shimEnumeration) criuAfter(event func() bool, d time.Duration) killing {
	return killing{
		program: criuProgram,
		arm:     func(*testing.T) {},
		reached: func() bool {
			happened := event()
			time.Sleep(d) // any time is right: the result may not depend on it
			pids := criuProcesses()
			return happened && len(pids) > 0 && unix.Kill(pids[0], unix.SIGKILL) == nil
		},
		disarm:  func() {},
		mayMiss: true, // CRIU may have ended
	}
}

// criuRuns waits until CRIU runs.
func criuRuns() bool {
	return harness.PollUpTo(deathPatience, time.Millisecond, func() error {
		if len(criuProcesses()) == 0 {
			return errors.New("no CRIU runs")
		}
		return nil
	}) == nil
}

// isTraced waits until CRIU traces the container's process, to change it.
func isTraced() bool {
	return harness.PollUpTo(deathPatience, 100*time.Microsecond, func() error {
		for _, pid := range waiting() {
			if tracer, err := machine.ReadStatusField(pid, "TracerPid"); err == nil && tracer != "0" {
				return nil
			}
		}
		return errors.New("CRIU does not trace the container's process")
	}) == nil
}

// killCRIU kills all CRIUs and reports whether there were any.
func killCRIU() (killed bool) {
	for _, pid := range criuProcesses() {
		killed = unix.Kill(pid, unix.SIGKILL) == nil || killed
	}
	return killed
}

// criuProcesses returns the running CRIUs, and those of its children that are not yet the
// container's. CRIU renames itself when it gets a request.
func criuProcesses() (pids []int) {
	for _, pid := range machine.Processes() {
		line := strings.TrimSpace(machine.CommandLine(pid))
		if (strings.HasSuffix(line, "swrk 3") || strings.Contains(line, " --rpc ")) && machine.Alive(pid) {
			pids = append(pids, pid)
		}
	}
	return pids
}
