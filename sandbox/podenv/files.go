package podenv

import (
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/internal/errdefs"
	"berth/internal/failpoint"
	"berth/internal/safefs"
	"berth/oci"
	"berth/sandbox/state"
)

// files creates the files of one pod.
type files struct {
	*state.PodSpec
	Dirs state.Dirs
	log  *slog.Logger
}

// make creates the pod's files in /etc and /dev/shm except /etc/hosts, and its log directory.
// hostResolvConf returns the path of the node's resolv.conf, which may change at any time.
func (p files) make(hostResolvConf func() string) error {
	failpoint.Reach("pod.make-files")
	if err := os.MkdirAll(p.Dirs.PodFiles(p.ID), 0o700); err != nil {
		return fmt.Errorf("make files of pod %s: %w", p.ID, err)
	}
	failpoint.Reach("pod.directory-made")
	resolv, err := p.resolvConf(hostResolvConf)
	if err != nil {
		return err
	}
	host, err := hostname(p.Config)
	if err != nil {
		return err
	}
	name, err := formatHostname(host)
	if err != nil {
		return err
	}
	if err := p.mountTmpfs(); err != nil {
		return err
	}
	if err := p.writeFiles(map[string][]byte{"resolv.conf": resolv, "hostname": name}); err != nil {
		return err
	}
	if logs := p.Config.GetLogDirectory(); logs != "" {
		failpoint.Reach("pod.make-logs")
		if err := os.MkdirAll(logs, 0o755); err != nil {
			return fmt.Errorf("make log directory of pod %s: %w", p.ID, err)
		}
		failpoint.Reach("pod.logs-made")
	}
	return nil
}

// resolvConf returns the pod's resolv.conf. It reads the node's file only when the pod uses it.
func (p files) resolvConf(hostFile func() string) (_ []byte, err error) {
	var host []byte
	dns := p.Config.GetDnsConfig()
	if usesHostDNS(dns) {
		if host, err = readCapped(hostFile()); err != nil {
			return nil, err
		}
	}
	file, dropped, err := formatResolvConf(dns, host)
	if len(dropped) > 0 {
		m := p.Config.GetMetadata()
		p.log.Warn("the pod's DNS config has words that resolv.conf cannot hold; they are left out",
			"namespace", errdefs.Clip(m.GetNamespace()), "podName", errdefs.Clip(m.GetName()), "pod", p.ID,
			"words", errdefs.Clip(fmt.Sprintf("%q", dropped)))
	}
	return file, err
}

// writeHosts writes the default /etc/hosts with the pod's addresses.
func (p files) writeHosts(addresses []string) error {
	hosts, err := p.hosts(addresses)
	if err != nil {
		return err
	}
	return p.writeFiles(map[string][]byte{"hosts": hosts})
}

func (p files) hosts(addresses []string) ([]byte, error) {
	if state.HostNetwork(p.Config) {
		return readCapped("/etc/hosts")
	}
	host, err := hostname(p.Config)
	if err != nil {
		return nil, err
	}
	var ips []netip.Addr
	for _, s := range addresses {
		ip, err := netip.ParseAddr(s)
		if err != nil {
			return nil, fmt.Errorf("address of pod %s: %w", p.ID, err)
		}
		ips = append(ips, ip)
	}
	return formatHosts(host, ips)
}

// hostname returns the pod's hostname, or the node's if the pod has no hostname. A new UTS
// namespace starts with the node's name, and a pod on the node's network shares the node's. The
// kernel accepts any bytes as a name, such as "(none)". A name that does not fit into the files
// must not fail the pod, so nodeName replaces it.
func hostname(config *runtimeapi.PodSandboxConfig) (string, error) {
	if name := config.GetHostname(); name != "" && !state.HostNetwork(config) {
		return name, oci.CheckHostname(name)
	}
	return nodeName(os.Hostname())
}

func nodeName(name string, err error) (string, error) {
	if err == nil && oci.CheckHostname(name) != nil {
		return "localhost", nil
	}
	return name, err
}

const (
	// shmSize is the size of a pod's tmpfs in bytes. Other runtimes give /dev/shm 64 MiB, too.
	shmSize = 64 << 20
	// etcSize is the size of the tmpfs of a pod that uses the node's IPC namespace and /dev/shm.
	etcSize = 4 << 20
)

