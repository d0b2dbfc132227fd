package harness

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
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

// findFailpoints sets BinDir to the directory of the binaries with failpoints, and builds them if
// they are not there.
func findFailpoints() error {
	BinDir = filepath.Join(BinDir, failpointsDir)
	if _, err := os.Stat(filepath.Join(BinDir, "berth")); err == nil {
		return nil
	}
	build := exec.Command(filepath.Join(source(), "contrib/build"), "-failpoints")
	if out, err := build.CombinedOutput(); err != nil {
		return fmt.Errorf("contrib/build -failpoints: %w\n%s", err, out)
	}
	return nil
}

// ReleasedBinaries is the directory of the binaries that have no failpoints.
func ReleasedBinaries() string { return strings.TrimSuffix(BinDir, "/"+failpointsDir) }

// Failpoints controls those of a daemon; see package berth/internal/failpoint.
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

// Traced ends that and returns the points that the daemon has reached, in that order.
func (f *Failpoints) Traced(t *testing.T, d *Daemon) (names []string) {
	t.Helper()
	path := filepath.Join(f.dir, "trace")
	trace, err := os.ReadFile(path)
	Must(t, err)
	Must(t, os.Remove(path))
	for line := range strings.Lines(string(trace)) {
		if name, pid, _ := strings.Cut(strings.TrimSpace(line), " "); pid == strconv.Itoa(d.Cmd.Process.Pid) {
			names = append(names, name)
		}
	}
	return names
}

// Kill has the daemon killed at a point, the nth time from now on that it reaches it.
func (f *Failpoints) Kill(t *testing.T, d *Daemon, name string, n int) {
	t.Helper()
	f.arm(t, name, n, d.Cmd.Process.Pid)
}

// KillNext does that to a daemon that is started later.
func (f *Failpoints) KillNext(t *testing.T, name string, n int) {
	t.Helper()
	f.arm(t, name, n, -1)
}

func (f *Failpoints) arm(t *testing.T, name string, n, process int) {
	t.Helper()
	path := filepath.Join(f.dir, "armed")
	Must(t, os.WriteFile(path+".new", fmt.Appendf(nil, "%s %d kill %d\n", name, n, process), 0o600))
	Must(t, os.Rename(path+".new", path))
}

// Disarm takes that back, and tells whether the point was not reached.
func (f *Failpoints) Disarm() (armed bool) { return os.Remove(filepath.Join(f.dir, "armed")) == nil }
