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
	// unitDir is systemd's directory for units that do not outlive the boot.
	unitDir = "/run/systemd/system"
	// Paths in the unit file; see docs/install.md.
	installDir    = "/usr/local/bin"
	installConfig = "/etc/berth/config.toml"
)

// ByUnit makes systemd run the daemon with berth's unit file, unchanged. It installs the programs
// in the unit's paths and writes all options to the configuration file, except the cgroup driver,
// which the daemon detects. It skips the test unless PID 1 of the private machine is systemd.
func ByUnit(t *testing.T, d *Daemon) {
	t.Helper()
	if !SystemdDriver() {
		t.Skip("needs systemd as PID 1 and the test's units; run contrib/guest systemd")
	}
	d.byUnit = true
	t.Cleanup(func() { uninstallUnit(t) })
	units := cmp.Or(os.Getenv(unitsEnv), filepath.Join(source(), "contrib/systemd"))
	command(t, "install", "-m", "644", filepath.Join(units, UnitName), filepath.Join(units, SocketName), unitDir)
	for _, name := range []string{"berth", DaemonProgram, "berth-shim", "berth-unpack", "berth-verify", "berth-task", "berth-stream"} {
		command(t, "install", filepath.Join(BinDir, name), installDir)
	}
	Systemctl(t, "daemon-reload")
}

// uninstallUnit stops the daemon, if it still runs, and removes the files that ByUnit has made.
func uninstallUnit(t *testing.T) {
	t.Helper()
	Systemctl(t, "stop", SocketName, UnitName)
	for _, name := range []string{UnitName, SocketName} {
		Must(t, os.RemoveAll(filepath.Dir(dropInFile(name))))
		Must(t, os.Remove(filepath.Join(unitDir, name)))
	}
	Systemctl(t, "daemon-reload")
	Must(t, os.RemoveAll(filepath.Dir(installConfig)))
	for _, name := range []string{"berth", DaemonProgram, "berth-shim", "berth-unpack", "berth-verify", "berth-task", "berth-stream"} {
		Must(t, os.RemoveAll(filepath.Join(installDir, name)))
	}
}

func dropInFile(unit string) string { return filepath.Join(unitDir, unit+".d", "test.conf") }

// DropIn replaces the lines of a unit's drop-in. Most settings take effect at the next start, some
// at once.
func DropIn(t *testing.T, unit string, lines ...string) {
	t.Helper()
	file := dropInFile(unit)
	Must(t, os.MkdirAll(filepath.Dir(file), 0o755))
	Must(t, os.WriteFile(file, []byte(strings.Join(lines, "\n")+"\n"), 0o644))
	Systemctl(t, "daemon-reload")
}

// startUnit starts the unit. systemctl returns when the daemon has reported that it is ready.
func (d *Daemon) startUnit(t *testing.T) {
	t.Helper()
	lines := []string{
		fmt.Sprintf("listen = %q", d.Socket), fmt.Sprintf("root = %q", d.Root), fmt.Sprintf("state = %q", d.State),
		fmt.Sprintf("cni.conf_dir = %q", d.ConfDir), fmt.Sprintf("cni.bin_dirs = ['%s']", strings.Join(d.BinDirs, "', '")),
		fmt.Sprintf("registry.config_dirs = [%q]", d.certs), `log.level = "debug"`,
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
			return fmt.Errorf("the unit's main process is %d, was %d", pid, before)
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
	process := Get(os.FindProcess(pid))(t)
	file := Get(pidfd.Open(pid))(t)
	exited := make(chan struct{})
	d.Cmd, d.exited = &exec.Cmd{Process: process}, exited
	go func() { // ends with the daemon
		defer file.Close()
		if pidfd.Wait(context.Background(), file) == nil {
			close(exited)
		}
	}()
}

// stopUnit makes systemd stop the daemon, and expects success.
func (d *Daemon) stopUnit(t *testing.T) {
	t.Helper()
	Systemctl(t, "stop", UnitName)
	<-d.exited
	Equal(t, "result of the unit", UnitProperty(t, "Result"), "success")
	Equal(t, "exit code of the daemon", UnitProperty(t, "ExecMainStatus"), "0")
}

// MainPID returns the process ID of the unit's daemon, or 0 if none runs.
func MainPID(t *testing.T) int {
	t.Helper()
	return Get(strconv.Atoi(UnitProperty(t, "MainPID")))(t)
}

// UnitProperty returns a property of the unit.
func UnitProperty(t *testing.T, name string) string {
	t.Helper()
	return Systemctl(t, "show", "--property", name, "--value", UnitName)
}

// UnitCgroup returns the directory of the unit's cgroup.
func UnitCgroup(t *testing.T) string {
	t.Helper()
	return filepath.Join("/sys/fs/cgroup", UnitProperty(t, "ControlGroup"))
}

// UnitProcesses returns the processes in the unit's cgroup and below it.
func UnitProcesses(t *testing.T) []int {
	t.Helper()
	return Get(cgroup.ProcsIn(UnitCgroup(t)))(t)
}

// Journal returns the unit's journal, with log lines of the daemons and of systemd. If the journal
// cannot be read, Journal returns the reason.
func Journal() string {
	out, err := exec.CommandContext(context.Background(), "journalctl", "--no-pager", "--output", "cat", "--unit", UnitName).CombinedOutput()
	if err != nil {
		return fmt.Sprintf("journalctl: %v: %s", err, out)
	}
	return string(out)
}

// Systemctl runs systemctl, expects success, and returns its output.
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
