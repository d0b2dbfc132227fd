// Package podfiles makes what a pod's containers share of files: resolv.conf, hostname and hosts,
// /dev/shm, the folder of their logs.
//
// # Contract
//
// The contents are package dnsfiles'; here they are written, for everybody to read. All places
// follow from the pod's ID (package layout), and what is left of an interrupted Make is removed with them. Files of
// the node are read up to a limit.
package podfiles

import (
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/internal/errdefs"
	"berth/internal/failpoint"
	"berth/internal/safefs"
	"berth/oci"
	"berth/sandbox/dnsfiles"
	"berth/sandbox/layout"
	"berth/sandbox/request"
)

// Pod is what the files are made from.
type Pod struct {
	Dirs       layout.Dirs
	ID         string
	Config     *runtimeapi.PodSandboxConfig
	MountLabel string // SELinux; empty: none
}

// Make makes what containers of the pod find in /etc and /dev/shm, but for /etc/hosts. hostResolvConf is the
// node's resolv.conf.
func (p Pod) Make(hostResolvConf string) error {
	dir := p.Dirs.PodFiles(p.ID)
	failpoint.Reach("pod.make-files")
	if err := os.MkdirAll(dir, 0o700); err != nil {
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
	name, err := dnsfiles.Hostname(host)
	if err != nil {
		return err
	}
	if err := writeFiles(dir, map[string][]byte{"resolv.conf": resolv, "hostname": name}); err != nil {
		return err
	}
	if logs := p.Config.GetLogDirectory(); logs != "" {
		failpoint.Reach("pod.make-logs")
		if err := os.MkdirAll(logs, 0o755); err != nil {
			return fmt.Errorf("make log directory of pod %s: %w", p.ID, err)
		}
		failpoint.Reach("pod.logs-made")
	}
	if request.HostIPC(p.Config) {
		return nil
	}
	return p.mountShm()
}

// resolvConf reads the node's only where it is what the pod gets.
func (p Pod) resolvConf(hostFile string) (_ []byte, err error) {
	var host []byte
	dns := p.Config.GetDnsConfig()
	if dnsfiles.WantsHosts(dns) {
		if host, err = readCapped(hostFile); err != nil {
			return nil, err
		}
	}
	return dnsfiles.ResolvConf(dns, host)
}

// WriteHosts makes the default /etc/hosts, with the pod's addresses; kubelet mounts its own over it.
func (p Pod) WriteHosts(addresses []string) error {
	hosts, err := p.hosts(addresses)
	if err != nil {
		return err
	}
	return writeFiles(p.Dirs.PodFiles(p.ID), map[string][]byte{"hosts": hosts})
}

func (p Pod) hosts(addresses []string) ([]byte, error) {
	if request.HostNetwork(p.Config) {
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
	return dnsfiles.Hosts(host, ips)
}

// hostname is the pod's. Without one it is the node's, which a new UTS namespace
// starts with; a pod on the node's network is in the node's UTS namespace. The kernel takes any bytes for a name,
// "(none)" to begin with: what can't be in a file of words is no reason not to run the pod.
func hostname(config *runtimeapi.PodSandboxConfig) (string, error) {
	if name := config.GetHostname(); name != "" && !request.HostNetwork(config) {
		return name, dnsfiles.CheckHostname(name)
	}
	return nodeName(os.Hostname())
}

func nodeName(name string, err error) (string, error) {
	if err == nil && dnsfiles.CheckHostname(name) != nil {
		return "localhost", nil
	}
	return name, err
}

// mountShm gives a pod its /dev/shm, 64 MiB as everywhere in the field.
func (p Pod) mountShm() error {
	dir := p.Dirs.Shm(p.ID)
	failpoint.Reach("shm.make")
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return fmt.Errorf("make shm of pod %s: %w", p.ID, err)
	}
	failpoint.Reach("shm.place-made")
	mappings, err := oci.UserNamespace(p.Config)
	if err != nil {
		return err
	}
	options := "mode=1777,size=67108864"
	if mappings != nil { // the pod's root owns it, as in other pods
		options += fmt.Sprintf(",uid=%d,gid=%d", mappings.HostUID(0), mappings.HostGID(0))
	}
	if l := p.MountLabel; l != "" {
		options += fmt.Sprintf(",context=%q", l)
	}
	err = unix.Mount("shm", dir, "tmpfs", unix.MS_NOEXEC|unix.MS_NOSUID|unix.MS_NODEV, options)
	if err != nil {
		return fmt.Errorf("mount shm of pod %s: %w", p.ID, err)
	}
	failpoint.Reach("shm.mounted")
	return nil
}

// RemoveShm takes away a pod's shm, and the folder it is in, which must be empty but for it.
// Containers that still have it keep their view. It may be repeated.
func RemoveShm(dirs layout.Dirs, podID string) error {
	failpoint.Reach("shm.unmount")
	err := unix.Unmount(dirs.Shm(podID), unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW)
	if err != nil && err != unix.EINVAL && err != unix.ENOENT { // not mounted, no such folder
		return fmt.Errorf("unmount shm of pod %s: %w", podID, err)
	}
	failpoint.Reach("shm.unmounted")
	for _, dir := range []string{dirs.Shm(podID), dirs.PodMounts(podID)} {
		if err := os.Remove(dir); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("remove shm of pod %s: %w", podID, err)
		}
		failpoint.Reach("shm.directory-removed")
	}
	return nil
}

// writeFiles writes small files, mode 0644: containers of any user read them.
func writeFiles(dir string, files map[string][]byte) error {
	for name, data := range files {
		failpoint.Reach("pod.write-file")
		if err := os.WriteFile(filepath.Join(dir, name), data, 0o644); err != nil {
			return fmt.Errorf("write pod file: %w", err)
		}
		failpoint.Reach("pod.file-written")
	}
	return nil
}

// readCapped reads a file of the host, at most 1 MiB. A file that does not exist is empty.
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
