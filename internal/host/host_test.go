package host

import (
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"berth/internal/testutil"
)

// machine writes a fake /proc and /sys and returns their root. changes maps a path to its content;
// "-" removes the file.
func machine(t *testing.T, changes map[string]string) string {
	t.Helper()
	files := map[string]string{
		"proc/sys/kernel/osrelease":             "6.12.9-amd64\n",
		"proc/sys/kernel/hostname":              "node-1\n",
		"proc/sys/kernel/seccomp/actions_avail": "kill_process allow\n",
		"proc/self/status":                      "Name:\tberth\nCapPrm:\t000001ffffffffff\nCapEff:\t0\nCapBnd:\t000001ffffffffff\n",
		"proc/self/oom_score_adj":               "-999\n",
		"proc/self/cgroup":                      "0::/system.slice/berth.service\n",
		"proc/self/mountinfo": "21 1 8:1 / / rw shared:1 - ext4 /dev/sda1 rw\n" +
			"22 21 0:20 / /sys/fs/cgroup rw - tmpfs tmpfs rw\n" +
			"23 21 0:21 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n",
		"sys/fs/cgroup/cgroup.controllers":                         "cpuset cpu io memory hugetlb pids\n",
		"sys/fs/cgroup/system.slice/berth.service/memory.swap.max": "max\n",
		"sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages":    "0\n",
		"sys/kernel/mm/hugepages/hugepages-1048576kB/nr_hugepages": "0\n",
		"sys/kernel/mm/hugepages/hugepages-64kB/nr_hugepages":      "0\n",
		"sys/module/apparmor/parameters/enabled":                   "Y\n",
		"sys/kernel/security/apparmor/profiles":                    "",
		"sys/fs/selinux/enforce":                                   "1",
	}
	for path, content := range changes {
		files[path] = content
	}
	root := t.TempDir()
	for path, content := range files {
		if content == "-" {
			continue
		}
		file := filepath.Join(root, path)
		testutil.Must(t, os.MkdirAll(filepath.Dir(file), 0o755))
		testutil.Must(t, os.WriteFile(file, []byte(content), 0o644))
	}
	return root
}

const v1Mounts = "21 1 8:1 / / rw - ext4 /dev/sda1 rw\n" +
	"22 21 0:20 / /sys/fs/cgroup rw - tmpfs tmpfs rw\n" +
	"23 22 0:21 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n" +
	"24 22 0:22 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n"

func TestDetect(t *testing.T) {
	t.Parallel()
	f, err := Detect(machine(t, nil))
	testutil.Must(t, err)
	if len(f.Capabilities) != 41 || f.Capabilities[0] != "CAP_CHOWN" || f.Capabilities[40] != "CAP_CHECKPOINT_RESTORE" {
		t.Errorf("capabilities %q", f.Capabilities)
	}
	f.Capabilities = nil
	slices.Sort(f.HugepageSizes)
	want := Facts{
		Hostname: "node-1", Kernel: "6.12.9-amd64", KernelMajor: 6, KernelMinor: 12, CgroupV2: true,
		Seccomp: true, AppArmor: true, SELinux: true, OOMScoreAdjMin: -1000, HugepageSizes: []string{"1GB", "2MB", "64KB"},
		SwapAccounting: true, RecursiveReadOnly: true, RootShared: true,
	}
	if !reflect.DeepEqual(f, want) {
		t.Errorf("got  %+v\nwant %+v", f, want)
	}
}

