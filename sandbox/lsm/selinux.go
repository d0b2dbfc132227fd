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

// SELinux gives labels to files, and keeps the categories of labels from being drawn twice. Its
// fields are what the host does.
type SELinux struct {
	ReserveLabel func(label string) error // selinux.ErrMCSAlreadyExists if it is
	ReleaseLabel func(label string)
	Relabel      func(path, label string) error // of the files below path too
}

// HostSELinux is the host's. Without SELinux it does nothing.
var HostSELinux = SELinux{
	ReserveLabel: selinux.ReserveLabelV2,
	ReleaseLabel: func(l string) { selinux.ReleaseLabel(l) },
	Relabel:      relabelHost,
}

// Reserve keeps the categories of labels that are in use; several may use the same.
func (s SELinux) Reserve(labels confine.Labels) error {
	if labels.Process == "" {
		return nil
	}
	if err := s.ReserveLabel(labels.Process); err != nil && !errors.Is(err, selinux.ErrMCSAlreadyExists) {
		return fmt.Errorf("selinux: reserve label %s: %w", labels.Process, err)
	}
	return nil
}

// Release gives back the categories of labels that nobody uses any more.
func (s SELinux) Release(labels confine.Labels) {
	if labels.Process != "" {
		s.ReleaseLabel(labels.Process)
	}
}

// LabelOwn labels a directory of berth's own and what is in it.
func (s SELinux) LabelOwn(dir string, labels confine.Labels) error {
	if labels.Mount == "" {
		return nil
	}
	real, err := filepath.EvalSymlinks(dir) // the way to it is the operator's
	if err != nil {
		return fmt.Errorf("selinux: label %s: %w", dir, err)
	}
	if err := s.Relabel(real, labels.Mount); err != nil && !errors.Is(err, unix.ENOTSUP) {
		return fmt.Errorf("selinux: label %s: %w", dir, err)
	}
	return nil
}

// MountsToLabel returns the sources of those mounts of a container that ask for its labels. Nothing else is ever
// labelled anew (CVE-2021-43816).
func MountsToLabel(config *runtimeapi.ContainerConfig, labels confine.Labels) ([]string, error) {
	if labels.Mount == "" {
		return nil, nil
	}
	return oci.RelabelSources(config, host.Files{})
}

// LabelMount labels such a source. InvalidArgument for folders of the system, FailedPrecondition
// where files can't have labels, or somebody has put a symlink into the path since it was resolved.
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
