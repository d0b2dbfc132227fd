package nodecheck

import (
	"context"
	"errors"
	"fmt"
	"os/exec"
	"strconv"
	"strings"
	"time"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"berth/internal/criu"
	"berth/sandbox/state"
)

// checkpoints is the subject of the findings about checkpoint and restore.
const checkpoints = "checkpoints"

// checkCheckpoints checks what CheckpointPod and RestorePod need: CRIU, kernel options and
// capabilities. Without CRIU a node has no checkpoints, which is no problem unless checkpoint.criu
// is set.
func checkCheckpoints(ctx context.Context, n *Node) []Finding {
	path, err := criu.Locate(n.Config.CheckpointCRIU)
	if err != nil {
		if n.Config.CheckpointCRIU == "" && errors.Is(err, criu.ErrMissing) {
			return []Finding{ok(checkpoints, "not available: CRIU is not installed")}
		}
		return []Finding{lacking(Warning, checkpoints, err.Error(), "install CRIU, or fix checkpoint.criu: checkpoint and restore fail until then")}
	}
	version, err := criu.VersionOf(ctx, path)
	if err != nil {
		return []Finding{lacking(Warning, checkpoints, err.Error(), "reinstall CRIU: checkpoint and restore fail until then")}
	}
	findings := append(n.checkCRIU(ctx, path, version), n.checkCRIUKernel()...)
	if n.Facts.SELinux && state.RestoreMode(n.Config.CheckpointRestore) != state.RestoreOff {
		findings = append(findings, lacking(Warning, checkpoints,
			fmt.Sprintf("checkpoint.restore is %s, but the kernel has SELinux", n.Config.CheckpointRestore),
			`set checkpoint.restore = "off": CRIU restores nothing on nodes with SELinux`))
	}
	if len(findings) == 0 {
		findings = append(findings, ok(checkpoints, "CRIU %s; checkpoint.restore is %s", version, n.Config.CheckpointRestore))
	}
	return findings
}

// fixedCRIU are versions of CRIU that a version of Linux needs.
var fixedCRIU = []struct {
	major, minor int // of Linux
	version      criu.Version
	without      string
}{
	// Linux refuses SO_PASSCRED for other sockets than unix sockets.
	{6, 16, criu.Version{Major: 4, Minor: 2, Sub: 1}, "processes with IP sockets cannot be saved"},
}

// checkCRIU checks the version, and runs CRIU's own check of the kernel.
func (n *Node) checkCRIU(ctx context.Context, path string, version criu.Version) (findings []Finding) {
	if err := version.Check(); err != nil {
		return []Finding{lacking(Warning, checkpoints, err.Error(), "install a newer CRIU: checkpoint and restore fail until then")}
	}
	for _, fixed := range fixedCRIU {
		newer := n.Facts.KernelMajor > fixed.major || n.Facts.KernelMajor == fixed.major && n.Facts.KernelMinor >= fixed.minor
		if newer && version.Before(fixed.version) {
			findings = append(findings, lacking(Warning, checkpoints,
				fmt.Sprintf("CRIU %s is too old for Linux %s", version, n.Facts.Kernel),
				fmt.Sprintf("install CRIU %s or later: until then %s", fixed.version, fixed.without)))
		}
	}
	if problem := criuCheck(ctx, path); problem != "" {
		findings = append(findings, lacking(Warning, checkpoints, "criu check: "+problem,
			"use a kernel with this feature, or a newer CRIU: checkpoint and restore may fail"))
	}
	return findings
}

// criuCheckTimeout bounds "criu check".
const criuCheckTimeout = 20 * time.Second

// criuCheck returns the last line of "criu check" if it fails.
func criuCheck(ctx context.Context, path string) string {
	ctx, cancel := context.WithTimeout(ctx, criuCheckTimeout)
	defer cancel()
	out, err := exec.CommandContext(ctx, path, "check").CombinedOutput()
	if err == nil {
		return ""
	}
	lines := strings.Split(strings.TrimSpace(string(out)), "\n")
	if last := strings.TrimSpace(lines[len(lines)-1]); last != "" {
		return last
	}
	return err.Error()
}

// kernelOption is an option of the kernel that CRIU needs.
type kernelOption struct {
	name    string // as in the kernel's configuration
	without string
	has     func(*Node) bool
}

