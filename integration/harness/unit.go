package harness

import (
	"cmp"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"berth/internal/cgroup"
	"berth/internal/pidfd"
)

// The units that berth ships.
const (
	UnitName   = "berth.service"
	SocketName = "berth.socket"
)

const (
	// unitsEnv names the directory of the unit files. The default is the checkout's.
	unitsEnv = "BERTH_UNITS"
	// unitDir is where systemd looks for units until the machine is switched off.
	unitDir = "/run/systemd/system"
	// Paths that the unit expects; see docs/install.md.
	installDir    = "/usr/local/bin"
	installConfig = "/etc/berth/config.toml"
)

// ByUnit makes systemd run the daemon with berth's unit file, unchanged. It installs the programs
// in the unit's paths and writes all options to the configuration file, except the cgroup driver,
// which the daemon detects. It skips the test unless PID 1 of the test's own machine is systemd.
func ByUnit(t *testing.T, d *Daemon) {
	t.Helper()
	if !SystemdDriver() {
		t.Skip("needs systemd as PID 1 and the test's units; run contrib/guest systemd")
	}
	d.byUnit = true
	t.Cleanup(func() { uninstallUnit(t) })
	units := cmp.Or(os.Getenv(unitsEnv), filepath.Join(source(), "contrib/systemd"))
	command(t, "install", "-m", "644", filepath.Join(units, UnitName), filepath.Join(units, SocketName), unitDir)
	for _, name := range []string{"berth", "berth-shim", "berth-unpack"} {
		command(t, "install", filepath.Join(BinDir, name), installDir)
	}
	Systemctl(t, "daemon-reload")
}

// uninstallUnit ends the daemon, if that is necessary, and takes away what ByUnit has made.
func uninstallUnit(t *testing.T) {
	t.Helper()
	Systemctl(t, "stop", SocketName, UnitName)
	for _, name := range []string{UnitName, SocketName} {
		Must(t, os.RemoveAll(filepath.Dir(dropInFile(name))))
		Must(t, os.Remove(filepath.Join(unitDir, name)))
	}
	Systemctl(t, "daemon-reload")
	Must(t, os.RemoveAll(filepath.Dir(installConfig)))
	for _, name := range []string{"berth", "berth-shim", "berth-unpack"} {
		Must(t, os.RemoveAll(filepath.Join(installDir, name)))
	}
}

func dropInFile(unit string) string { return filepath.Join(unitDir, unit+".d", "test.conf") }

// DropIn replaces the lines of a unit's drop-in. Most take effect at the next start, some at once.
func DropIn(t *testing.T, unit string, lines ...string) {
	t.Helper()
	file := dropInFile(unit)
	Must(t, os.MkdirAll(filepath.Dir(file), 0o755))
	Must(t, os.WriteFile(file, []byte(strings.Join(lines, "\n")+"\n"), 0o644))
	Systemctl(t, "daemon-reload")
}

// startUnit returns when systemctl does: when the daemon has said that it is ready.
func (d *Daemon) startUnit(t *testing.T) {
	t.Helper()
	lines := []string{
		fmt.Sprintf("listen = %q", d.Socket), fmt.Sprintf("root = %q", d.Root), fmt.Sprintf("state = %q", d.State),
		fmt.Sprintf("cni_conf_dir = %q", d.ConfDir), fmt.Sprintf("cni_bin_dirs = ['%s']", strings.Join(d.BinDirs, "', '")),
		fmt.Sprintf("registry_dirs = [%q]", d.certs), `log_level = "debug"`,
	}
	Must(t, os.MkdirAll(filepath.Dir(installConfig), 0o755))
	Must(t, os.WriteFile(installConfig, []byte(strings.Join(append(lines, d.Extra...), "\n")+"\n"), 0o600))
	Systemctl(t, "start", UnitName)
	d.adopt(t, MainPID(t))
}

// AdoptRestarted waits until systemd has replaced d's process with another, and makes d refer to
// it.
func (d *Daemon) AdoptRestarted(t *testing.T) {
	t.Helper()
	before := d.Cmd.Process.Pid
	Eventually(t, "systemd has started the daemon again", func() error {
		if pid := MainPID(t); pid == 0 || pid == before {
			return fmt.Errorf("its main process is %d, was %d", pid, before)
		}
		if state := UnitProperty(t, "ActiveState"); state != "active" {
			return Unexpected("the unit's state", state, "active")
		}
		return nil
	})
	d.Disconnect(t)
	d.adopt(t, MainPID(t))
	d.connect(t)
}

// adopt makes d refer to a daemon that d did not start.
func (d *Daemon) adopt(t *testing.T, pid int) {
	t.Helper()
	process, err := os.FindProcess(pid)
	Must(t, err)
	file, err := pidfd.Open(pid)
	Must(t, err)
	exited := make(chan struct{})
	d.Cmd, d.exited = &exec.Cmd{Process: process}, exited
	go func() { // ends with the daemon
		defer file.Close()
		if pidfd.Wait(context.Background(), file) == nil {
			close(exited)
		}
	}()
}

// stopUnit has systemd stop the daemon, which must end well.
func (d *Daemon) stopUnit(t *testing.T) {
	t.Helper()
	Systemctl(t, "stop", UnitName)
	<-d.exited
	Equal(t, "result of the unit", UnitProperty(t, "Result"), "success")
	Equal(t, "exit code of the daemon", UnitProperty(t, "ExecMainStatus"), "0")
}

// MainPID is the process ID of the unit's daemon; 0: there is none.
func MainPID(t *testing.T) int {
	t.Helper()
	return Get(strconv.Atoi(UnitProperty(t, "MainPID")))(t)
}

// UnitProperty asks systemd for a property of the unit.
func UnitProperty(t *testing.T, name string) string {
	t.Helper()
	return Systemctl(t, "show", "--property", name, "--value", UnitName)
}

// UnitCgroup is the directory of the unit's cgroup.
func UnitCgroup(t *testing.T) string {
	t.Helper()
	return filepath.Join("/sys/fs/cgroup", UnitProperty(t, "ControlGroup"))
}

// UnitProcesses are the processes in the unit's cgroup and below it.
func UnitProcesses(t *testing.T) []int {
	t.Helper()
	return Get(cgroup.ProcsIn(UnitCgroup(t)))(t)
}

// Journal returns the journal of the unit: the daemons' log lines and systemd's. If the journal
// cannot be read, Journal returns the reason.
func Journal() string {
	out, err := exec.CommandContext(context.Background(), "journalctl", "--no-pager", "--output", "cat", "--unit", UnitName).CombinedOutput()
	if err != nil {
		return fmt.Sprintf("journalctl: %v: %s", err, out)
	}
	return string(out)
}

// Systemctl runs systemctl, which must succeed, and returns its answer.
func Systemctl(t *testing.T, args ...string) string {
	t.Helper()
	return command(t, "systemctl", args...)
}

func command(t *testing.T, name string, args ...string) string {
	t.Helper()
	out, err := exec.CommandContext(context.Background(), name, args...).CombinedOutput() // also after the test's end
	if err != nil {
		t.Fatalf("%s %s: %v: %s", name, strings.Join(args, " "), err, out)
	}
	return strings.TrimSpace(string(out))
}
