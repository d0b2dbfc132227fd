// Package host detects the machine's features for containers.
//
// Detect reads the facts once, when the daemon starts. They are plain values. So package oci can
// build specs without access to the machine, and tests can choose any facts. Files answers
// questions about host paths at any time.
package host

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/moby/sys/capability"
	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"
)

// Facts is the result of Detect. The zero value describes a machine without any of the features.
type Facts struct {
	Hostname string // the node's, for pods on the host network

	Kernel                   string // release, e.g. "6.12.9-amd64"
	KernelMajor, KernelMinor int

	CgroupV2   bool // /sys/fs/cgroup is the unified hierarchy; false: v1, pure or hybrid
	NSDelegate bool // cgroup v2 was mounted with nsdelegate
	// CgroupOptions are the options of the cgroup v2 filesystem, for example nsdelegate. The daemon
	// sets them in a copy of the facts for containers that depend on them, because an administrator
	// can change them.
	CgroupOptions []string

	Seccomp  bool // seccomp filters
	AppArmor bool // the AppArmor module is enabled
	SELinux  bool // selinuxfs is mounted
	// NoAppArmorProfile is the reason why the default profile cannot be loaded. The daemon sets it
	// in a copy of the facts for each runtime-spec, because the profile may be loaded later.
	NoAppArmorProfile string

	// Capabilities are the capabilities that this process can pass on, because both its bounding
	// and its permitted set contain them. They are in upper case with the prefix CAP_, and ordered
	// by number.
	Capabilities []string

	// OOMScoreAdjMin is the lowest oom_score_adj of a container. If this process has
	// CAP_SYS_RESOURCE, it is -1000, otherwise the value of this process. Only a process with that
	// capability may lower it below the inherited minimum (proc(5)).
	OOMScoreAdjMin int

	// HugepageSizes are the sizes with a limit file in a container's cgroup, for example "2MB",
	// "1GB". It is empty if there is no hugetlb controller, even if the kernel supports huge pages.
	HugepageSizes []string

	SwapAccounting    bool // a container's cgroup has a swap limit
	RecursiveReadOnly bool // mount_setattr(2) with AT_RECURSIVE, Linux 5.12
	// UserNamespaces reports that pods can have user namespaces, with ID-mapped root filesystems
	// and volumes. NoUserNamespaces is the reason for false. See WithUserNamespaces.
	UserNamespaces   bool
	NoUserNamespaces string

	RootShared bool // "/" is a shared mount, so later mounts of kubelet propagate to existing namespaces
}

// WithUserNamespaces returns the facts with the result of probing user namespaces; nil means
// success. Detect does not probe them, because the probe needs directories of the daemon.
func (f Facts) WithUserNamespaces(err error) Facts {
	f.UserNamespaces, f.NoUserNamespaces = err == nil, ""
	if err != nil {
		f.NoUserNamespaces = err.Error()
	}
	return f
}

// Detect reads the facts. root is the directory that contains proc and sys: "/", or a directory of
// a test. A missing file means that the feature is absent. Detect fails if a file is unreadable or
// malformed, and names the file.
func Detect(root string) (Facts, error) {
	var f Facts
	d := detector{root: root}
	mounts, err := d.mounts()
	if err != nil {
		return f, err
	}
	for _, step := range []func(*Facts, []*mountinfo.Info) error{
		d.kernel, d.security, d.capabilities, d.oomScore, d.cgroup, d.hugepages, d.swap, d.mountFeatures,
	} {
		if err := step(&f, mounts); err != nil {
			return Facts{}, err
		}
	}
	return f, nil
}

type detector struct{ root string }

func (d detector) path(p string) string { return filepath.Join(d.root, p) }

func (d detector) exists(p string) bool {
	_, err := os.Stat(d.path(p))
	return err == nil
}

// read returns the trimmed content of a small file below root, or "" if it does not exist.
func (d detector) read(p string) (string, error) {
	b, err := os.ReadFile(d.path(p))
	if os.IsNotExist(err) {
		return "", nil
	}
	if err != nil {
		return "", fmt.Errorf("detect host: %w", err)
	}
	return strings.TrimSpace(string(b)), nil
}

func (d detector) mounts() ([]*mountinfo.Info, error) {
	return readMounts(d.path("/proc/self/mountinfo"), nil)
}

