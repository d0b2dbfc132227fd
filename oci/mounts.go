package oci

import (
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"path"
	"slices"
	"strings"

	"github.com/opencontainers/runtime-spec/specs-go"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
	crierrors "k8s.io/cri-api/pkg/errors"

	"berth/internal/errdefs"
)

// setMounts sets the container's mounts: the kernel's filesystems, the anonymous volumes, then the
// pod's files and the CRI config's mounts, parents before children. A CRI mount replaces a default
// mount at the same path, and the kernel's filesystems below this path.
func setMounts(in ContainerInput, spec *specs.Spec) error {
	var given []specs.Mount
	for i, m := range in.Config.GetMounts() {
		mount, err := givenMount(in, i)
		if err != nil {
			return err
		}
		given = append(given, mount)
		raiseRootPropagation(m.GetPropagation(), spec)
	}
	files, err := podFiles(in)
	if err != nil {
		return err
	}
	for _, m := range kernelMounts(in) {
		if !slices.ContainsFunc(given, func(g specs.Mount) bool { return isBelow(m.Destination, g.Destination) }) {
			spec.Mounts = append(spec.Mounts, m)
		}
	}
	spec.Mounts = append(spec.Mounts, volumeMounts(in)...)
	binds := given
	for _, m := range files {
		if !slices.ContainsFunc(given, func(g specs.Mount) bool { return g.Destination == m.Destination }) {
			binds = append(binds, m)
		}
	}
	slices.SortStableFunc(binds, func(a, b specs.Mount) int {
		return strings.Count(a.Destination, "/") - strings.Count(b.Destination, "/")
	})
	spec.Mounts = append(spec.Mounts, binds...)
	return nil
}

// isBelow reports whether the clean path p is dir or lies below it.
func isBelow(p, dir string) bool { return p == dir || strings.HasPrefix(p, dir+"/") }

// kernelMounts returns the filesystems of every container, as in containerd. Privileged containers
// may write to /sys and their cgroup.
func kernelMounts(in ContainerInput) []specs.Mount {
	access := "ro"
	if in.security().GetPrivileged() {
		access = "rw"
	}
	return []specs.Mount{
		procMount(),
		devMount(),
		{Destination: "/dev/pts", Type: "devpts", Source: "devpts",
			// Group 5 is tty on all distributions.
			Options: []string{"nosuid", "noexec", "newinstance", "ptmxmode=0666", "mode=0620", "gid=5"}},
		{Destination: "/dev/mqueue", Type: "mqueue", Source: "mqueue", Options: []string{"nosuid", "noexec", "nodev"}},
		sysMount(in, access),
		cgroupMount(in, access),
	}
}

// cgroupMount returns the mount of cgroups. A mount of cgroup v2 in the node's cgroup namespace
// sets the options of the whole node, so it repeats the node's options. Security modules set their
// options by themselves.
func cgroupMount(in ContainerInput, access string) specs.Mount {
	if WritableCgroups(in.security()) {
		access = "rw"
	}
	options := []string{"nosuid", "noexec", "nodev", "relatime", access}
	if !in.ownCgroupNamespace() {
		for _, o := range in.Host.CgroupOptions {
			if o != "seclabel" && !strings.Contains(o, "=") { // rootcontext=… and the like
				options = append(options, o)
			}
		}
	}
	return specs.Mount{Destination: "/sys/fs/cgroup", Type: "cgroup", Source: "cgroup", Options: options}
}

func procMount() specs.Mount {
	return specs.Mount{Destination: "/proc", Type: "proc", Source: "proc", Options: []string{"nosuid", "noexec", "nodev"}}
}

func devMount() specs.Mount {
	return specs.Mount{Destination: "/dev", Type: "tmpfs", Source: "tmpfs",
		Options: []string{"nosuid", "strictatime", "mode=755", "size=65536k"}}
}

