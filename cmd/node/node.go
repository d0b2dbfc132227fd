// Package node determines the daemon's environment from its configuration and this machine: kernel
// features, the cgroup driver, berth's programs, and the pods' network.
package node

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"

	"berth/cmd/config"
	"berth/internal/host"
)

// Node is the daemon's environment on this machine.
type Node struct {
	Facts         host.Facts
	SystemdCgroup bool   // whether systemd manages cgroups; "auto" is decided
	Shim          string // path of berth-shim
	Unpack        string // path of berth-unpack
	Stream        string // path of berth-stream
	Verify        string // path of berth-verify; empty: not found
}

// Discover inspects this machine. It fails if cfg cannot work here, or if a program is missing.
func Discover(cfg *config.Config) (*Node, error) {
	var n Node
	var err error
	if n.Facts, err = host.Detect("/"); err != nil {
		return nil, err
	}
	if n.SystemdCgroup, err = SystemdCgroup(cfg.CgroupDriver, n.Facts.CgroupV2); err != nil {
		return nil, err
	}
	if n.Shim, err = FindShim(cfg.ShimPath); err != nil {
		return nil, err
	}
	if n.Unpack, err = FindUnpack(cfg.UnpackPath); err != nil {
		return nil, err
	}
	if n.Stream, err = FindStream(cfg.StreamPath); err != nil {
		return nil, err
	}
	n.Verify, _ = FindVerify(cfg.SignatureVerifyPath) // the part that needs the program reports that it is missing
	return &n, nil
}

// IsDaemon reports whether a process is a daemon, by its name. The name is berthd, or berth, which
// was the daemon's program up to release 0.2.
func IsDaemon(name string) bool { return name == "berthd" || name == "berth" }

// systemdMarker exists if and only if systemd is PID 1, see sd_booted(3).
const systemdMarker = "/run/systemd/system"

// SystemdCgroup reports whether the option cgroup_driver means systemd. "auto" selects cgroupfs on
// cgroup v1, where systemd sets only some of the limits.
func SystemdCgroup(driver string, cgroupV2 bool) (bool, error) {
	return systemdCgroup(driver, systemdMarker, cgroupV2)
}

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

// FindShim returns the path of berth-shim: configured if it is not empty, else the program in this
// program's directory, else the program in PATH.
func FindShim(configured string) (string, error) {
	return findProgram("berth-shim", "shim_path", configured)
}

// FindUnpack is FindShim for berth-unpack.
func FindUnpack(configured string) (string, error) {
	return findProgram("berth-unpack", "unpack_path", configured)
}

// FindStream is FindShim for berth-stream.
func FindStream(configured string) (string, error) {
	return findProgram("berth-stream", "stream.path", configured)
}

// FindVerify is FindShim for berth-verify.
func FindVerify(configured string) (string, error) {
	return findProgram("berth-verify", "signature.verify_path", configured)
}

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
		return "", fmt.Errorf("find %s: not at %s and not in PATH; set %s in the configuration", name, beside, option)
	}
	return inPath, nil
}
