package main

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"

	"berth/cmd/berth/config"
	"berth/internal/host"
)

// node is what the daemon finds on the machine.
type node struct {
	facts         host.Facts
	systemdCgroup bool   // the cgroup driver, "auto" decided
	shim          string // the berth-shim program
	unpack        string // the berth-unpack program
	resolvConf    string // what pods with the node's DNS get
}

func discover(cfg *config.Config) (*node, error) {
	var n node
	var err error
	if n.facts, err = host.Detect("/"); err != nil {
		return nil, err
	}
	if n.systemdCgroup, err = systemdCgroup(cfg.CgroupDriver, systemdRunning, n.facts.CgroupV2); err != nil {
		return nil, err
	}
	if n.shim, err = findShim(cfg.ShimPath); err != nil {
		return nil, err
	}
	if n.unpack, err = findUnpack(cfg.UnpackPath); err != nil {
		return nil, err
	}
	n.resolvConf = host.ResolvConf("/")
	return &n, nil
}

// systemdRunning exists if and only if systemd is PID 1, see sd_booted(3).
const systemdRunning = "/run/systemd/system"

// systemdCgroup decides the cgroup driver. "auto" takes cgroupfs on cgroup v1,
// where systemd sets only some of the limits.
func systemdCgroup(driver, marker string, cgroupV2 bool) (bool, error) {
	_, err := os.Stat(marker)
	running := err == nil
	switch {
	case driver == "auto":
		return running && cgroupV2, nil
	case driver == "systemd" && !running:
		return false, fmt.Errorf("cgroup_driver systemd: systemd is not PID 1, %s does not exist", marker)
	default:
		return driver == "systemd", nil
	}
}

func findShim(configured string) (string, error) {
	return findProgram("berth-shim", "shim_path", configured)
}

func findUnpack(configured string) (string, error) {
	return findProgram("berth-unpack", "unpack_path", configured)
}

// findProgram returns a program of berth's: the configured one, the one beside
// this program, or the one in PATH.
func findProgram(name, option, configured string) (string, error) {
	if configured != "" {
		return configured, nil
	}
	self, err := os.Executable()
	if err != nil {
		return "", fmt.Errorf("find %s: %w", name, err)
	}
	beside := filepath.Join(filepath.Dir(self), name)
	if _, err := exec.LookPath(beside); err == nil {
		return beside, nil
	}
	inPath, err := exec.LookPath(name)
	if err != nil {
		return "", fmt.Errorf("find %s: it is neither %s nor in PATH; %s in the configuration may name it", name, beside, option)
	}
	return inPath, nil
}
