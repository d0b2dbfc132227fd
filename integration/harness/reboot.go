package harness

import (
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/google/nftables"
	"golang.org/x/sys/unix"

	"berth/cmd/config"
	"berth/cmd/node"
	"berth/cni/berthnet/rules"
	"berth/integration/machine"
	"berth/internal/cgroup"
)

// LosePower kills the daemon and its pods' processes. It removes everything that a reboot removes:
// the state directory, network namespaces, devices and packet filter rules.
func (d *Daemon) LosePower(t *testing.T) {
	t.Helper()
	if !d.Gone() {
		d.Kill(t)
	}
	d.KillAll(t)
	d.losePlugins(t)
	d.LoseState(t)
	unpinNetworks(t)
	d.LoseNetwork(t)
	for _, flag := range []string{"-F", "-X"} {
		if out, err := exec.Command("iptables", "-t", "nat", flag).CombinedOutput(); err != nil {
			t.Fatalf("iptables %s: %v: %s", flag, err, out)
		}
	}
}

// losePlugins kills the CNI plugins that still run and removes their cgroups, which the notes in
// the state directory name. LosePower can come while a plugin runs that has done all of its work.
func (d *Daemon) losePlugins(t *testing.T) {
	t.Helper()
	dir := node.CNIRunDir(&config.Config{State: d.State})
	for _, name := range machine.ReadDir(dir) {
		group, _, _ := strings.Cut(string(Get(os.ReadFile(filepath.Join(dir, name)))(t)), "\n")
		if !strings.HasPrefix(filepath.Base(group), "berth-cni-") {
			continue // the daemon was killed while it wrote the note, before it made the cgroup
		}
		Must(t, cgroup.KillChild(group, Patience))
		Eventually(t, "the cgroup of a CNI plugin is removed", func() error { return cgroup.RemoveChild(group) })
	}
}

// LoseNetwork removes the shared parts of the built-in network: the bridge and the packet filter
// rules.
func (d *Daemon) LoseNetwork(t *testing.T) {
	t.Helper()
	d.removeNetwork(t)
	Must(t, d.removeRules())
}

// removeRules deletes the table of the built-in network, if it exists.
func (d *Daemon) removeRules() error {
	conn, err := nftables.New()
	if err != nil {
		return err
	}
	table := conn.AddTable(&nftables.Table{Family: nftables.TableFamilyINet, Name: rules.TablePrefix + d.NetworkKey()})
	conn.DelTable(table)
	return conn.Flush()
}

// LoseCgroups removes the pods' cgroups with those of their containers, as a reboot does. LosePower
// has killed the processes.
func (d *Daemon) LoseCgroups(t *testing.T) {
	t.Helper()
	for _, parent := range d.Parents {
		for _, dir := range cgroupDirs(t, parent) {
			below := Get(filepath.Glob(filepath.Join(dir, "*", "")))(t)
			for _, name := range append(below, dir) {
				if st, err := os.Stat(name); err == nil && st.IsDir() {
					Eventually(t, "the cgroup is removed", func() error { return os.Remove(name) })
				}
			}
		}
	}
}

func unpinNetworks(t *testing.T) {
	t.Helper()
	for _, name := range machine.ReadDir("/run/netns") {
		Must(t, syscall.Unmount("/run/netns/"+name, syscall.MNT_DETACH))
		Must(t, os.Remove("/run/netns/"+name))
	}
}

// LoseState empties the state directory of a daemon that has exited.
func (d *Daemon) LoseState(t *testing.T) {
	t.Helper()
	d.forgetOwnMounts(t)
	Must(t, os.RemoveAll(d.State))
}

// KillAll kills the daemon's monitors, launchers and the processes in its pods' cgroups.
func (d *Daemon) KillAll(t *testing.T) {
	t.Helper()
	Eventually(t, "the processes of all pods end", func() error {
		left := d.podProcesses(t)
		for _, pid := range left {
			if err := syscall.Kill(pid, syscall.SIGKILL); err != nil && !errors.Is(err, syscall.ESRCH) {
				return fmt.Errorf("kill process %d: %w", pid, err)
			}
		}
		if len(left) > 0 {
			return fmt.Errorf("processes %v live", left)
		}
		return nil
	})
}

// podProcesses returns the processes in the pods' cgroups and those of berth-shim. The test's
// machine runs no other daemon.
func (d *Daemon) podProcesses(t *testing.T) (pids []int) {
	t.Helper()
	inPod := func(pid int) bool {
		for _, line := range machine.ReadLines(fmt.Sprintf("/proc/%d/cgroup", pid)) {
			for _, parent := range d.Parents {
				if strings.Contains(line, filepath.Base(parent)) {
					return true
				}
			}
		}
		return false
	}
	for _, pid := range machine.Processes() {
		if command := machine.CommandLine(pid); machine.Alive(pid) && (inPod(pid) || strings.HasPrefix(command, "berth-monitor") || strings.HasPrefix(command, "berth-shim")) {
			pids = append(pids, pid)
		}
	}
	return pids
}

// Boot starts the daemon with a new boot ID, as after a boot.
func (d *Daemon) Boot(t *testing.T) {
	t.Helper()
	var id [16]byte
	_, _ = rand.Read(id[:]) // never fails
	d.StartInBoot(t, hex.EncodeToString(id[:]))
}

// StartInBoot starts the daemon with a boot ID. It covers the kernel's boot ID only until the
// daemon has read it, because with a mount in /proc the kernel refuses proc mounts in user
// namespaces.
func (d *Daemon) StartInBoot(t *testing.T, id string) {
	t.Helper()
	const path = "/proc/sys/kernel/random/boot_id"
	file := filepath.Join(t.TempDir(), "boot_id")
	Must(t, os.WriteFile(file, []byte(id+"\n"), 0o444))
	Must(t, unix.Mount(file, path, "", unix.MS_BIND, ""))
	defer func() { Must(t, unix.Unmount(path, 0)) }()
	d.Start(t)
}
