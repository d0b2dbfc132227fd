package integration

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"berth/checkpoint/record"
	"berth/integration/harness"
)

// `berth upgrade --check` lets the programs of the other version decide whether they can take over,
// and changes nothing.
func TestUpgradeCheck(t *testing.T) {
	d := harness.StartDaemon(t)
	pod := d.RunPod(t, harness.HostNetwork)
	c := pod.Run(t)
	pid := c.Pid(t)
	harness.MonitorOf(t, d, c)
	next := t.TempDir()
	for _, path := range harness.Get(filepath.Glob(harness.BinDir + "/berth*"))(t) {
		harness.Must(t, exec.Command("cp", "-a", path, next).Run())
	}
	check := func(t *testing.T, path string) (out string, err error) {
		t.Helper()
		before := treeOf(t, d)
		text, err := d.Command(append([]string{"upgrade", "--check", path}, d.Flags()...)...).CombinedOutput()
		harness.Equal(t, "files after the check", treeOf(t, d), before)
		return string(text), err
	}
	for _, path := range []string{next, next + "/berthd"} {
		if out, err := check(t, path); err != nil || !strings.Contains(out, " 0 failures") {
			t.Errorf("the same version: %v\n%s", err, out)
		}
	}
	broken := "#!/bin/sh\nexit 1\n"
	newer := harness.Get(record.Encode("pod", 99, struct{}{}))(t)
	for _, tt := range []struct{ name, path, content, want string }{
		{"a broken daemon", next + "/berthd", broken, "execute " + next + "/berthd: exit status 1"},
		{"another daemon", next + "/berthd", "#!/bin/sh\necho berthd version 9\n", `is "berthd version 9"`},
		{"a broken command", next + "/berth", broken, "check by " + next + "/berth: exit status 1"},
		{"no program", next + "/berth", "text", "check by " + next + "/berth: fork/exec"},
		{"a newer record", filepath.Join(d.Root, "pods", pod.Id+".record"), string(newer), "1 records were written by a newer berth"},
		{"a damaged record", filepath.Join(d.Root, "pods", pod.Id+".record"), "damaged", "1 records are damaged"},
		{"an unknown monitor", filepath.Join(d.State, "c", c.Id, "shim"), "1 2 3 4 5 6 7\n", "read shim record"},
		{"an unknown option", d.ConfigFile(), "no_such_option = 1\n", "no_such_option"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			was := harness.Get(os.ReadFile(tt.path))(t)
			// Instead of a change of the program, which may be a hard link.
			harness.Must(t, os.Remove(tt.path))
			harness.Must(t, os.WriteFile(tt.path, []byte(tt.content), 0o700))
			out, err := check(t, next)
			if err == nil || !strings.Contains(out, tt.want) {
				t.Errorf("%v; want %q in:\n%s", err, tt.want, out)
			}
			harness.Must(t, os.WriteFile(tt.path, was, 0o700))
		})
	}
	harness.Equal(t, "the container's process", c.Pid(t), pid)
	d.StateMatches(t)
}

// A daemon reads its files again when an upgrade restarts it. The check finds what it would refuse,
// although the running daemon has started with other content.
func TestUpgradeCheckReadsFilesOfDaemon(t *testing.T) {
	d := harness.StartDaemon(t)
	before := harness.Get(os.ReadFile(d.ConfigFile()))(t)
	for _, tt := range []struct{ name, added, want string }{
		{"unchanged", "", ""},
		{"a missing file", "registry.registries_conf = '/no/such/file'\n", "failure  configuration: read registries.conf: "},
		{"an unknown option", "no_such_option = 1\n", "no_such_option"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			harness.Must(t, os.WriteFile(d.ConfigFile(), append([]byte(tt.added), before...), 0o600))
			out, err := d.Command("upgrade", "--check", "--listen", d.Socket).CombinedOutput()
			harness.Must(t, os.WriteFile(d.ConfigFile(), before, 0o600))
			if (err == nil) != (tt.want == "") || !strings.Contains(string(out), tt.want) {
				t.Errorf("%v; want %q in:\n%s", err, tt.want, out)
			}
		})
	}
}

// treeOf lists the files of a daemon's root and state with their times. Not directories: checks of
// the node make and remove temporary ones.
func treeOf(t *testing.T, d *harness.Daemon) string {
	t.Helper()
	out, err := exec.Command("find", d.Root, d.State, "-type", "f", "-printf", "%p %s %T@\n").Output()
	harness.Must(t, err)
	return string(out)
}
