package packages

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"berth/integration/harness"
)

// deb returns the path of a version of the package.
func deb(t *testing.T, version string) string {
	t.Helper()
	found := harness.Get(filepath.Glob(filepath.Join(os.Getenv(packagesEnv), version, "berth_*.deb")))(t)
	if len(found) != 1 {
		t.Fatalf("packages of version %s: %v", version, found)
	}
	return found[0]
}

// install installs a version of the package with apt. A lower version is a downgrade.
func install(t *testing.T, version string) {
	t.Helper()
	if out, err := tryInstall(t, version); err != nil {
		t.Fatalf("install the %s version: %v\n%s", version, err, out)
	}
}

func tryInstall(t *testing.T, version string) (string, error) {
	t.Helper()
	return try("apt-get", "install", "--yes", "--no-install-recommends", "--allow-downgrades", deb(t, version))
}

// The life of the package on a node, whose pods run from the first start to the purge.
func TestDebianPackage(t *testing.T) {
	if os.Getenv(packagesEnv) == "" {
		t.Skip(packagesEnv + " is not set: run contrib/guest -packages systemd")
	}
	addAddress(t)
	completeCPUInfo(t)
	before := inventory(t)
	first := &node{}
	for _, step := range []struct {
		name string
		run  func(*testing.T)
	}{
		{"Install", first.testInstall},
		{"Start", first.testStart},
		{"KubeletRunsPods", first.testPods},
		{"Upgrade", func(t *testing.T) { first.testReplace(t, "new") }},
		{"Downgrade", func(t *testing.T) { first.testReplace(t, "old") }},
		{"RefusedConfiguration", first.testRefusedConfiguration},
		{"BrokenVersion", first.testBrokenVersion},
		{"Remove", first.testRemove},
		{"Reinstall", first.testReinstall},
		{"Purge", func(t *testing.T) { first.testPurge(t, before) }},
		{"ResetStopsUnits", func(t *testing.T) { testReset(t, before) }},
	} {
		if !t.Run(step.name, step.run) {
			t.FailNow() // the next steps depend on it
		}
	}
}

// node is the machine with its pods.
type node struct{ pods map[string]life }

// The first installation enables the unit, starts nothing, and applies kernel settings.
func (n *node) testInstall(t *testing.T) {
	install(t, "old")
	harness.Equal(t, "state of the unit", property(t, "berth.service", "ActiveState"), "inactive")
	harness.Equal(t, "unit file", property(t, "berth.service", "UnitFileState"), "enabled")
	harness.Equal(t, "socket's unit file", property(t, "berth.socket", "UnitFileState"), "enabled")
	for path, want := range map[string]string{"/proc/sys/vm/overcommit_memory": "1", "/proc/sys/fs/inotify/max_user_instances": "8192"} {
		harness.Equal(t, path, strings.TrimSpace(string(harness.Get(os.ReadFile(path))(t))), want)
	}
	harness.Equal(t, "mode of /run/berth", harness.Get(os.Stat("/run/berth"))(t).Mode().Perm(), 0o700)
	write(t, "/etc/berth/config.d/network.toml", "[network]\ntype = \"berth-net\"\n")
}

func (n *node) testStart(t *testing.T) {
	run(t, "systemctl", "start", "berth")
	runsInstalled(t)
	if out := run(t, "berth", "check", "--state"); !strings.Contains(out, ": 0 differences") {
		t.Error(out)
	}
}

func (n *node) testPods(t *testing.T) {
	startKubelet(t)
	if after := property(t, "kubelet.service", "After"); !strings.Contains(after, "berth.service") {
		t.Errorf("kubelet.service starts after %s", after)
	}
	n.pods = map[string]life{}
	for _, name := range []string{"web", "api"} {
		applyPod(t, name)
	}
	n.awaitPods(t, "web", "api")
}

// awaitPods waits for new pods, and remembers the lives of their containers.
func (n *node) awaitPods(t *testing.T, names ...string) {
	t.Helper()
	for _, name := range names {
		n.pods[name] = awaitPod(t, name)
	}
}

// podsLive checks that all containers run without a restart, and that kubelet sees them ready.
func (n *node) podsLive(t *testing.T) {
	t.Helper()
	for name, was := range n.pods {
		if now := awaitPod(t, name); now != was {
			t.Errorf("pod %s: container is %+v, was %+v", name, now, was)
		}
	}
}

// testReplace installs another version. The daemon restarts, pods do not, and new pods start.
func (n *node) testReplace(t *testing.T, version string) {
	was := mainPID(t)
	install(t, version)
	if now := mainPID(t); now == was {
		t.Errorf("the daemon was not restarted: process %d", now)
	}
	runsInstalled(t)
	n.podsLive(t)
	applyPod(t, "after-"+version)
	n.awaitPods(t, "after-"+version)
	n.podsLive(t)
	if out := run(t, "berth", "check", "--state"); !strings.Contains(out, ": 0 differences") {
		t.Error(out)
	}
}

