package nodecheck

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"

	"golang.org/x/sys/unix"

	"berth/image/erofs"
	"berth/internal/diskusage"
	"berth/internal/jail"
	"berth/internal/rootfs"
	"berth/sandbox/ownership"
	"berth/sandbox/state"
)

// With less free space kubelet evicts pods (imagefs.available 15 %, nodefs.inodesFree 5 %), or
// pulls fail.
const (
	leastRoom   = 15 // percent
	leastInodes = 5  // percent
)

func checkDirectories(_ context.Context, n *Node) []Finding {
	findings := []Finding{n.checkPlaces(), n.checkRoom(), n.checkOverlay(), n.checkLayerDriver(), n.checkQuotas()}
	dir := nearest(n.Config.State)
	var st unix.Statfs_t
	if err := unix.Statfs(dir, &st); err == nil && st.Type != unix.TMPFS_MAGIC && st.Type != unix.RAMFS_MAGIC {
		findings = append(findings, lacking(Warning, "state directory", n.Config.State+" is not on a tmpfs",
			"put state below /run: what is in it must be gone after a reboot"))
	}
	return findings
}

// checkPlaces reports pods that run and that a daemon with these directories would end.
func (n *Node) checkPlaces() Finding {
	const subject = "root and state"
	if os.Geteuid() != 0 {
		return ok(subject, "not compared with the pods that run, because only root can see them")
	}
	dirs := state.Dirs{Root: n.Config.Root, State: n.Config.State, NetNSs: n.Config.NetNSDir}
	if err := ownership.Check(dirs); err != nil {
		return lacking(Failure, subject, err.Error(), "mount the right root, or correct root and state")
	}
	return ok(subject, "no pod of another directory runs")
}

// nearest returns the directory or its nearest existing ancestor.
func nearest(dir string) string {
	for {
		if _, err := os.Stat(dir); err == nil || dir == "/" {
			return dir
		}
		dir = filepath.Dir(dir)
	}
}

func (n *Node) checkRoom() Finding {
	subject := "room in " + n.Config.Root
	var st unix.Statfs_t
	if err := unix.Statfs(nearest(n.Config.Root), &st); err != nil {
		return lacking(Failure, subject, err.Error(), "create the directory")
	}
	room, inodes := percent(st.Bavail, st.Blocks), percent(st.Ffree, st.Files)
	found := fmt.Sprintf("%d %% of space and %d %% of inodes free", room, inodes)
	if room < leastRoom || inodes < leastInodes {
		return lacking(Warning, subject, found,
			fmt.Sprintf("free some space: kubelet evicts pods below %d %% of space, %d %% of inodes",
				leastRoom, leastInodes))
	}
	return ok(subject, "%s", found)
}

// checkQuotas reports whether writable layers can have a hard limit.
func (n *Node) checkQuotas() Finding {
	const subject = "project quotas"
	quotas, err := diskusage.OpenQuotas(nearest(filepath.Join(n.Config.Root, "rootfs")))
	if err == nil {
		err = quotas.Close()
	}
	switch limited := n.Config.WritableLayerLimit > 0; {
	case err == nil && limited:
		return ok(subject, "writable layers are limited to %d bytes each", n.Config.WritableLayerLimit)
	case err == nil:
		return ok(subject, "on: disk.writable_layer_limit can be set")
	case errors.Is(err, diskusage.ErrNoQuotas) && !limited:
		return ok(subject, "off: writable layers have no hard limit, kubelet evicts by their usage")
	default:
		return lacking(
			Failure,
			subject,
			err.Error(),
			"mount the filesystem of "+n.Config.Root+" with prjquota (XFS; ext4 with the features project and quota), or unset disk.writable_layer_limit",
		)
	}
}

// percent returns 100 if the filesystem does not count, as btrfs does not count inodes.
func percent(part, whole uint64) uint64 {
	if whole == 0 {
		return 100
	}
	return part * 100 / whole
}

// checkOverlay mounts a root filesystem like a container's, in the same directory, without
// attaching it.
func (n *Node) checkOverlay() Finding {
	const subject = "container root filesystems"
	err := tryOverlay(nearest(n.Config.Root))
	if err != nil {
		return lacking(Failure, subject, err.Error(),
			"put root on a file system that can be overlayfs' upper layer: ext4, or XFS with ftype=1; not on an overlay")
	}
	return ok(subject, "overlayfs works on %s", nearest(n.Config.Root))
}