// podFiles returns the mounts of files that all containers of a pod share.
func podFiles(in ContainerInput) ([]specs.Mount, error) {
	access := "rw"
	if in.security().GetReadonlyRootfs() {
		access = "ro"
	}
	var mounts []specs.Mount
	for _, f := range []struct{ dest, source string }{
		{"/etc/hostname", in.Pod.Hostname},
		{"/etc/hosts", in.Pod.Hosts},
		{"/etc/resolv.conf", in.Pod.ResolvConf},
	} {
		if f.source != "" {
			mount := specs.Mount{Destination: f.dest, Type: "bind", Source: f.source,
				Options: []string{"rbind", "rprivate", "nosuid", "nodev", "noexec", access}}
			if in.Pod.Mappings != nil && !in.Pod.OwnsFiles { // otherwise the pod's root owns them
				mount.Options = append(mount.Options, idMapOption)
			}
			mounts = append(mounts, mount)
		}
	}
	shm := specs.Mount{Destination: "/dev/shm", Type: "bind", Source: in.Pod.Shm,
		Options: []string{"rbind", "rprivate", "nosuid", "nodev", "noexec", "rw"}}
	if in.Pod.hostIPC() {
		shm.Source = "/dev/shm"
		shm.Options = []string{"rbind", "rprivate", "nosuid", "nodev", "rw"}
	}
	if shm.Source == "" {
		return nil, errdefs.Internal("pod %s: path of its /dev/shm is missing", in.Pod.ID)
	}
	return append(mounts, shm), nil
}

// raiseRootPropagation sets the propagation that the mounts on the container's root need.
// libcontainer's default is rslave.
func raiseRootPropagation(p runtimeapi.MountPropagation, spec *specs.Spec) {
	switch p {
	case runtimeapi.MountPropagation_PROPAGATION_BIDIRECTIONAL:
		spec.Linux.RootfsPropagation = "rshared"
	case runtimeapi.MountPropagation_PROPAGATION_HOST_TO_CONTAINER:
		if spec.Linux.RootfsPropagation == "" {
			spec.Linux.RootfsPropagation = "rslave"
		}
	}
}

// givenMount converts the i-th mount of the CRI config. Its source is a host path or an image.
func givenMount(in ContainerInput, i int) (specs.Mount, error) {
	m := in.Config.GetMounts()[i]
	dest, err := mountDestination(m)
	if err != nil {
		return specs.Mount{}, err
	}
	find := hostSource
	if IsImageVolume(m) {
		find = imageSource
	}
	source, propagation, err := find(in, i)
	if err != nil {
		return specs.Mount{}, err
	}
	access, err := accessOption(m, in.Host)
	if err != nil {
		return specs.Mount{}, err
	}
	if err := checkMountOptions(m); err != nil {
		return specs.Mount{}, err
	}
	options := append([]string{"rbind", propagation, access}, m.GetMountOptions()...)
	mount := specs.Mount{Destination: dest, Type: "bind", Source: source, Options: options}
	return mount, mapMount(m, in.Pod, &mount)
}

// hostSource returns the host path of the i-th mount and its propagation option.
func hostSource(in ContainerInput, i int) (source, propagation string, err error) {
	m := in.Config.GetMounts()[i]
	if m.GetImageSubPath() != "" {
		return "", "", errdefs.InvalidArgument("mount of %s: image_sub_path without image", m.GetContainerPath())
	}
	if source, err = mountSource(m, in.Files); err != nil {
		return "", "", err
	}
	propagation, err = propagationOption(m, source, in.Files)
	return source, propagation, err
}

func checkMountOptions(m *runtimeapi.Mount) error {
	for _, o := range m.GetMountOptions() {
		if !mountOptions[o] {
			return errdefs.InvalidArgument("mount of %s: unknown mount option %q, known are %s",
				m.GetContainerPath(), o, strings.Join(slices.Sorted(maps.Keys(mountOptions)), ", "))
		}
	}
	return nil
}

// mountOptions are the flags that mount_options may set (KEP-5855; kubelet sends the first three).
// Like the runtime-spec's options they apply to the volume itself, not to mounts below it. Options
// that other fields control (bind, ro, propagation) are refused, and so are options that remove a
// protection.
var mountOptions = map[string]bool{
	"nodev": true, "noexec": true, "nosuid": true, "nosymfollow": true,
	"noatime": true, "nodiratime": true, "relatime": true, "strictatime": true,
}

func mountDestination(m *runtimeapi.Mount) (string, error) {
	dest := m.GetContainerPath()
	if !path.IsAbs(dest) || strings.IndexByte(dest, 0) >= 0 {
		return "", errdefs.InvalidArgument("mount: container_path %q is not an absolute path", dest)
	}
	clean := path.Clean(dest)
	if clean == "/" {
		return "", errdefs.InvalidArgument("mount: container_path %q is the root", dest)
	}
	return clean, nil
}