func readMounts(path string, filter mountinfo.FilterFunc) ([]*mountinfo.Info, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("read mounts: %w", err)
	}
	defer f.Close()
	mounts, err := mountinfo.GetMountsFromReader(f, filter)
	if err != nil {
		return nil, fmt.Errorf("read mounts from %s: %w", path, err)
	}
	return mounts, nil
}

func (d detector) kernel(f *Facts, _ []*mountinfo.Info) (err error) {
	if f.Kernel, err = d.read("/proc/sys/kernel/osrelease"); err != nil {
		return err
	}
	if _, err := fmt.Sscanf(f.Kernel, "%d.%d", &f.KernelMajor, &f.KernelMinor); err != nil {
		return fmt.Errorf("detect host: kernel release %q: %w", f.Kernel, err)
	}
	f.Hostname, err = d.read("/proc/sys/kernel/hostname")
	return err
}

func (d detector) security(f *Facts, _ []*mountinfo.Info) error {
	// Both files exist if the kernel has CONFIG_SECCOMP_FILTER. actions_avail exists since Linux
	// 4.14.
	f.Seccomp = d.exists("/proc/sys/kernel/seccomp/actions_avail")
	enabled, err := d.read("/sys/module/apparmor/parameters/enabled")
	if err != nil {
		return err
	}
	f.AppArmor = strings.HasPrefix(enabled, "Y") && d.exists("/sys/kernel/security/apparmor")
	f.SELinux = d.exists("/sys/fs/selinux/enforce")
	return nil
}

func (d detector) capabilities(f *Facts, _ []*mountinfo.Info) error {
	status, err := d.read("/proc/self/status")
	if err != nil {
		return err
	}
	permitted, err := capabilitySet(status, "CapPrm:")
	if err != nil {
		return err
	}
	bounding, err := capabilitySet(status, "CapBnd:")
	if err != nil {
		return err
	}
	for _, c := range capability.ListKnown() {
		if permitted&bounding&(1<<uint(c)) != 0 {
			f.Capabilities = append(f.Capabilities, "CAP_"+strings.ToUpper(c.String()))
		}
	}
	return nil
}

// capabilitySet returns the bit mask with the given key in the text of /proc/PID/status.
func capabilitySet(status, key string) (uint64, error) {
	for line := range strings.Lines(status) {
		if value, ok := strings.CutPrefix(line, key); ok {
			set, err := strconv.ParseUint(strings.TrimSpace(value), 16, 64)
			if err != nil {
				return 0, fmt.Errorf("detect host: %s in /proc/self/status: %w", key, err)
			}
			return set, nil
		}
	}
	return 0, fmt.Errorf("detect host: no %s in /proc/self/status", key)
}

func (d detector) oomScore(f *Facts, _ []*mountinfo.Info) error {
	own, err := d.read("/proc/self/oom_score_adj")
	if err != nil {
		return err
	}
	n, err := strconv.Atoi(own)
	if err != nil {
		return fmt.Errorf("detect host: /proc/self/oom_score_adj: %w", err)
	}
	f.OOMScoreAdjMin = n
	for _, c := range f.Capabilities {
		if c == "CAP_SYS_RESOURCE" {
			f.OOMScoreAdjMin = -1000
		}
	}
	return nil
}

const cgroupRoot = "/sys/fs/cgroup"

func (d detector) cgroup(f *Facts, mounts []*mountinfo.Info) error {
	for _, m := range mounts { // if several mounts are on one directory, the last is on top
		if m.Mountpoint == cgroupRoot {
			f.CgroupV2 = m.FSType == "cgroup2"
			f.NSDelegate = f.CgroupV2 && slices.Contains(strings.Split(m.VFSOptions, ","), "nsdelegate")
		}
	}
	return nil
}

// CgroupOptions returns the options of the node's cgroup v2 filesystem, without rw or ro. They
// belong to the filesystem, not to one mount. SELinux adds options of its own.
func CgroupOptions() (options []string, err error) {
	mounts, err := mountinfo.GetMounts(mountinfo.FSTypeFilter("cgroup2"))
	if err != nil {
		return nil, fmt.Errorf("list mounts: %w", err)
	}
	for _, m := range mounts {
		for o := range strings.SplitSeq(m.VFSOptions, ",") {
			if o != "rw" && o != "ro" && !slices.Contains(options, o) {
				options = append(options, o)
			}
		}
	}
	return options, nil
}

