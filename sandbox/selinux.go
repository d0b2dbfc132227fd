package sandbox

import (
	"berth/oci/confine"
)

// labelPod decides the pod's labels, which its containers share unless they have options
// of their own.
func (m *Manager) labelPod(p *pod) (err error) {
	options := p.config.GetLinux().GetSecurityContext().GetSelinuxOptions()
	p.rec.SELinux, err = confine.NewLabels(options, confine.Labels{}, *m.cfg.Host)
	return err
}

// labelContainer decides the container's labels.
func (m *Manager) labelContainer(p *pod, c *container) (err error) {
	options := c.config.GetLinux().GetSecurityContext().GetSelinuxOptions()
	c.rec.SELinux, err = confine.NewLabels(options, p.rec.SELinux, *m.cfg.Host)
	return err
}

// releaseContainerLabels gives back the container's categories, unless they are its pod's.
func (m *Manager) releaseContainerLabels(c *container) {
	if p, known := m.pods.Get(c.podID); known && p.rec.SELinux == c.rec.SELinux {
		return
	}
	m.selinux.Release(c.rec.SELinux)
}

func (m *Manager) releasePodLabels(p *pod) { m.selinux.Release(p.rec.SELinux) }

// reserveLabels keeps the categories of the pods and containers that an earlier daemon
// made. Containers with their pod's labels reserve the same ones again.
func (m *Manager) reserveLabels() error {
	var all []confine.Labels
	for _, p := range m.pods.Snapshot() {
		all = append(all, p.rec.SELinux)
	}
	for _, c := range m.containers.Snapshot() {
		all = append(all, c.rec.SELinux)
	}
	for _, l := range all {
		if err := m.selinux.Reserve(l); err != nil {
			return err
		}
	}
	return nil
}