// checkLayerDriver determines how layers would be stored.
func (n *Node) checkLayerDriver() Finding {
	const subject = "layers of images"
	if n.Config.LayerDriver == string(rootfs.Directory) {
		return ok(subject, "kept as directories")
	}
	err := erofs.Probe(nearest(n.Config.Root))
	switch {
	case err == nil:
		return ok(subject, "kept as EROFS images")
	case n.Config.LayerDriver == string(rootfs.EROFS):
		return lacking(Failure, subject, err.Error(),
			"run Linux 6.15 or later, with root on a file system other than a tmpfs; or set image.layer_driver to auto")
	}
	return ok(subject, "kept as directories: %v", err)
}

func tryOverlay(dir string) (err error) {
	dir, err = os.MkdirTemp(dir, ".berth-check-")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	spec := rootfs.Spec{Upper: filepath.Join(dir, "upper"), Work: filepath.Join(dir, "work")}
	for _, layer := range []string{"lower", "upper", "work"} {
		if err := os.Mkdir(filepath.Join(dir, layer), 0o755); err != nil {
			return err
		}
	}
	spec.Layers = []rootfs.Layer{{Kind: rootfs.Directory, Path: filepath.Join(dir, "lower")}}
	mount, err := spec.Mount()
	if err != nil {
		return err
	}
	return mount.Close()
}

func checkPropagation(_ context.Context, n *Node) []Finding {
	if n.Facts.RootShared {
		return []Finding{ok("mount propagation", "/ is shared")}
	}
	return []Finding{lacking(
		Warning,
		"mount propagation",
		"/ is a private mount",
		"mount --make-rshared / at boot, as systemd does: without it volumes with mount propagation fail, and containers start slower",
	)}
}

func checkSecurityModules(_ context.Context, n *Node) []Finding {
	var findings []Finding
	if n.Facts.AppArmor {
		findings = append(findings, n.checkAppArmor())
	}
	if n.Facts.SELinux {
		findings = append(findings, n.checkSELinux())
	}
	if len(findings) == 0 {
		findings = append(
			findings,
			lacking(
				Warning,
				"security module",
				"neither AppArmor nor SELinux",
				"boot a kernel with lsm=apparmor or SELinux: it restricts containers in addition to namespaces and seccomp",
			),
		)
	}
	return findings
}

func (n *Node) checkAppArmor() Finding {
	for _, path := range []string{"/sbin/apparmor_parser", "/usr/sbin/apparmor_parser", "/usr/bin/apparmor_parser"} {
		if n.exists(path) {
			return ok("AppArmor", "enabled")
		}
	}
	return lacking(Warning, "AppArmor", "enabled, but apparmor_parser is not installed",
		"install the package apparmor: without it the default profile cannot be loaded")
}

func (n *Node) checkSELinux() Finding {
	for _, path := range []string{"/etc/selinux/targeted/contexts/lxc_contexts",
		"/etc/selinux/default/contexts/lxc_contexts", "/usr/share/containers/selinux/contexts"} {
		if n.exists(path) {
			return ok("SELinux", "enabled")
		}
	}
	return lacking(Warning, "SELinux", "enabled, but no policy for containers is installed", "install container-selinux")
}

// programAt returns why a program cannot be executed, or nil.
func programAt(path string) error {
	info, err := os.Stat(path)
	if err != nil {
		return err
	}
	if !info.Mode().IsRegular() || info.Mode().Perm()&0o111 == 0 {
		return &fs.PathError{Op: "execute", Path: path, Err: fs.ErrPermission}
	}
	return nil
}

func checkPrograms(_ context.Context, n *Node) []Finding {
	return append(checkConfinement(runtime.GOARCH),
		checkProgram("berth-shim", "shim_path", n.Shim, n.ShimError),
		checkProgram("berth-unpack", "unpack_path", n.Unpack, n.UnpackError),
		checkProgram("berth-stream", "stream.path", n.Stream, n.StreamError),
	)
}

// checkConfinement reports which restrictions of berth-unpack an architecture lacks.
func checkConfinement(arch string) []Finding {
	if jail.FiltersCalls(arch) {
		return nil
	}
	return []Finding{lacking(Warning, "berth-unpack", "may make any system call: no filter exists for "+arch,
		"pull only images that you trust, or use amd64 or arm64")}
}

func checkProgram(name, option, path string, err error) Finding {
	if err == nil {
		err = programAt(path)
	}
	if err != nil {
		return lacking(Failure, name, err.Error(), fmt.Sprintf("install %s beside berth, or set %s", name, option))
	}
	return ok(name, "%s", path)
}
