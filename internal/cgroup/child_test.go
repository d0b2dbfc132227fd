package cgroup

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// placesOfChildren are the hierarchies of this machine in which there can be children.
func placesOfChildren(t *testing.T) map[string]*Children {
	t.Helper()
	own := map[string]string{"": "/", "freezer": "/"}
	if machine := os.Getenv("BERTH_MACHINE"); machine != "" {
		own = map[string]string{"": "/" + machine + "/self", "freezer": "/" + machine + "/self"}
	}
	places := map[string]*Children{}
	for name, dir := range map[string]string{"v2": root, "unified": root + "/unified", "freezer": root + "/freezer"} {
		mounts := t.TempDir() // in which there is one only
		link := filepath.Join(mounts, name)
		if name == "v2" {
			mounts = link
		}
		if err := os.Symlink(dir, link); err != nil {
			t.Fatal(err)
		}
		if c, err := childrenIn(mounts, own); err == nil {
			places[name] = c
		}
	}
	if len(places) == 0 {
		t.Fatal("there is no hierarchy to test with")
	}
	return places
}

// A command is in its cgroup from its first instruction on, and nothing of what it starts survives, or keeps the cgroup: sessions of their own, second
// forks, empty environments, forks without end.
func TestChildren(t *testing.T) {
	programs := map[string]string{
		"ends by itself":    `exit 0`,
		"daemon":            `(setsid sh -c 'exec env -i sleep 1000' &)`,
		"stopped":           `kill -STOP $$`,
		"forks without end": `f() { (f) & (f) & wait; }; ulimit -u 500; f`,
	}
	for place, c := range placesOfChildren(t) {
		for name, program := range programs {
			t.Run(place+"/"+name, func(t *testing.T) {
				dir := c.Dir("berth-test-" + strings.ReplaceAll(name, " ", "-"))
				must(t, os.Mkdir(dir, 0o755))
				cmd := exec.Command("setpriv", "--reuid", "64999", "--clear-groups", "sh", "-c", `cat /proc/self/cgroup; `+program)
				var out strings.Builder
				read, write, err := os.Pipe()
				must(t, err)
				cmd.Stdout = write
				must(t, c.Start(cmd, dir))
				must(t, write.Close())
				line := make([]byte, 4096)
				n, err := read.Read(line)
				must(t, err)
				out.Write(line[:n])
				must(t, read.Close())
				if !strings.Contains(out.String(), filepath.Base(dir)) {
					t.Errorf("it began in %s", out.String())
				}
				must(t, KillChild(dir, time.Minute))
				_ = cmd.Wait() // it was killed, or not
				if busy, err := HasProcesses(dir); busy || err != nil {
					t.Errorf("processes are left: %v, %v", busy, err)
				}
				removed := func() bool {
					err := RemoveChild(dir)
					if err != nil && !errors.Is(err, unix.EBUSY) {
						t.Fatal(err)
					}
					return err == nil
				}
				for end := time.Now().Add(time.Minute); !removed(); time.Sleep(time.Millisecond) {
					if time.Now().After(end) {
						t.Fatal("the cgroup cannot be removed")
					}
				}
				if in, err := os.ReadFile("/proc/self/cgroup"); err != nil || strings.Contains(string(in), "berth-test-") {
					t.Errorf("this process is in %s, %v", in, err)
				}
			})
		}
	}
}

// Where no hierarchy can kill, or the daemon's own cgroup is not in what is mounted.
func TestFindChildren(t *testing.T) {
	if _, err := childrenIn(t.TempDir(), map[string]string{"": "/"}); err == nil {
		t.Error("found a hierarchy where there is none")
	}
	for place, c := range placesOfChildren(t) {
		mounts, name := filepath.Join(root, place), place
		if place == "v2" {
			mounts = root
		}
		link := filepath.Join(t.TempDir(), name)
		must(t, os.Symlink(mounts, link))
		dir := filepath.Dir(link)
		if place == "v2" {
			dir = link
		}
		for _, path := range []string{"/../x", "/not-there"} {
			got, err := childrenIn(dir, map[string]string{"": path, "freezer": path})
			must(t, err)
			if got.v1 != c.v1 || got.parent != link && got.parent != link+"/unified" {
				t.Errorf("%s: %s for %s", place, got.parent, path)
			}
		}
	}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