// mountTmpfs mounts the pod's tmpfs and creates its directories.
func (p files) mountTmpfs() error {
	place, size := p.Dirs.Tmpfs(p.ID), shmSize
	failpoint.Reach("tmpfs.make")
	if err := os.MkdirAll(place, 0o700); err != nil {
		return fmt.Errorf("make tmpfs of pod %s: %w", p.ID, err)
	}
	failpoint.Reach("tmpfs.place-made")
	dirs := map[string]os.FileMode{p.Dirs.Etc(p.ID): 0o755, p.Dirs.Shm(p.ID): 0o777 | os.ModeSticky}
	if state.HostIPC(p.Config) {
		size = etcSize
		delete(dirs, p.Dirs.Shm(p.ID))
	}
	options := fmt.Sprintf("mode=0755,size=%d", size)
	if l := p.Labels.Mount; l != "" {
		options += fmt.Sprintf(",context=%q", l)
	}
	if err := unix.Mount("shm", place, "tmpfs", unix.MS_NOEXEC|unix.MS_NOSUID|unix.MS_NODEV, options); err != nil {
		return fmt.Errorf("mount tmpfs of pod %s: %w", p.ID, err)
	}
	failpoint.Reach("tmpfs.mounted")
	for dir, mode := range dirs {
		if err := p.makeDir(dir, mode); err != nil {
			return fmt.Errorf("make tmpfs of pod %s: %w", p.ID, err)
		}
		failpoint.Reach("tmpfs.directory-made")
	}
	return nil
}

func (p files) makeDir(dir string, mode os.FileMode) error {
	if err := os.Mkdir(dir, mode); err != nil {
		return err
	}
	if err := os.Chmod(dir, mode); err != nil { // Mkdir applies the umask
		return err
	}
	return p.giveToRoot(dir)
}

// giveToRoot makes the root user of the pod's user namespace the owner of path.
func (p files) giveToRoot(path string) error {
	if p.Mappings == nil {
		return nil
	}
	return os.Chown(path, int(p.Mappings.HostUID(0)), int(p.Mappings.HostGID(0)))
}

// unmountTmpfs unmounts the pod's tmpfs and removes its mount points. Running containers keep their
// view. It may be repeated.
func unmountTmpfs(dirs state.Dirs, podID string) error {
	for _, place := range []string{dirs.Tmpfs(podID), dirs.OldShm(podID)} {
		failpoint.Reach("tmpfs.unmount")
		err := unix.Unmount(place, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW)
		if err != nil && err != unix.EINVAL && err != unix.ENOENT { // EINVAL: not mounted; ENOENT: no mount point
			return fmt.Errorf("unmount tmpfs of pod %s: %w", podID, err)
		}
		failpoint.Reach("tmpfs.unmounted")
	}
	for _, dir := range []string{dirs.Tmpfs(podID), dirs.OldShm(podID), dirs.PodMounts(podID)} {
		if err := os.Remove(dir); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("remove tmpfs of pod %s: %w", podID, err)
		}
		failpoint.Reach("tmpfs.directory-removed")
	}
	return nil
}

// writeFiles writes small files with mode 0644, because containers of any user read them.
func (p files) writeFiles(contents map[string][]byte) error {
	for name, data := range contents {
		path := filepath.Join(p.Dirs.Etc(p.ID), name)
		failpoint.Reach("pod.write-file")
		if err := errors.Join(os.WriteFile(path, data, 0o644), p.giveToRoot(path)); err != nil {
			return fmt.Errorf("write pod file: %w", err)
		}
		failpoint.Reach("pod.file-written")
	}
	return nil
}

// readCapped reads a file of the host, up to 1 MiB. A missing file is empty.
func readCapped(path string) ([]byte, error) {
	const limit = 1 << 20
	data, err := safefs.ReadHostFile(path, limit)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil, nil
	case errors.Is(err, safefs.ErrNotRegular), errors.Is(err, safefs.ErrTooLarge):
		return nil, errdefs.FailedPrecondition("%s on the host is not a regular file of at most %d bytes", path, limit)
	case err != nil:
		return nil, fmt.Errorf("read host file: %w", err)
	}
	return data, nil
}
