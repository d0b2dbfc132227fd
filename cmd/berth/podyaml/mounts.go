package podyaml

import (
	"bytes"
	"fmt"
	"path"

	corev1 "k8s.io/api/core/v1"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

const etcHosts = "/etc/hosts"

// mounts returns the container's volume mounts and the pod's hosts file. It omits the hosts file if
// the manifest mounts something in its place.
func (p *Plan) mounts(c Container, run Run) []*runtimeapi.Mount {
	var out []*runtimeapi.Mount
	ownHosts := false
	for i := range c.VolumeMounts {
		m := &c.VolumeMounts[i]
		v := p.volume(m.Name)
		mount := &runtimeapi.Mount{ContainerPath: m.MountPath, Readonly: m.ReadOnly}
		if v.HostPath != nil {
			mount.HostPath = v.HostPath.Path
		} else {
			mount.HostPath, mount.SelinuxRelabel = run.VolumeDir(m.Name), true
		}
		ownHosts = ownHosts || path.Clean(m.MountPath) == etcHosts
		out = append(out, mount)
	}
	if !ownHosts && run.EtcHosts != "" {
		out = append(out, &runtimeapi.Mount{ContainerPath: etcHosts, HostPath: run.EtcHosts, SelinuxRelabel: true})
	}
	return out
}

// volume returns a volume of the pod by its name, or an empty one.
func (p *Plan) volume(name string) *corev1.Volume {
	for i := range p.Pod.Spec.Volumes {
		if p.Pod.Spec.Volumes[i].Name == name {
			return &p.Pod.Spec.Volumes[i]
		}
	}
	return &corev1.Volume{}
}

// EtcHosts returns the content of the pod's hosts file, as kubelet writes it. With hostNetwork it
// is the host's file. Otherwise it has the loopback names and the pod's own name.
func (p *Plan) EtcHosts(podIPs []string) []byte {
	if p.Pod.Spec.HostNetwork {
		return append([]byte("# The host's hosts file, copied when the pod started.\n"), p.Host.EtcHosts...)
	}
	var out bytes.Buffer
	out.WriteString("# Made for this pod when it started.\n")
	out.WriteString("127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n")
	out.WriteString("fe00::\tip6-localnet\nfe00::\tip6-mcastprefix\nfe00::1\tip6-allnodes\nfe00::2\tip6-allrouters\n")
	for _, ip := range podIPs {
		fmt.Fprintf(&out, "%s\t%s\n", ip, p.hostname())
	}
	return out.Bytes()
}
