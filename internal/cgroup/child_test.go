package cgroup

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"berth/internal/testutil"
)

// hierarchiesForChildren returns the hierarchies of this machine that allow children.
func hierarchiesForChildren(t *testing.T) map[string]*Children {
	t.Helper()
	own := map[string]string{"": "/", "freezer": "/"}
	if machine := os.Getenv("BERTH_MACHINE"); machine != "" {
		own = map[string]string{"": "/" + machine + "/self", "freezer": "/" + machine + "/self"}
	}
	places := map[string]*Children{}
	for name, dir := range map[string]string{"v2": root, "unified": root + "/unified", "freezer": root + "/freezer"} {
		mounts := t.TempDir() // a directory with only one hierarchy
		link := filepath.Join(mounts, name)
		if name == "v2" {
			mounts = link
		}
		testutil.Must(t, os.Symlink(dir, link))
		if c, err := childrenIn(mounts, own); err == nil {
			places[name] = c
		}
	}
	if len(places) == 0 {
		t.Fatal("no usable hierarchy is mounted")
	}
	return places
}

// maxForked bounds the number of processes that a test forks. dash's ulimit does not support that
// limit.
const maxForked = 100

// A command is in its cgroup from its first instruction. A kill ends all processes that the command
// started, and the cgroup can be removed then: sessions, second forks, empty environments, endless
// forks.
func TestChildrenAreKilledWithDescendants(t *testing.T) {
	testutil.NeedRoot(t)
	tests := []struct {
		name, program string
		before        func(dir string) bool // returns true when the test may kill the group; nil: at once
	}{
		{"ends by itself", `exit 0`, nil},
		{"daemon", `(setsid sh -c 'exec env -i sleep 1000' &)`, func(dir string) bool { return hasCommand(dir, "sleep") }},
		{"stopped", `kill -STOP $$`, func(dir string) bool { return hasState(dir, "T") }},
		{"forks without end", `f() { (f) & (f) & wait; }; f`, nil}, // at the limit of processes it would exit
	}
	for place, c := range hierarchiesForChildren(t) {
		for _, test := range tests {
			t.Run(place+"/"+test.name, func(t *testing.T) {
				dir := c.Dir("berth-test-" + strings.ReplaceAll(test.name, " ", "-"))
				testutil.Must(t, os.Mkdir(dir, 0o755))
				cmd := exec.Command("prlimit", fmt.Sprintf("--nproc=%d", maxForked), "setpriv", "--reuid", "64999", "--clear-groups",
					"sh", "-c", `cat /proc/self/cgroup; `+test.program)
				read, write, err := os.Pipe()
				testutil.Must(t, err)
				cmd.Stdout = write
				testutil.Must(t, c.Start(cmd, dir))
				testutil.Must(t, write.Close())
				line := make([]byte, 4096)
				n, err := read.Read(line)
				testutil.Must(t, err)
				testutil.Must(t, read.Close())
				if !strings.Contains(string(line[:n]), filepath.Base(dir)) {
					t.Errorf("the command started in %s", line[:n])
				}
				if test.before != nil {
					eventually(t, test.name, func() bool { return test.before(dir) })
				}
				testutil.Must(t, KillChild(dir, time.Minute))
				_ = cmd.Wait() // the command may have been killed
				if busy, err := HasProcesses(dir); busy || err != nil {
					t.Errorf("processes are left: %v, %v", busy, err)
				}
				eventually(t, "the cgroup is removed", func() bool { return isRemoved(t, dir) })
				wantOutside(t)
			})
		}
	}
}

// If the thread cannot leave the v1 cgroup, the start fails and the command must be killed.
func TestStartFailsIfThreadCannotLeaveCgroup(t *testing.T) {
	testutil.NeedRoot(t)
	c := hierarchiesForChildren(t)["freezer"]
	if c == nil {
		t.Skip("NOT TESTED: the freezer of cgroup v1 is not mounted")
	}
	dir := c.Dir("berth-test-stays")
	testutil.Must(t, os.Mkdir(dir, 0o755))
	cmd := exec.Command("sleep", "1000")
	if err := (&Children{parent: t.TempDir() + "/gone", v1: true}).Start(cmd, dir); err == nil || !strings.Contains(err.Error(), "leave cgroup") {
		t.Errorf("error %v", err)
	}
	if cmd.ProcessState == nil {
		t.Error("the command was not reaped")
	}
	eventually(t, "the thread ends and the cgroup is removed", func() bool { return isRemoved(t, dir) })
	wantOutside(t)
}

// wantOutside checks that this process is in none of the tests' cgroups.
func wantOutside(t *testing.T) {
	t.Helper()
	if in, err := os.ReadFile("/proc/self/cgroup"); err != nil || strings.Contains(string(in), "berth-test-") {
		t.Errorf("this process is in %s, %v", in, err)
	}
}

// isRemoved removes a cgroup and reports whether it is gone. It fails while processes remain.
func isRemoved(t *testing.T, dir string) bool {
	t.Helper()
	err := RemoveChild(dir)
	if err != nil && !errors.Is(err, unix.EBUSY) {
		t.Fatal(err)
	}
	return err == nil
}

func procs(dir string) []int {
	pids, _ := ProcsIn(dir) // KillChild reports the error as well
	return pids
}

// hasCommand reports whether a process in a cgroup executes a program of that name.
func hasCommand(dir, name string) bool {
	return slices.ContainsFunc(procs(dir), func(pid int) bool {
		comm, _ := os.ReadFile(fmt.Sprintf("/proc/%d/comm", pid)) // the process may have exited
		return strings.TrimSpace(string(comm)) == name
	})
}

// hasState reports whether a process in a cgroup is in that state.
func hasState(dir, state string) bool {
	return slices.ContainsFunc(procs(dir), func(pid int) bool {
		stat, _ := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
		_, after, _ := strings.Cut(string(stat), ") ")
		return strings.HasPrefix(after, state)
	})
}

func eventually(t *testing.T, what string, done func() bool) {
	t.Helper()
	for end := time.Now().Add(time.Minute); !done(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("never: %s", what)
		}
	}
}

func TestFindChildrenNeedsUsableHierarchy(t *testing.T) {
	if _, err := childrenIn(t.TempDir(), map[string]string{"": "/"}); err == nil {
		t.Error("found a hierarchy in an empty directory")
	}
	for place, c := range hierarchiesForChildren(t) {
		mounts, name := filepath.Join(root, place), place
		if place == "v2" {
			mounts = root
		}
		link := filepath.Join(t.TempDir(), name)
		testutil.Must(t, os.Symlink(mounts, link))
		dir := filepath.Dir(link)
		if place == "v2" {
			dir = link
		}
		for _, path := range []string{"/../x", "/not-there"} {
			got, err := childrenIn(dir, map[string]string{"": path, "freezer": path})
			testutil.Must(t, err)
			if got.v1 != c.v1 || got.parent != link && got.parent != link+"/unified" {
				t.Errorf("%s: %s for %s", place, got.parent, path)
			}
		}
	}
}