// An upgrade to a version that refuses the configuration fails, and the daemon runs on.
func (n *node) testRefusedConfiguration(t *testing.T) {
	const fragment = "/etc/berth/config.d/wrong.toml"
	write(t, fragment, "no_such_option = 1\n")
	was := mainPID(t)
	out, err := tryInstall(t, "new")
	if err == nil || !strings.Contains(out, "cannot take over this node") {
		t.Errorf("%v\n%s", err, out)
	}
	harness.Equal(t, "process of the daemon", mainPID(t), was)
	n.podsLive(t)
	harness.Must(t, os.Remove(fragment))
	run(t, "dpkg", "--configure", "berth")
	runsInstalled(t)
	n.podsLive(t)
}

// A version whose daemon ends at once is replaced by the previous one. The next upgrade to a good
// version works.
func (n *node) testBrokenVersion(t *testing.T) {
	const dir, broken = "/run/tmp/broken", "/run/tmp/broken.deb"
	run(t, "dpkg-deb", "--raw-extract", deb(t, "new"), dir)
	run(t, "sed", "-i", "s/^Version: .*/Version: 1.0.2/", dir+"/DEBIAN/control")
	version := run(t, "/usr/bin/berthd", "--version")
	harness.Must(t, os.Remove(dir+"/usr/bin/berthd"))
	write(t, dir+"/usr/bin/berthd", "#!/bin/sh\n[ \"$1\" = --version ] && echo '"+version+"'\n")
	harness.Must(t, os.Chmod(dir+"/usr/bin/berthd", 0o755))
	run(t, "dpkg-deb", "--build", "-Znone", dir, broken)
	out, err := try("apt-get", "install", "--yes", "--no-install-recommends", broken)
	harness.WantText(t, "installation of the broken version", out, "systemd starts the previous version")
	if err == nil {
		t.Error("the installation succeeded")
	}
	harness.Eventually(t, "the previous version serves", func() error {
		_, err := try("berth", "version")
		return err
	})
	runsProgram(t, "/usr/lib/berth/previous/berthd")
	n.podsLive(t)
	install(t, "new")
	runsInstalled(t)
	n.podsLive(t)
}

// A removal stops the daemon. Pods keep running and keep serving.
func (n *node) testRemove(t *testing.T) {
	run(t, "systemctl", "stop", "kubelet.service") // without a runtime it logs errors only
	run(t, "apt-get", "remove", "--yes", "berth")
	if exists(t, "/usr/bin/berth") || exists(t, "/run/systemd/units/invocation:berth.service") {
		t.Error("the program or its unit still exists")
	}
	for name, l := range n.pods {
		if !l.alive() {
			t.Errorf("the container of pod %s has ended", name)
		}
	}
}

// A later installation finds the pods.
func (n *node) testReinstall(t *testing.T) {
	install(t, "new")
	harness.Equal(t, "unit file", property(t, "berth.service", "UnitFileState"), "enabled")
	run(t, "systemctl", "start", "berth.service", "kubelet.service")
	n.podsLive(t)
}

// A purge under running pods removes them, and leaves the machine as it was.
func (n *node) testPurge(t *testing.T, before map[string]bool) {
	run(t, "systemctl", "stop", "kubelet.service")
	out := run(t, "apt-get", "purge", "--yes", "berth")
	for name, l := range n.pods {
		if l.alive() {
			t.Errorf("the container of pod %s lives", name)
		}
	}
	unchanged(t, before)
	t.Logf("apt-get purge:\n%s", out)
}

// berth reset --stop-daemon stops the daemon's unit and its socket, which would start it again.
func testReset(t *testing.T, before map[string]bool) {
	install(t, "new")
	run(t, "systemctl", "start", "berth.socket", "berth.service")
	if out, err := try("berth", "reset", "--yes"); err == nil || !strings.Contains(out, "berth is running") {
		t.Errorf("with a running daemon: %v\n%s", err, out)
	}
	run(t, "berth", "reset", "--yes", "--stop-daemon")
	for _, unit := range []string{"berth.service", "berth.socket"} {
		harness.Equal(t, "state of "+unit, property(t, unit, "ActiveState"), "inactive")
	}
	for _, dir := range []string{"/var/lib/berth", "/run/berth"} {
		harness.Equal(t, dir+" exists", exists(t, dir), false)
	}
	run(t, "apt-get", "purge", "--yes", "berth")
	unchanged(t, before)
}
