package harness

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"
)

// failpointsDir is the subdirectory of BinDir with the binaries that have failpoints.
const failpointsDir = "failpoints"

// withFailpoints makes findBinaries use the binaries with failpoints.
var withFailpoints bool

// MainWithFailpoints is Main for tests that kill programs at failpoints.
func MainWithFailpoints(m *testing.M) {
	withFailpoints = true
	Main(m)
}

// findFailpoints sets BinDir to the directory of the binaries with failpoints. In a checkout it
// builds them, which takes two seconds if nothing has changed. A guest already has them.
func findFailpoints() error {
	inCheckout, err := isBuiltHere(BinDir)
	if err != nil {
		return err
	}
	BinDir = filepath.Join(BinDir, failpointsDir)
	if !inCheckout {
		_, err := os.Stat(filepath.Join(BinDir, DaemonProgram))
		return err
	}
	build := exec.Command(filepath.Join(source(), buildScript), "-failpoints")
	if out, err := build.CombinedOutput(); err != nil {
		return fmt.Errorf("%s -failpoints: %w\n%s", buildScript, err, out)
	}
	return nil
}

// isBuiltHere reports whether dir is the directory into which this checkout builds binaries. It
// returns false outside a checkout.
func isBuiltHere(dir string) (bool, error) {
	if _, err := os.Stat(filepath.Join(source(), buildScript)); errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	there, err := os.Stat(dir)
	if err != nil {
		return false, err
	}
	here, err := os.Stat(filepath.Join(source(), "bin"))
	return err == nil && os.SameFile(there, here), nil
}

// ReleasedBinaries returns the directory of the binaries without failpoints.
func ReleasedBinaries() string { return strings.TrimSuffix(BinDir, "/"+failpointsDir) }

// Failpoints controls the failpoints of a daemon; see package berth/internal/failpoint.
type Failpoints struct{ dir string }

// WithFailpoints starts a daemon with failpoints, and sets f to control them.
func WithFailpoints(f *Failpoints) DaemonOption {
	return func(t *testing.T, d *Daemon) {
		f.dir = filepath.Join(d.Dir, "failpoints")
		Must(t, os.Mkdir(f.dir, 0o700))
		d.env = append(d.env, "BERTH_FAILPOINTS="+f.dir)
	}
}

// Trace starts to record the points that are reached.
func (f *Failpoints) Trace(t *testing.T) {
	t.Helper()
	Must(t, os.WriteFile(filepath.Join(f.dir, "trace"), nil, 0o600))
}

// ReachedPoint is a line of the trace.
type ReachedPoint struct {
	Name    string
	PID     int
	Program string // DaemonProgram, LauncherProgram, MonitorProgram or TaskProgram
}

// Names of berth's programs that have failpoints.
const (
	DaemonProgram   = "berthd"
	LauncherProgram = "berth-shim"
	MonitorProgram  = "berth-monitor"
	TaskProgram     = "berth-task"
)

// Traced ends the trace and returns the recorded points in order.
func (f *Failpoints) Traced(t *testing.T) (points []ReachedPoint) {
	t.Helper()
	path := filepath.Join(f.dir, "trace")
	trace, err := os.ReadFile(path)
	Must(t, err)
	Must(t, os.Remove(path))
	for line := range strings.Lines(string(trace)) {
		var p ReachedPoint
		_, err := fmt.Sscan(line, &p.Name, &p.PID, &p.Program)
		Must(t, err)
		points = append(points, p)
	}
	return points
}

// Kill kills the daemon when it reaches a point for the nth time from now on.
func (f *Failpoints) Kill(t *testing.T, d *Daemon, name string, n int) {
	t.Helper()
	f.arm(t, name, n, "kill", strconv.Itoa(d.Cmd.Process.Pid))
}

// KillNext kills a process of a program at a point: a daemon that is started later, a launcher or a
// monitor.
func (f *Failpoints) KillNext(t *testing.T, program, name string, n int) {
	t.Helper()
	f.arm(t, name, n, "kill", program)
}

// FreezeNext stops a process of a program (SIGSTOP) at a point.
func (f *Failpoints) FreezeNext(t *testing.T, program, name string, n int) {
	t.Helper()
	f.arm(t, name, n, "stop", program)
}

// WaitReached waits up to limit until the armed point is reached, and reports whether it was.
func (f *Failpoints) WaitReached(limit time.Duration) bool {
	return WaitUpTo(limit, func() error {
		if _, err := os.Lstat(filepath.Join(f.dir, "armed")); !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("the point was not reached: %w", err)
		}
		return nil
	}) == nil
}

func (f *Failpoints) arm(t *testing.T, name string, n int, action, process string) {
	t.Helper()
	path := filepath.Join(f.dir, "armed")
	Must(t, os.WriteFile(path+".new", fmt.Appendf(nil, "%s %d %s %s\n", name, n, action, process), 0o600))
	Must(t, os.Rename(path+".new", path))
}

// Disarm removes the armed point. It reports whether the point was still armed, that is, not
// reached.
func (f *Failpoints) Disarm() (armed bool) { return os.Remove(filepath.Join(f.dir, "armed")) == nil }
