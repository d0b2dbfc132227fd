package rootfs

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"berth/internal/cleanup"
	"berth/internal/userns"
)

// ProbeUserNamespace returns an error unless containers can run in user namespaces. The kernel must
// create such a namespace, and ProbeIDMap must succeed. userns.With runs the program holder.
func ProbeUserNamespace(holder, dir string) error {
	ids := []specs.LinuxIDMapping{{ContainerID: 0, HostID: 1 << 16, Size: 1 << 16}} // kubelet's first range
	mappings := userns.Mappings{UIDs: ids, GIDs: ids}
	return userns.With(holder, mappings, false, func(ns userns.Namespaces) error {
		return ProbeIDMap(dir, ns.User(), mappings)
	})
}

// ProbeIDMap returns an error unless root filesystems can be mapped for user namespaces. It mounts
// an overlay with an ID-mapped layer below dir, in a temporary mount namespace, and checks the
// owner of a file. Then it maps a tmpfs, which kubelet uses for secrets (Linux 6.3). The namespace
// at ns must have the mappings m, which map user 0 to a host user other than 0. ProbeIDMap removes
// the files that it creates in dir.
func ProbeIDMap(dir, ns string, m userns.Mappings) error {
	return probeIDMap(dir, ns, m, Spec.MountAt)
}

func probeIDMap(dir, ns string, m userns.Mappings, mountAt func(Spec, string) error) (err error) {
	tmp, err := os.MkdirTemp(dir, ".probe-")
	if err != nil {
		return fmt.Errorf("probe ID-mapped mounts: %w", err)
	}
	undo := cleanup.New()
	defer undo.Run(&err)
	undo.Add("remove "+tmp, func() error { return os.RemoveAll(tmp) })
	layer, place := filepath.Join(tmp, "layer"), filepath.Join(tmp, "place")
	for _, d := range []string{layer, place} {
		if err := os.Mkdir(d, 0o755); err != nil {
			return fmt.Errorf("probe ID-mapped mounts: %w", err)
		}
	}
	if err := os.WriteFile(filepath.Join(layer, "file"), nil, 0o644); err != nil {
		return fmt.Errorf("probe ID-mapped mounts: %w", err)
	}
	spec := Spec{
		Layers: []Layer{{Kind: Directory, Path: layer}},
		Upper:  filepath.Join(tmp, "upper"),
		Work:   filepath.Join(tmp, "work"),
		IDMap:  &IDMap{UserNS: ns, Mappings: m},
	}
	if err := spec.MakeUpper(); err != nil {
		return err
	}
	return errors.Join(probeOverlay(spec, place, mountAt), probeTmpfs(ns))
}

func probeOverlay(spec Spec, place string, mountAt func(Spec, string) error) error {
	return onThread(unix.CLONE_NEWNS|unix.CLONE_FS, func() error {
		if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
			return fmt.Errorf("make mount namespace private: %w", err)
		}
		if err := mountAt(spec, place); err != nil {
			return err
		}
		var st unix.Stat_t
		if err := unix.Stat(filepath.Join(place, "file"), &st); err != nil {
			return fmt.Errorf("stat file in ID-mapped overlay: %w", err)
		}
		if want := spec.IDMap.HostUID(0); int(st.Uid) != want {
			return fmt.Errorf("an overlay does not show the mapping of its layers (user %d, not %d): %w",
				st.Uid, want, errors.ErrUnsupported)
		}
		return nil
	})
}

func probeTmpfs(ns string) error {
	fsfd, err := unix.Fsopen("tmpfs", unix.FSOPEN_CLOEXEC)
	if err != nil {
		return fmt.Errorf("open tmpfs: %w", err)
	}
	defer unix.Close(fsfd)
	if err := unix.FsconfigCreate(fsfd); err != nil {
		return fmt.Errorf("create tmpfs: %w", err)
	}
	fd, err := unix.Fsmount(fsfd, unix.FSMOUNT_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("mount tmpfs: %w", err)
	}
	mount := os.NewFile(uintptr(fd), "tmpfs")
	defer mount.Close()
	user, err := os.Open(ns)
	if err != nil {
		return fmt.Errorf("user namespace: %w", err)
	}
	defer user.Close()
	attr := unix.MountAttr{Attr_set: unix.MOUNT_ATTR_IDMAP, Userns_fd: uint64(user.Fd())}
	if err := unix.MountSetattr(fd, "", unix.AT_EMPTY_PATH, &attr); err != nil {
		return idMapError("a tmpfs", err)
	}
	return nil
}
