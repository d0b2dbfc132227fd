package sandbox

import (
	"berth/oci/confine"
)

// labelPod decides the pod's labels, which its containers share unless they have options
// of their own.
func (m *Manager) labelPod(p *pod) (err error) {
	options := p.config.GetLinux().GetSecurityContext().GetSelinuxOptions()
	if p.rec.SELinux, err = confine.NewLabels(options, confine.Labels{}, *m.cfg.Host); err != nil {
		return err
	}
	return m.labels.Hold(m.selinux, p.rec.SELinux, p.id)
}

// labelContainer decides the container's labels.
func (m *Manager) labelContainer(p *pod, c *container) (err error) {
	options := c.config.GetLinux().GetSecurityContext().GetSelinuxOptions()
	if c.rec.SELinux, err = confine.NewLabels(options, p.rec.SELinux, *m.cfg.Host); err != nil {
		return err
	}
	return m.labels.Hold(m.selinux, c.rec.SELinux, c.id)
}

// releaseContainerLabels gives back the container's categories, unless others use them: its pod, for one.
func (m *Manager) releaseContainerLabels(c *container) {
	m.labels.Release(m.selinux, c.rec.SELinux, c.id)
}

func (m *Manager) releasePodLabels(p *pod) { m.labels.Release(m.selinux, p.rec.SELinux, p.id) }

// reserveLabels keeps the categories of the pods and containers that an earlier daemon
// made. Containers with their pod's labels hold the same ones.
func (m *Manager) reserveLabels() error {
	for _, p := range m.pods.Snapshot() {
		if err := m.labels.Hold(m.selinux, p.rec.SELinux, p.id); err != nil {
			return err
		}
	}
	for _, c := range m.containers.Snapshot() {
		if err := m.labels.Hold(m.selinux, c.rec.SELinux, c.id); err != nil {
			return err
		}
	}
	return nil
}
