package packages

import (
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"berth/integration/harness"
)

// kubelets are parts of names that belong to kubelet, which purge must not touch. kubelet makes
// D-Bus start logind.
var kubelets = []string{
	"kubelet", "kubepods", "/etc/kubernetes", "/var/log/pods", "/var/log/containers", "/usr/libexec/kubernetes",
	"/sys/fs/cgroup/system.slice/systemd-logind.service", "/sys/fs/cgroup/user.slice",
}

// busy are directories that other programs change meanwhile.
var busy = map[string]bool{
	"/proc": true, "/sys": true, "/dev": true, "/host": true, "/tmp": true, "/run/tmp": true, "/var/tmp": true,
	"/run/systemd": true, "/run/udev": true, "/run/log": true, "/run/credentials": true, "/var/log": true,
	"/var/cache": true, "/var/lib/apt": true, "/var/lib/dpkg": true, "/var/lib/systemd": true,
}

// named are busy directories in which dpkg, apt and systemd keep files with the names of packages
// and units. The inventory has those of berth.
var named = []string{
	"/run/credentials", "/run/systemd", "/var/cache", "/var/lib/apt", "/var/lib/dpkg", "/var/lib/systemd", "/var/log", "/var/tmp",
}

// inventory lists what exists on the machine: files, mounts, cgroups, network devices, packet
// filter, AppArmor profiles, and processes of berth.
func inventory(t *testing.T) map[string]bool {
	t.Helper()
	all := map[string]bool{}
	add := func(kind, name string) {
		if !slices.ContainsFunc(kubelets, func(k string) bool { return strings.Contains(name, k) }) {
			all[kind+" "+name] = true
		}
	}
	walk(t, "/", busy, func(path string, _ fs.DirEntry) { add("file", path) })
	for _, dir := range named {
		walk(t, dir, nil, func(path string, _ fs.DirEntry) {
			if strings.Contains(filepath.Base(path), "berth") {
				add("file", path)
			}
		})
	}
	walk(t, "/sys/fs/cgroup", nil, func(path string, e fs.DirEntry) {
		if e.IsDir() {
			add("cgroup", path)
		}
	})
	for line := range strings.Lines(string(harness.Get(os.ReadFile("/proc/self/mountinfo"))(t))) {
		add("mount", strings.Fields(line)[4])
	}
	for line := range strings.Lines(run(t, "ip", "-o", "link")) {
		add("network device", strings.Fields(line)[1])
	}
	for line := range strings.Lines(run(t, "nft", "list", "ruleset")) {
		add("nft", line)
	}
	for line := range strings.Lines(string(harness.Get(os.ReadFile("/sys/kernel/security/apparmor/profiles"))(t))) {
		add("AppArmor profile", line)
	}
	for _, exe := range harness.Get(filepath.Glob("/proc/[0-9]*/exe"))(t) {
		if program, err := os.Readlink(exe); err == nil && strings.Contains(program, "berth") {
			add("process", program)
		}
	}
	return all
}

// walk calls visit for all paths below dir, but not for the directories in without.
func walk(t *testing.T, dir string, without map[string]bool, visit func(path string, e fs.DirEntry)) {
	t.Helper()
	harness.Must(t, filepath.WalkDir(dir, func(path string, e fs.DirEntry, err error) error {
		if err != nil {
			return nil // gone meanwhile
		}
		if without[path] {
			return fs.SkipDir
		}
		visit(path, e)
		return nil
	}))
}

// unchanged checks that exactly the things of an earlier inventory exist.
func unchanged(t *testing.T, before map[string]bool) {
	t.Helper()
	var diff []string
	err := harness.PollUpTo(time.Minute, time.Second, func() error { // systemd removes cgroups of ended units in the background
		now := inventory(t)
		diff = nil
		for _, name := range slices.Sorted(maps.Keys(now)) {
			if !before[name] {
				diff = append(diff, "left: "+name)
			}
		}
		for _, name := range slices.Sorted(maps.Keys(before)) {
			if !now[name] {
				diff = append(diff, "removed: "+name)
			}
		}
		if len(diff) > 0 {
			return os.ErrExist
		}
		return nil
	})
	if err != nil {
		t.Errorf("the machine is not as before:\n%s", strings.Join(diff, "\n"))
	}
}