// v1Controller returns the mount point of a cgroup v1 controller, or "" if it is not mounted.
func v1Controller(mounts []*mountinfo.Info, name string) string {
	for _, m := range mounts {
		if m.FSType != "cgroup" {
			continue
		}
		for option := range strings.SplitSeq(m.VFSOptions, ",") {
			if option == name {
				return m.Mountpoint
			}
		}
	}
	return ""
}

func (d detector) hugepages(f *Facts, mounts []*mountinfo.Info) error {
	limited := v1Controller(mounts, "hugetlb") != ""
	if f.CgroupV2 {
		controllers, err := d.read(cgroupRoot + "/cgroup.controllers")
		if err != nil {
			return err
		}
		limited = strings.Contains(" "+controllers+" ", " hugetlb ")
	}
	if !limited {
		return nil
	}
	dirs, err := filepath.Glob(d.path("/sys/kernel/mm/hugepages/hugepages-*kB"))
	if err != nil {
		return fmt.Errorf("detect host: list hugepage sizes: %w", err)
	}
	for _, dir := range dirs {
		digits := strings.TrimSuffix(strings.TrimPrefix(filepath.Base(dir), "hugepages-"), "kB")
		kb, err := strconv.ParseUint(digits, 10, 64)
		if err != nil {
			return fmt.Errorf("detect host: hugepage size of %s: %w", dir, err)
		}
		f.HugepageSizes = append(f.HugepageSizes, hugepageSize(kb))
	}
	return nil
}

// hugepageSize formats a page size like the hugetlb controller's file names: in the largest unit
// that fits (mm/hugetlb_cgroup.c, mem_fmt).
func hugepageSize(kb uint64) string {
	switch {
	case kb >= 1<<20:
		return strconv.FormatUint(kb>>20, 10) + "GB"
	case kb >= 1<<10:
		return strconv.FormatUint(kb>>10, 10) + "MB"
	}
	return strconv.FormatUint(kb, 10) + "KB"
}

func (d detector) swap(f *Facts, mounts []*mountinfo.Info) error {
	if !f.CgroupV2 {
		dir := v1Controller(mounts, "memory")
		f.SwapAccounting = dir != "" && d.exists(dir+"/memory.memsw.limit_in_bytes")
		return nil
	}
	// The root cgroup never has memory.swap.max. Check this process's cgroup, or a child of the
	// root.
	own, err := d.read("/proc/self/cgroup")
	if err != nil {
		return err
	}
	dir := ""
	for line := range strings.Lines(own) {
		if p, ok := strings.CutPrefix(line, "0::"); ok {
			dir = strings.TrimSpace(p)
		}
	}
	if d.exists(filepath.Join(cgroupRoot, dir, "memory.swap.max")) {
		f.SwapAccounting = true
		return nil
	}
	found, err := filepath.Glob(d.path(cgroupRoot + "/*/memory.swap.max"))
	if err != nil {
		return fmt.Errorf("detect host: look for memory.swap.max: %w", err)
	}
	f.SwapAccounting = len(found) > 0
	return nil
}

func (d detector) mountFeatures(f *Facts, mounts []*mountinfo.Info) error {
	for _, m := range mounts {
		if m.Mountpoint == "/" {
			f.RootShared = hasTag(m, "shared:")
		}
	}
	f.RecursiveReadOnly = f.KernelMajor > 5 || f.KernelMajor == 5 && f.KernelMinor >= 12
	if d.root == "/" {
		// The system call has no effect, because the file is invalid. Any error but ENOSYS comes
		// from the system call. ENOSYS comes from an older kernel or from a seccomp filter.
		err := unix.MountSetattr(-1, "", unix.AT_EMPTY_PATH, &unix.MountAttr{})
		f.RecursiveReadOnly = err != unix.ENOSYS
	}
	return nil
}

// hasTag reports whether a mount has an optional field such as "shared:" or "master:".
func hasTag(m *mountinfo.Info, tag string) bool {
	for field := range strings.FieldsSeq(m.Optional) {
		if strings.HasPrefix(field, tag) {
			return true
		}
	}
	return false
}
