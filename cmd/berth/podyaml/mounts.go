package podyaml

import (
	"fmt"
	"path"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

const etcHosts = "/etc/hosts"

// mounts returns the container's volume mounts and the pod's hosts file. It omits the hosts file if
// the manifest mounts something in its place.
func (p *Plan) mounts(c Container, env *environment, run Run) ([]*runtimeapi.Mount, error) {
	var out []*runtimeapi.Mount
	ownHosts := false
	for i := range c.VolumeMounts {
		m := &c.VolumeMounts[i]
		at := index(c.Path+".volumeMounts", i)
		sub, err := subPath(m, env)
		if err != nil {
			return nil, fmt.Errorf("%s.subPathExpr: %w", at, err)
		}
		volume := p.volume(m.Name)
		if volume.Image != nil {
			out = append(out, p.mapped(&runtimeapi.Mount{
				ContainerPath: m.MountPath, Readonly: true, ImageSubPath: sub,
				Image: &runtimeapi.ImageSpec{Image: run.VolumeImages[m.Name], UserSpecifiedImage: volume.Image.Reference},
			}))
			continue
		}
		source, err := run.Source(c, i, sub)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", at, err)
		}
		ownHosts = ownHosts || path.Clean(m.MountPath) == etcHosts
		out = append(out, p.mapped(p.mount(m, source)))
	}
	if !ownHosts && run.EtcHosts != "" {
		out = append(out, p.mapped(&runtimeapi.Mount{ContainerPath: etcHosts, HostPath: run.EtcHosts, SelinuxRelabel: true}))
	}
	return out, nil
}

func (p *Plan) mount(m *corev1.VolumeMount, source string) *runtimeapi.Mount {
	return &runtimeapi.Mount{
		ContainerPath:     m.MountPath,
		HostPath:          source,
		Readonly:          m.ReadOnly || readOnly(p.volume(m.Name)),
		RecursiveReadOnly: p.recursiveReadOnly(m),
		Propagation:       propagation[value(m.MountPropagation)],
		SelinuxRelabel:    p.relabel(m.Name),
		MountOptions:      m.BindMountOptions,
	}
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

// readOnly reports whether every mount of the volume is read-only, as in kubelet.
func readOnly(v *corev1.Volume) bool {
	return HasFiles(v) || (v.PersistentVolumeClaim != nil && v.PersistentVolumeClaim.ReadOnly)
}

// recursiveReadOnly reports whether to request a recursive read-only mount. If the manifest
// requires it and the runtime lacks the feature, the runtime reports the error.
func (p *Plan) recursiveReadOnly(m *corev1.VolumeMount) bool {
	switch value(m.RecursiveReadOnly) {
	case corev1.RecursiveReadOnlyEnabled:
		return true
	case corev1.RecursiveReadOnlyIfPossible:
		return p.Host.RecursiveReadOnly
	}
	return false
}

var propagation = map[corev1.MountPropagationMode]runtimeapi.MountPropagation{
	"":                                     runtimeapi.MountPropagation_PROPAGATION_PRIVATE,
	corev1.MountPropagationNone:            runtimeapi.MountPropagation_PROPAGATION_PRIVATE,
	corev1.MountPropagationHostToContainer: runtimeapi.MountPropagation_PROPAGATION_HOST_TO_CONTAINER,
	corev1.MountPropagationBidirectional:   runtimeapi.MountPropagation_PROPAGATION_BIDIRECTIONAL,
}

// relabel reports whether a volume may get the pod's SELinux label: the pod's own files may, the
// host's may not.
func (p *Plan) relabel(volume string) bool {
	v := p.volume(volume)
	return v.EmptyDir != nil || v.PersistentVolumeClaim != nil || HasFiles(v)
}

// subPath returns the mount's subPath, or its expanded subPathExpr, which must obey the same rules.
func subPath(m *corev1.VolumeMount, env *environment) (string, error) {
	if m.SubPathExpr == "" {
		return m.SubPath, nil
	}
	var missing []string
	sub := Expand(m.SubPathExpr, func(name string) (string, bool) {
		v, ok := env.lookup(name)
		if !ok {
			missing = append(missing, name)
		}
		return v, ok
	})
	switch {
	case len(missing) > 0:
		return "", fmt.Errorf("variable %s is not set", strings.Join(missing, ", "))
	case path.IsAbs(sub) || slices.Contains(strings.Split(sub, "/"), ".."):
		return "", fmt.Errorf("%q must be a relative path without .. in it", sub)
	}
	return sub, nil
}