// kernelOptions are the options that CRIU needs and that distributions may leave out.
var kernelOptions = []kernelOption{
	{"CONFIG_CHECKPOINT_RESTORE", "no process can be saved", func(n *Node) bool { return n.exists("/proc/sys/kernel/ns_last_pid") }},
	{"CONFIG_KCMP", "no process can be saved", hasKcmp},
	{"CONFIG_FHANDLE", "processes with inotify or fanotify cannot be saved", hasFileHandles},
	{"CONFIG_UNIX_DIAG", "processes with unix sockets cannot be saved", hasDiag(unix.AF_UNIX, 0)},
	{"CONFIG_INET_TCP_DIAG", "processes with TCP sockets cannot be saved", hasDiag(unix.AF_INET, unix.IPPROTO_TCP)},
	{"CONFIG_INET_UDP_DIAG", "processes with UDP sockets cannot be saved", hasDiag(unix.AF_INET, unix.IPPROTO_UDP)},
	{"CONFIG_PACKET_DIAG", "processes with packet sockets cannot be saved", hasDiag(unix.AF_PACKET, 0)},
	{"CONFIG_NETLINK_DIAG", "processes with netlink sockets cannot be saved", hasDiag(unix.AF_NETLINK, 0)},
}

// checkCRIUKernel checks kernel options, the freezer and capabilities.
func (n *Node) checkCRIUKernel() (findings []Finding) {
	for _, option := range kernelOptions {
		if !option.has(n) {
			findings = append(findings, lacking(Warning, checkpoints, "the kernel lacks "+option.name,
				fmt.Sprintf("use a kernel with %s, or load its module: until then %s", option.name, option.without)))
		}
	}
	if !n.Facts.CgroupV2 && !n.exists("/sys/fs/cgroup/freezer") {
		findings = append(findings, lacking(Warning, checkpoints, "the cgroup controller freezer is not mounted",
			"mount it at /sys/fs/cgroup/freezer: checkpoints fail until then"))
	}
	if capabilities, err := n.effectiveCapabilities(); err == nil && capabilities&(1<<unix.CAP_SYS_RESOURCE) == 0 {
		findings = append(findings, lacking(Warning, checkpoints, "no CAP_SYS_RESOURCE",
			"give berth CAP_SYS_RESOURCE: processes of users other than root cannot be saved without"))
	}
	return findings
}

// effectiveCapabilities returns the effective capabilities of this process.
func (n *Node) effectiveCapabilities() (uint64, error) {
	status, err := n.value("/proc/self/status")
	if err != nil {
		return 0, err
	}
	_, line, _ := strings.Cut(status, "CapEff:")
	line, _, _ = strings.Cut(strings.TrimSpace(line), "\n")
	return strconv.ParseUint(line, 16, 64)
}

func hasKcmp(*Node) bool {
	const kcmpFile = 0
	pid := uintptr(unix.Getpid())
	_, _, errno := unix.Syscall6(unix.SYS_KCMP, pid, pid, kcmpFile, 0, 0, 0)
	return errno != unix.ENOSYS
}

func hasFileHandles(*Node) bool {
	_, _, err := unix.NameToHandleAt(unix.AT_FDCWD, "/", 0)
	return !errors.Is(err, unix.ENOSYS)
}

// hasDiag returns a function that asks the kernel for the sockets of a family, which needs the
// option. The kernel loads the module for the family. ENOENT means that there is no such module.
func hasDiag(family, protocol uint8) func(*Node) bool {
	return func(*Node) bool {
		const sockDiagByFamily = 20
		request := nl.NewNetlinkRequest(sockDiagByFamily, unix.NLM_F_DUMP)
		request.AddRawData(diagRequest(family, protocol))
		_, err := request.Execute(unix.NETLINK_INET_DIAG, 0)
		return !errors.Is(err, unix.ENOENT)
	}
}

// diagRequest returns a request for sockets in no state, so the answer is empty. It has the form of
// struct inet_diag_req_v2, the longest of the requests. All begin with family and protocol. Except
// for packet sockets, they have the states at offset 4.
func diagRequest(family, protocol uint8) []byte {
	const size = 56
	request := make([]byte, size)
	request[0], request[1] = family, protocol
	if family == unix.AF_NETLINK {
		const allProtocols = 255
		request[1] = allProtocols
	}
	return request
}
