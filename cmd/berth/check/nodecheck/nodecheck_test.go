package nodecheck

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"berth/cmd/config"
	"berth/cni"
	"berth/internal/host"
	"berth/internal/testutil"
)

// machine returns a node with proc, sys and run of its own.
func machine(t *testing.T, facts host.Facts, files map[string]string) *Node {
	t.Helper()
	n := &Node{Config: config.Default(), Facts: facts, root: t.TempDir()}
	n.Config.Root, n.Config.State = t.TempDir(), t.TempDir()
	n.Network = cni.Config{ConfDir: t.TempDir(), BinDirs: []string{t.TempDir()}, CacheDir: t.TempDir()}
	for name, content := range files {
		path := n.path(name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(content), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	return n
}

// find returns the finding about a subject.
func find(t *testing.T, findings []Finding, subject, part string) Finding {
	t.Helper()
	for _, f := range findings {
		if f.Subject == subject && strings.Contains(f.Found, part) {
			if (f.Level == OK) != (f.Fix == "") {
				t.Errorf("%s is %s, and the fix is %q", subject, f.Level, f.Fix)
			}
			return f
		}
	}
	t.Fatalf("nothing about %s that says %q: %v", subject, part, findings)
	return Finding{}
}

func kernel(major, minor int) host.Facts {
	return host.Facts{Kernel: "test", KernelMajor: major, KernelMinor: minor, Seccomp: true, RootShared: true}
}

func TestFindings(t *testing.T) {
	v2 := kernel(6, 12)
	v2.CgroupV2 = true
	for _, tc := range []struct {
		name    string
		check   check
		facts   host.Facts
		files   map[string]string
		systemd bool
		subject string
		level   Level
		found   string
	}{
		{"old kernel", checkKernel, kernel(5, 4), nil, false, "kernel", Failure, "test"},
		{"kernel without newer features", checkKernel, kernel(5, 10), nil, false, "kernel", Warning, "mount_setattr"},
		{"new kernel", checkKernel, kernel(6, 12), nil, false, "kernel", OK, "Linux test"},
		{"no seccomp", checkKernel, host.Facts{KernelMajor: 6, KernelMinor: 12}, nil, false, "seccomp", Warning, "not available"},
		{"user namespaces forbidden", checkUserNamespaces, kernel(6, 12), map[string]string{"/proc/sys/user/max_user_namespaces": "0\n"}, false, "user namespaces", Warning, "not allowed"},
		{"overlayfs in the kernel", checkFilesystems, kernel(6, 12), map[string]string{"/proc/filesystems": "nodev\toverlay\n\text4\n"}, false, "overlayfs", OK, ""},
		{"overlayfs loadable", checkFilesystems, kernel(6, 12), map[string]string{"/proc/filesystems": "\text4\n",
			"/lib/modules/test/modules.dep": "kernel/fs/overlayfs/overlay.ko.xz: kernel/fs/x.ko\n"}, false, "overlayfs", OK, ""},
		{"no overlayfs", checkFilesystems, kernel(6, 12), map[string]string{"/proc/filesystems": "\text4\n"}, false, "overlayfs", Failure, ""},
		{"sysctl too low", checkSysctls, kernel(6, 12), map[string]string{"/proc/sys/net/ipv4/ip_forward": "0\n"}, false, "net.ipv4.ip_forward", Warning, "0"},
		{"sysctl high enough", checkSysctls, kernel(6, 12), map[string]string{"/proc/sys/kernel/pid_max": "4194304\n"}, false, "kernel.pid_max", OK, "4194304"},
		{"sysctl that makes no sense", checkSysctls, kernel(6, 12), map[string]string{"/proc/sys/kernel/pid_max": "many\n"}, false, "kernel.pid_max", Warning, "many"},
		{"no such sysctl", checkSysctls, kernel(6, 12), nil, false, "net.bridge.bridge-nf-call-iptables", Warning, "no such"},
		{"systemd driver without systemd", checkCgroups, v2, nil, true, "cgroup driver", Failure, "systemd"},
		{"cgroupfs beside systemd", checkCgroups, v2, map[string]string{"/run/systemd/system/x": ""}, false, "cgroup driver", Warning, "cgroupfs"},
		{"controllers of version 2", checkCgroups, v2, map[string]string{"/sys/fs/cgroup/cgroup.controllers": "cpuset cpu io memory pids\n"}, false, "cgroup controllers", OK, "io"},
		{"memory controller missing", checkCgroups, v2, map[string]string{"/sys/fs/cgroup/cgroup.controllers": "cpuset cpu io pids\n"}, false, "cgroup controllers", Failure, "memory"},
		{"controllers of version 1", checkCgroups, kernel(6, 12), map[string]string{
			"/proc/cgroups": "#subsys_name\thierarchy\tnum_cgroups\tenabled\ncpu\t1\t2\t1\nmemory\t2\t2\t1\npids\t3\t2\t1\ncpuset\t0\t2\t1\n"}, false, "cgroup controllers", Failure, "cpuset"},
		{"private root", checkPropagation, host.Facts{}, nil, false, "mount propagation", Warning, "private"},
		{"AppArmor without its parser", checkSecurityModules, host.Facts{AppArmor: true}, nil, false, "AppArmor", Warning, "apparmor_parser"},
		{"AppArmor", checkSecurityModules, host.Facts{AppArmor: true}, map[string]string{"/sbin/apparmor_parser": ""}, false, "AppArmor", OK, ""},
		{"SELinux without policy", checkSecurityModules, host.Facts{SELinux: true}, nil, false, "SELinux", Warning, "policy"},
		{"no security module", checkSecurityModules, host.Facts{}, nil, false, "security module", Warning, ""},
		{"no shim", checkPrograms, host.Facts{}, nil, false, "berth-shim", Failure, "no such file"},
		{"no unpacker", checkPrograms, host.Facts{}, nil, false, "berth-unpack", Failure, "no such file"},
		{"no process of sessions", checkPrograms, host.Facts{}, nil, false, "berth-stream", Failure, "no such file"},
		{"no filter for berth-unpack", func(context.Context, *Node) []Finding { return checkConfinement("riscv64") }, host.Facts{}, nil, false, "berth-unpack", Warning, "any system call"},
		{"devices in layers", checkKernel, kernel(5, 11), nil, false, "kernel", Warning, "mount_setattr"},
		{"no network", checkNetwork, host.Facts{}, nil, false, "CNI network", Warning, "no CNI network configured"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			n := machine(t, tc.facts, tc.files)
			n.SystemdCgroup, n.Shim, n.Unpack = tc.systemd, n.path("/no/such/shim"), n.path("/no/such/unpacker")
			n.Stream = n.path("/no/such/stream")
			f := find(t, tc.check(context.Background(), n), tc.subject, tc.found)
			if f.Level != tc.level {
				t.Errorf("%s is %s, want %s: %s", f.Subject, f.Level, tc.level, f.Found)
			}
		})
	}
}

func TestRunLeavesNothing(t *testing.T) {
	testutil.NeedRoot(t)
	facts, err := host.Detect("/")
	if err != nil {
		t.Fatal(err)
	}
	n := machine(t, facts, nil)
	n.root = ""
	n.Shim = filepath.Join(n.Config.Root, "shim")
	n.Config.State = filepath.Join("/", "state-of-nobody") // its nearest existing ancestor is accessible to every user
	findings := Run(t.Context(), n)
	if f := find(t, findings, "user namespaces", ""); f.Level != OK && !strings.Contains(f.Found, "not embedded") {
		t.Errorf("user namespaces: %s", f.Found)
	}
	if f := find(t, findings, "container root filesystems", ""); f.Level != OK {
		t.Errorf("overlayfs: %s", f.Found)
	}
	if f := find(t, findings, "berth-shim", "no such file"); f.Level != Failure || Worst(findings) != Failure {
		t.Errorf("without a shim: %v, the worst finding is %s", f, Worst(findings))
	}
	if left, err := os.ReadDir(n.Config.Root); err != nil || len(left) > 0 {
		t.Errorf("left are %v, %v", left, err)
	}
}