// mountSource follows the symbolic links of host_path on the host, because the CRI requires that.
// The caller creates missing paths.
func mountSource(m *runtimeapi.Mount, files Files) (string, error) {
	source := m.GetHostPath()
	if !path.IsAbs(source) || strings.IndexByte(source, 0) >= 0 {
		return "", errdefs.InvalidArgument("mount of %s: host_path %q is not an absolute path", m.GetContainerPath(), source)
	}
	resolved, err := files.Resolve(source)
	if errors.Is(err, fs.ErrNotExist) {
		return "", errdefs.InvalidArgument("mount of %s: host_path %s does not exist", m.GetContainerPath(), source)
	}
	if errdefs.IsBadPath(err) {
		return "", errdefs.InvalidArgument("mount of %s: host_path %.300q: %w", m.GetContainerPath(), source, err)
	}
	if err != nil {
		return "", fmt.Errorf("mount of %s: resolve host_path %s: %w", m.GetContainerPath(), source, err)
	}
	return resolved, nil
}

// propagationOption checks that the source supports the propagation.
func propagationOption(m *runtimeapi.Mount, source string, files Files) (string, error) {
	var option string
	switch m.GetPropagation() {
	case runtimeapi.MountPropagation_PROPAGATION_PRIVATE:
		return "rprivate", nil
	case runtimeapi.MountPropagation_PROPAGATION_HOST_TO_CONTAINER:
		option = "rslave"
	case runtimeapi.MountPropagation_PROPAGATION_BIDIRECTIONAL:
		option = "rshared"
	default:
		return "", errdefs.InvalidArgument("mount of %s: unknown propagation %d", m.GetContainerPath(), m.GetPropagation())
	}
	at, err := files.Propagation(source)
	if err != nil {
		return "", fmt.Errorf("mount of %s: propagation of %s: %w", m.GetContainerPath(), source, err)
	}
	if at.Shared || at.Slave && option == "rslave" {
		return option, nil
	}
	needed := "shared mount"
	if option == "rslave" {
		needed = "shared or slave mount"
	}
	// The text is containerd's, because people search for it.
	return "", errdefs.FailedPrecondition("mount of %s with %s: path %q is mounted on %q but it is not a %s",
		m.GetContainerPath(), m.GetPropagation(), source, at.Mountpoint, needed)
}

// accessOption returns ro or rw. For recursive read-only mounts (KEP-3857) it returns rro.
func accessOption(m *runtimeapi.Mount, host Host) (string, error) {
	switch {
	case !m.GetRecursiveReadOnly() && m.GetReadonly():
		return "ro", nil
	case !m.GetRecursiveReadOnly():
		return "rw", nil
	case !m.GetReadonly():
		return "", errdefs.InvalidArgument("mount of %s: recursive_read_only without readonly", m.GetContainerPath())
	case m.GetPropagation() != runtimeapi.MountPropagation_PROPAGATION_PRIVATE:
		return "", errdefs.InvalidArgument("mount of %s: recursive_read_only with propagation %s",
			m.GetContainerPath(), m.GetPropagation())
	case !host.RecursiveReadOnly:
		return "", errdefs.FailedPrecondition("%w: mount of %s: kernel %s or the runtime handler has no recursive "+
			"read-only mounts (Linux 5.12)",
			crierrors.ErrRROUnsupported, m.GetContainerPath(), host.Kernel)
	}
	return "rro", nil
}

// absolutePaths checks a list of paths inside the container.
func absolutePaths(field string, paths []string) ([]string, error) {
	for _, p := range paths {
		if !path.IsAbs(p) || strings.IndexByte(p, 0) >= 0 {
			return nil, errdefs.InvalidArgument("%s: %q is not an absolute path", field, p)
		}
	}
	return slices.Clone(paths), nil
}

// RelabelSources returns the host paths that the caller must label with Mount of [confine.Labels]
// before launch: the sources of CRI mounts with selinux_relabel. It never returns the pod's files
// or other paths (CVE-2021-43816).
func RelabelSources(config *runtimeapi.ContainerConfig, files Files) ([]string, error) {
	var sources []string
	for _, m := range config.GetMounts() {
		if !m.GetSelinuxRelabel() || IsImageVolume(m) { // containers share the image's layers
			continue
		}
		source, err := mountSource(m, files)
		if err != nil {
			return nil, err
		}
		sources = append(sources, source)
	}
	return sources, nil
}
