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

// failpointsDir is, in BinDir, the directory of the binaries that have failpoints.
const failpointsDir = "failpoints"

// withFailpoints makes findBinaries look for those.
var withFailpoints bool

// MainWithFailpoints is Main for tests that kill programs at failpoints.
func MainWithFailpoints(m *testing.M) {
	withFailpoints = true
	Main(m)
}

// findFailpoints sets BinDir to the directory of the binaries with failpoints. In a checkout it
// builds them, which takes two seconds when nothing has changed. A guest has them already.
func findFailpoints() error {
	inCheckout, err := isBuiltHere(BinDir)
	if err != nil {
		return err
	}
	BinDir = filepath.Join(BinDir, failpointsDir)
	if !inCheckout {
		_, err := os.Stat(filepath.Join(BinDir, "berth"))
		return err
	}
	build := exec.Command(filepath.Join(source(), buildScript), "-failpoints")
	if out, err := build.CombinedOutput(); err != nil {
		return fmt.Errorf("%s -failpoints: %w\n%s", buildScript, err, out)
	}
	return nil
}

// isBuiltHere reports whether a directory of binaries is where the build of this checkout, if this
// is one, puts them.
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

// ReleasedBinaries is the directory of the binaries that have no failpoints.
func ReleasedBinaries() string { return strings.TrimSuffix(BinDir, "/"+failpointsDir) }

// Failpoints controls the failpoints of a daemon; see package berth/internal/failpoint.
type Failpoints struct{ dir string }

// WithFailpoints starts a daemon whose failpoints obey what f becomes.
func WithFailpoints(f *Failpoints) DaemonOption {
	return func(t *testing.T, d *Daemon) {
		f.dir = filepath.Join(d.Dir, "failpoints")
		Must(t, os.Mkdir(f.dir, 0o700))
		d.env = append(d.env, "BERTH_FAILPOINTS="+f.dir)
	}
}

// Trace begins to note the points that are reached.
func (f *Failpoints) Trace(t *testing.T) {
	t.Helper()
	Must(t, os.WriteFile(filepath.Join(f.dir, "trace"), nil, 0o600))
}

// ReachedPoint is a line of the trace.
type ReachedPoint struct {
	Name    string
	PID     int
	Program string // DaemonProgram, LauncherProgram or MonitorProgram
}

// The names of berth's programs that have failpoints.
const (
	DaemonProgram   = "berth"
	LauncherProgram = "berth-shim"
	MonitorProgram  = "berth-monitor"
)

// Traced ends that and returns the points that were reached, in that order.
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

// Kill has the daemon killed at a point, the nth time from now on that it reaches it.
func (f *Failpoints) Kill(t *testing.T, d *Daemon, name string, n int) {
	t.Helper()
	f.arm(t, name, n, "kill", strconv.Itoa(d.Cmd.Process.Pid))
}

// KillNext does that to a process of a program: a daemon that is started later, a launcher or
// monitor.
func (f *Failpoints) KillNext(t *testing.T, program, name string, n int) {
	t.Helper()
	f.arm(t, name, n, "kill", program)
}

// FreezeNext has a process of a program stopped (SIGSTOP) at a point.
func (f *Failpoints) FreezeNext(t *testing.T, program, name string, n int) {
	t.Helper()
	f.arm(t, name, n, "stop", program)
}

// WaitReached waits up to limit until the armed point was reached, and reports whether it was.
func (f *Failpoints) WaitReached(limit time.Duration) bool {
	return WaitUpTo(limit, func() error {
		if _, err := os.Lstat(filepath.Join(f.dir, "armed")); !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("it was not reached: %w", err)
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

// Disarm undoes Arm. It reports whether the point was still armed, that is, not reached.
func (f *Failpoints) Disarm() (armed bool) { return os.Remove(filepath.Join(f.dir, "armed")) == nil }
