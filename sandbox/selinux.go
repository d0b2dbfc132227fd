package sandbox

import (
	"errors"
	"fmt"
	"strings"

	"github.com/opencontainers/selinux/go-selinux"
	"github.com/opencontainers/selinux/go-selinux/label"
	"golang.org/x/sys/unix"

	"berth/internal/errdefs"
	"berth/internal/host"
	"berth/oci"
)

// labeller gives SELinux labels to files, and keeps the categories of labels from being
// drawn twice.
type labeller struct {
	reserve func(label string) error
	release func(label string)
	relabel func(path, label string) error
}

// hostLabeller is the host's. Without SELinux it does nothing.
var hostLabeller = labeller{
	reserve: selinux.ReserveLabelV2,
	release: func(l string) { selinux.ReleaseLabel(l) },
	relabel: func(path, l string) error { return refused(label.Relabel(path, l, false)) },
}

// errSystemPath is what relabel returns for paths that are never labelled anew, such as /usr.
var errSystemPath = errors.New("a path of the system keeps its label")

// refused gives the library's refusal of such a path, which is nothing but a text, an error of its own.
func refused(err error) error {
	if err != nil && strings.HasPrefix(err.Error(), "SELinux relabeling of ") && strings.HasSuffix(err.Error(), " is not allowed") {
		return fmt.Errorf("%w: %w", errSystemPath, err)
	}
	return err
}

// labelPod decides the pod's labels, which its containers share unless they have options
// of their own.
func (m *Manager) labelPod(p *pod) (err error) {
	options := p.config.GetLinux().GetSecurityContext().GetSelinuxOptions()
	p.rec.SELinux, err = oci.NewLabels(options, oci.Labels{}, *m.cfg.Host)
	return err
}

// labelContainer decides the container's labels.
func (m *Manager) labelContainer(p *pod, c *container) (err error) {
	options := c.config.GetLinux().GetSecurityContext().GetSelinuxOptions()
	c.rec.SELinux, err = oci.NewLabels(options, p.rec.SELinux, *m.cfg.Host)
	return err
}

// labelPodFiles labels resolv.conf and the others, which all containers of the pod read. They are
// the pod's own, also where they are copies of the host's.
func (m *Manager) labelPodFiles(p *pod) error {
	if p.rec.SELinux.Mount == "" {
		return nil
	}
	if err := m.labels.relabel(m.podFiles(p.id), p.rec.SELinux.Mount); err != nil && !errors.Is(err, unix.ENOTSUP) {
		return fmt.Errorf("selinux: label files of pod %s: %w", p.id, err)
	}
	return nil
}

// relabelMounts labels the sources of those mounts that ask for it, for the container.
// Nothing else is ever labelled anew (CVE-2021-43816); the library refuses system folders.
func (m *Manager) relabelMounts(c *container) error {
	if c.rec.SELinux.Mount == "" {
		return nil
	}
	sources, err := oci.RelabelSources(c.config, host.Files{})
	if err != nil {
		return err
	}
	for _, source := range sources {
		err := m.labels.relabel(source, c.rec.SELinux.Mount)
		switch {
		case errors.Is(err, unix.ENOTSUP): // a filesystem without labels
		case errors.Is(err, errSystemPath):
			return errdefs.InvalidArgument("selinux: label %s: %w", source, err)
		case errors.Is(err, unix.EPERM), errors.Is(err, unix.EACCES), errors.Is(err, unix.EROFS):
			return errdefs.FailedPrecondition("selinux: label %s: %w", source, err)
		case err != nil:
			return fmt.Errorf("selinux: label %s: %w", source, err)
		}
	}
	return nil
}

// releaseContainerLabels gives back the container's categories, unless they are its pod's.
func (m *Manager) releaseContainerLabels(c *container) {
	if p, known := m.pods.get(c.podID); known && p.rec.SELinux == c.rec.SELinux {
		return
	}
	m.release(c.rec.SELinux)
}

func (m *Manager) releasePodLabels(p *pod) { m.release(p.rec.SELinux) }

func (m *Manager) release(labels oci.Labels) {
	if labels.Process != "" {
		m.labels.release(labels.Process)
	}
}

// reserveLabels keeps the categories of the pods and containers that an earlier daemon
// made. Containers with their pod's labels reserve the same ones again.
func (m *Manager) reserveLabels() error {
	var all []oci.Labels
	for _, p := range m.pods.snapshot() {
		all = append(all, p.rec.SELinux)
	}
	for _, c := range m.containers.snapshot() {
		all = append(all, c.rec.SELinux)
	}
	for _, l := range all {
		if l.Process == "" {
			continue
		}
		if err := m.labels.reserve(l.Process); err != nil && !errors.Is(err, selinux.ErrMCSAlreadyExists) {
			return fmt.Errorf("selinux: reserve label %s: %w", l.Process, err)
		}
	}
	return nil
}
