package nodecheck

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

func (n *Node) path(p string) string { return filepath.Join(n.root, p) }

func (n *Node) exists(p string) bool {
	_, err := os.Stat(n.path(p))
	return err == nil
}

// value returns the trimmed content of a small file.
func (n *Node) value(p string) (string, error) {
	b, err := os.ReadFile(n.path(p))
	return strings.TrimSpace(string(b)), err
}

// checkProcess checks the rights that a daemon would have.
func checkProcess(_ context.Context, n *Node) []Finding {
	if os.Geteuid() != 0 {
		return []Finding{lacking(Failure, "user", "not root", "run berth as root")}
	}
	findings := []Finding{ok("user", "root")}
	if n.Facts.OOMScoreAdjMin > -998 {
		findings = append(findings, lacking(Warning, "oom_score_adj",
			fmt.Sprintf("cannot be set below %d", n.Facts.OOMScoreAdjMin),
			"give berth CAP_SYS_RESOURCE; without it critical pods are not protected from the OOM killer"))
	}
	var files unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &files); err == nil && files.Max < 65536 {
		findings = append(findings, lacking(
			Warning,
			"open files",
			fmt.Sprintf("the limit of this shell is %d", files.Max),
			"see that the daemon has 65536 or more (LimitNOFILE= of its unit, which this command does not see): each container needs some",
		))
	}
	return findings
}

// The oldest kernel with everything that berth needs. The newest required feature is overlayfs'
// volatile mounts. openat2 (5.6), pidfds and clone into a cgroup (5.7) are older.
const oldestMajor, oldestMinor = 5, 10

// features of newer kernels, and the consequences if they are missing.
var features = []struct {
	major, minor int
	name, brings string
}{
	{
		5,
		12,
		"mount_setattr",
		"recursive read-only mounts, ID-mapped mounts, and berth-unpack without access to devices in layers",
	},
	{5, 14, "cgroup.kill", "killing a whole container at once (cgroup v2)"},
	{6, 3, "tmpfs ID-mapped mounts", "pods with user namespaces"},
}

func checkKernel(_ context.Context, n *Node) []Finding {
	newerThan := func(major, minor int) bool {
		return n.Facts.KernelMajor > major || n.Facts.KernelMajor == major && n.Facts.KernelMinor >= minor
	}
	if !newerThan(oldestMajor, oldestMinor) {
		return []Finding{
			lacking(Failure, "kernel", n.Facts.Kernel,
				fmt.Sprintf("install Linux %d.%d or later", oldestMajor, oldestMinor)),
		}
	}
	findings := []Finding{ok("kernel", "Linux %s", n.Facts.Kernel)}
	for _, f := range features {
		if !newerThan(f.major, f.minor) {
			findings = append(findings,
				lacking(Warning, "kernel", "no "+f.name,
					fmt.Sprintf("Linux %d.%d has it, for %s", f.major, f.minor, f.brings)))
		}
	}
	if n.Facts.Seccomp {
		findings = append(findings, ok("seccomp", "available"))
	} else {
		findings = append(findings, lacking(Warning, "seccomp", "not available",
			"use a kernel with CONFIG_SECCOMP_FILTER: pods with a seccomp profile fail without"))
	}
	return findings
}

// checkFilesystems checks for overlayfs. The kernel may load its module on demand, if the module
// directory of the running kernel has it.
func checkFilesystems(_ context.Context, n *Node) []Finding {
	filesystems, err := n.value("/proc/filesystems")
	if err != nil {
		return []Finding{lacking(Failure, "file systems", err.Error(), "mount /proc")}
	}
	var findings []Finding
	if slices.Contains(strings.Fields(filesystems), "overlay") || n.loadable("overlay") {
		findings = append(findings, ok("overlayfs", "available"))
	} else {
		findings = append(findings, lacking(Failure, "overlayfs", "not available",
			"modprobe overlay, and name it in /etc/modules-load.d/berth.conf"))
	}
	return findings
}

// loadable reports whether modprobe would find a module, or the kernel contains it.
func (n *Node) loadable(module string) bool {
	dir := "/lib/modules/" + n.Facts.Kernel
	for _, list := range []string{dir + "/modules.builtin", dir + "/modules.dep"} {
		if n.listsModule(list, module) {
			return true
		}
	}
	return false
}

func (n *Node) listsModule(list, module string) bool {
	f, err := os.Open(n.path(list))
	if err != nil {
		return false
	}
	defer f.Close()
	lines := bufio.NewScanner(f)
	lines.Buffer(nil, 1<<20) // modules.dep has long lines
	for lines.Scan() {
		file, _, _ := strings.Cut(lines.Text(), ":")
		name, _, _ := strings.Cut(filepath.Base(file), ".ko")
		if name == module {
			return true
		}
	}
	return false
}

// sysctls that kubelet, networks and many containers need. A module's sysctls exist only while the
// module is loaded.
var sysctls = []struct {
	name   string
	least  int
	module string // the module that provides it
	reason string
}{
	{"net.ipv4.ip_forward", 1, "", "pods reach nothing beyond the node without it"},
	{"net.bridge.bridge-nf-call-iptables", 1, "br_netfilter", "services are not reached through a bridge without it"},
	{
		"net.bridge.bridge-nf-call-ip6tables",
		1,
		"br_netfilter",
		"services with IPv6 addresses are not reached through a bridge without it",
	},
	{"fs.inotify.max_user_instances", 512, "", "with the kernel's 128, pods that watch files fail on a full node"},
	{"fs.inotify.max_user_watches", 65536, "", "pods that watch files fail on a full node"},
	{"kernel.pid_max", 131072, "", "110 pods may have more processes than that"},
}

func checkSysctls(_ context.Context, n *Node) []Finding {
	var findings []Finding
	for _, s := range sysctls {
		text, err := n.value("/proc/sys/" + strings.ReplaceAll(s.name, ".", "/"))
		if errors.Is(err, fs.ErrNotExist) {
			fix := "use a kernel that has it: "
			if s.module != "" {
				fix = fmt.Sprintf("modprobe %s, and name it in /etc/modules-load.d/berth.conf: ", s.module)
			}
			findings = append(findings, lacking(Warning, s.name, "there is no such sysctl", fix+s.reason))
			continue
		}
		value, parseErr := strconv.Atoi(text)
		if err := errors.Join(err, parseErr); err != nil {
			findings = append(findings, lacking(Warning, s.name, err.Error(), "make it readable"))
			continue
		}
		if value < s.least {
			findings = append(findings, lacking(Warning, s.name, text,
				fmt.Sprintf("sysctl -w %s=%d, and write it into /etc/sysctl.d/berth.conf: %s", s.name, s.least, s.reason)))
			continue
		}
		findings = append(findings, ok(s.name, "%s", text))
	}
	return findings
}
