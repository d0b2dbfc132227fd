package launcher

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/moby/sys/mountinfo"

	"berth/internal/testutil"
)

// Each hierarchy of the kernel is found where it is mounted.
func TestHierarchiesOf(t *testing.T) {
	list, err := hierarchiesOf(os.Getpid())
	testutil.Must(t, err)
	if len(list) == 0 {
		t.Fatal("no hierarchy")
	}
	for _, h := range list {
		if h.name == "" || h.mount != "" && !hasProcess(filepath.Join(h.mount, h.path), os.Getpid()) {
			t.Errorf("%+v", h)
		}
	}
	if _, err := hierarchiesOf(1<<22 + 1); err == nil {
		t.Error("a process that does not exist has cgroups")
	}
}

func TestIsMountOf(t *testing.T) {
	for name, tc := range map[string]struct {
		root, kind, options string
		number, controllers string
		want                bool
	}{
		"version 2":                    {"/", "cgroup2", "rw,nsdelegate", "0", "", true},
		"a part of version 2":          {"/pod", "cgroup2", "rw,nsdelegate", "0", "", false},
		"outside of the namespace":     {"/../..", "cgroup2", "rw", "0", "", false},
		"one controller":               {"/", "cgroup", "rw,memory", "4", "memory", true},
		"two controllers":              {"/", "cgroup", "rw,cpu,cpuacct", "3", "cpu,cpuacct", true},
		"two controllers, other order": {"/", "cgroup", "rw,cpuacct,cpu", "3", "cpu,cpuacct", true},
		"another controller":           {"/", "cgroup", "rw,cpuset", "3", "cpu", false},
		"a name":                       {"/", "cgroup", "rw,xattr,name=systemd", "1", "name=systemd", true},
		"another name":                 {"/", "cgroup", "rw,name=elogind", "1", "name=systemd", false},
		"version 2 for version 1":      {"/", "cgroup2", "rw,memory", "4", "memory", false},
		"version 1 for version 2":      {"/", "cgroup", "rw,memory", "0", "", false},
	} {
		t.Run(name, func(t *testing.T) {
			m := &mountinfo.Info{Root: tc.root, FSType: tc.kind, VFSOptions: tc.options}
			if got := isMountOf(m, tc.number, tc.controllers); got != tc.want {
				t.Errorf("got %v", got)
			}
		})
	}
}

// CRIU opens the cgroups of a dump in a directory that no mount namespace shows.
func TestLinkHierarchies(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("it needs root")
	}
	target := t.TempDir()
	testutil.Must(t, os.WriteFile(filepath.Join(target, "file"), []byte("content"), 0o600))
	yard, err := linkHierarchies([]hierarchy{{name: "unified", mount: target, path: "/pod"}, {name: "cpu,cpuacct", mount: target}})
	testutil.Must(t, err)
	defer yard.Close()
	for _, name := range []string{"unified", "cpu,cpuacct"} {
		content, err := os.ReadFile(fmt.Sprintf("/proc/%d/fd/%d/%s/file", os.Getpid(), yard.Fd(), name))
		if err != nil || string(content) != "content" {
			t.Errorf("%s: %q, %v", name, content, err)
		}
	}
	if _, err := linkHierarchies([]hierarchy{{name: "unified"}}); err == nil {
		t.Error("a hierarchy that is not mounted was linked")
	}
}

// ownCgroups returns the cgroups of this process, in its yard of a restore, that are not the root
// of their hierarchy.
func ownCgroups(t *testing.T, yard string) (inYard, mounted []string) {
	t.Helper()
	list, err := hierarchiesOf(os.Getpid())
	testutil.Must(t, err)
	for _, h := range list {
		if h.mount != "" && h.path != "/" {
			inYard = append(inYard, filepath.Join(yard, h.name, h.path))
			mounted = append(mounted, filepath.Join(h.mount, h.path))
		}
	}
	return slices.Clip(inYard), slices.Clip(mounted)
}
