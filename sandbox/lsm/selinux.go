package lsm

import (
	"errors"
	"fmt"
	"path/filepath"

	"github.com/opencontainers/selinux/go-selinux"
	"golang.org/x/sys/unix"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/internal/errdefs"
	"berth/internal/host"
	"berth/internal/safefs"
	"berth/oci"
	"berth/oci/confine"
)

// SELinux labels files and reserves categories of labels. Its fields are the operations of the
// host.
type SELinux struct {
	ReserveLabel func(label string) error // returns selinux.ErrMCSAlreadyExists for a reserved label
	ReleaseLabel func(label string)
	Relabel      func(path, label string) error // recursive
}

// HostSELinux operates on the host. On a host without SELinux it does nothing.
var HostSELinux = SELinux{
	ReserveLabel: selinux.ReserveLabelV2,
	ReleaseLabel: func(l string) { selinux.ReleaseLabel(l) },
	Relabel:      relabelHost,
}

// Reserve reserves the categories of labels. It also succeeds for reserved categories, which may be
// shared.
func (s SELinux) Reserve(labels confine.Labels) error {
	if labels.Process == "" {
		return nil
	}
	if err := s.ReserveLabel(labels.Process); err != nil && !errors.Is(err, selinux.ErrMCSAlreadyExists) {
		return fmt.Errorf("selinux: reserve label %s: %w", labels.Process, err)
	}
	return nil
}

// Release frees unused categories.
func (s SELinux) Release(labels confine.Labels) {
	if labels.Process != "" {
		s.ReleaseLabel(labels.Process)
	}
}

// LabelOwn labels a directory that berth created, and its files.
func (s SELinux) LabelOwn(dir string, labels confine.Labels) error {
	if labels.Mount == "" {
		return nil
	}
	real, err := filepath.EvalSymlinks(dir) // the operator may have put symlinks into the path
	if err != nil {
		return fmt.Errorf("selinux: label %s: %w", dir, err)
	}
	if err := s.Relabel(real, labels.Mount); err != nil && !errors.Is(err, unix.ENOTSUP) {
		return fmt.Errorf("selinux: label %s: %w", dir, err)
	}
	return nil
}

// MountsToLabel returns the sources of the container's mounts with selinux_relabel. No other source
// is ever relabelled (CVE-2021-43816).
func MountsToLabel(config *runtimeapi.ContainerConfig, labels confine.Labels) ([]string, error) {
	if labels.Mount == "" {
		return nil, nil
	}
	return oci.RelabelSources(config, host.Files{})
}

// LabelMount labels the source of a mount. The error is InvalidArgument for system directories. It
// is FailedPrecondition if the filesystem has no labels, or if the resolved path now contains a
// symlink.
func (s SELinux) LabelMount(source string, labels confine.Labels) error {
	err := s.Relabel(source, labels.Mount)
	switch {
	case errors.Is(err, unix.ENOTSUP): // a filesystem without labels
		return nil
	case errors.Is(err, errSystemPath):
		return errdefs.InvalidArgument("selinux: label %s: %w", source, err)
	case errors.Is(err, unix.EPERM), errors.Is(err, unix.EACCES), errors.Is(err, unix.EROFS),
		errors.Is(err, unix.ELOOP), errors.Is(err, safefs.ErrTooDeep), errors.Is(err, safefs.ErrMoved):
		return errdefs.FailedPrecondition("selinux: label %s: %w", source, err)
	case err != nil:
		return fmt.Errorf("selinux: label %s: %w", source, err)
	}
	return nil
}