func TestDetectVariants(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		name    string
		changes map[string]string
		holds   func(Facts) bool
	}{
		{"old kernel", map[string]string{"proc/sys/kernel/osrelease": "5.10.0-28"}, func(f Facts) bool { return f.KernelMinor == 10 && !f.RecursiveReadOnly }},
		{"5.12", map[string]string{"proc/sys/kernel/osrelease": "5.12"}, func(f Facts) bool { return f.RecursiveReadOnly }},
		{"no seccomp", map[string]string{"proc/sys/kernel/seccomp/actions_avail": "-"}, func(f Facts) bool { return !f.Seccomp }},
		{"AppArmor off", map[string]string{"sys/module/apparmor/parameters/enabled": "N\n"}, func(f Facts) bool { return !f.AppArmor }},
		{"AppArmor absent", map[string]string{"sys/module/apparmor/parameters/enabled": "-"}, func(f Facts) bool { return !f.AppArmor }},
		{"securityfs not mounted", map[string]string{"sys/kernel/security/apparmor/profiles": "-"}, func(f Facts) bool { return !f.AppArmor }},
		{"no SELinux", map[string]string{"sys/fs/selinux/enforce": "-"}, func(f Facts) bool { return !f.SELinux }},
		{"root private", map[string]string{"proc/self/mountinfo": v1Mounts}, func(f Facts) bool { return !f.RootShared }},
		{"hybrid", map[string]string{"proc/self/mountinfo": v1Mounts}, func(f Facts) bool { return !f.CgroupV2 && !f.SwapAccounting && f.HugepageSizes == nil }},
		{"hybrid with swap", map[string]string{"proc/self/mountinfo": v1Mounts, "sys/fs/cgroup/memory/memory.memsw.limit_in_bytes": "0"},
			func(f Facts) bool { return f.SwapAccounting }},
		{"v1 with hugetlb", map[string]string{"proc/self/mountinfo": v1Mounts + "25 22 0:23 / /sys/fs/cgroup/hugetlb rw - cgroup cgroup rw,hugetlb\n"},
			func(f Facts) bool { return len(f.HugepageSizes) == 3 }},
		{"v2 without hugetlb", map[string]string{"sys/fs/cgroup/cgroup.controllers": "cpu memory hugetlbx\n"}, func(f Facts) bool { return f.HugepageSizes == nil }},
		{"v2 without swap", map[string]string{"sys/fs/cgroup/system.slice/berth.service/memory.swap.max": "-"}, func(f Facts) bool { return !f.SwapAccounting }},
		{"in the root cgroup", map[string]string{"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/init.scope/memory.swap.max": "max"},
			func(f Facts) bool { return f.SwapAccounting }},
		{"not all capabilities", map[string]string{"proc/self/status": "CapPrm:\t0000000000000023\nCapBnd:\t0000000000000021\n"},
			func(f Facts) bool {
				return slices.Equal(f.Capabilities, []string{"CAP_CHOWN", "CAP_KILL"}) && f.OOMScoreAdjMin == -999
			}},
	} {
		t.Run(test.name, func(t *testing.T) {
			f, err := Detect(machine(t, test.changes))
			testutil.Must(t, err)
			if !test.holds(f) {
				t.Errorf("got %+v", f)
			}
		})
	}
}

func TestDetectErrors(t *testing.T) {
	t.Parallel()
	for path, content := range map[string]string{
		"proc/sys/kernel/osrelease":                          "unknown",
		"proc/self/status":                                   "CapPrm:\tzz\nCapBnd:\t0\n",
		"proc/self/oom_score_adj":                            "",
		"proc/self/mountinfo":                                "-",
		"sys/kernel/mm/hugepages/hugepages-xkB/nr_hugepages": "0",
	} {
		f, err := Detect(machine(t, map[string]string{path: content}))
		if err == nil || !reflect.DeepEqual(f, Facts{}) {
			t.Errorf("%s %q: got %+v, %v", path, content, f, err)
		}
	}
	_, err := Detect(machine(t, map[string]string{"proc/self/status": "CapPrm:\t0\n"}))
	if err == nil || !strings.Contains(err.Error(), "CapBnd:") {
		t.Errorf("got %v", err)
	}
}

func TestDetectOnThisMachine(t *testing.T) {
	testutil.NeedRoot(t)
	f, err := Detect("/")
	testutil.Must(t, err)
	var uts unix.Utsname
	testutil.Must(t, unix.Uname(&uts))
	if f.Kernel != unix.ByteSliceToString(uts.Release[:]) || f.KernelMajor < 4 || len(f.Capabilities) == 0 {
		t.Errorf("got %+v", f)
	}
	var st unix.Statfs_t
	testutil.Must(t, unix.Statfs(cgroupRoot, &st))
	if f.CgroupV2 != (st.Type == unix.CGROUP2_SUPER_MAGIC) {
		t.Errorf("cgroup v2: %v", f.CgroupV2)
	}
}
