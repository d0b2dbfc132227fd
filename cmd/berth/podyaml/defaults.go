package podyaml

import (
	"path"
	"strings"

	corev1 "k8s.io/api/core/v1"
)

const defaultGrace = 30 // seconds, DefaultTerminationGracePeriodSeconds

// setDefaults sets the API server's defaults, except the default of restartPolicy.
func setDefaults(pod *corev1.Pod) {
	spec := &pod.Spec
	setIfZero(&pod.Namespace, corev1.NamespaceDefault)
	setIfZero(&spec.RestartPolicy, corev1.RestartPolicyNever) // the API server's is Always
	if spec.TerminationGracePeriodSeconds == nil {
		spec.TerminationGracePeriodSeconds = new(int64)
		*spec.TerminationGracePeriodSeconds = defaultGrace
	}
	for _, c := range containers(pod) {
		setContainerDefaults(c.Container, spec.HostNetwork)
	}
}

func setContainerDefaults(c *corev1.Container, hostNetwork bool) {
	setIfZero(&c.ImagePullPolicy, defaultPullPolicy(c.Image))
	for i := range c.Ports {
		setIfZero(&c.Ports[i].Protocol, corev1.ProtocolTCP)
		if hostNetwork {
			setIfZero(&c.Ports[i].HostPort, c.Ports[i].ContainerPort)
		}
	}
	for name, limit := range c.Resources.Limits {
		if _, set := c.Resources.Requests[name]; set {
			continue
		}
		if c.Resources.Requests == nil {
			c.Resources.Requests = corev1.ResourceList{}
		}
		c.Resources.Requests[name] = limit
	}
}

// defaultPullPolicy returns Always for the tag latest, written or implied, and IfNotPresent for
// other tags.
func defaultPullPolicy(image string) corev1.PullPolicy {
	name, _, digested := strings.Cut(image, "@")
	_, tag, tagged := strings.Cut(path.Base(name), ":")
	if tag == "latest" || (!tagged && !digested) {
		return corev1.PullAlways
	}
	return corev1.PullIfNotPresent
}

func setIfZero[T comparable](field *T, value T) {
	var zero T
	if *field == zero {
		*field = value
	}
}

// Container is one container of a pod with its place in the manifest.
type Container struct {
	*corev1.Container
	Path string // spec.containers[1] or spec.initContainers[0]
	Init bool
}

// containers returns all containers in order, init containers first.
func containers(pod *corev1.Pod) []Container {
	all := make([]Container, 0, len(pod.Spec.InitContainers)+len(pod.Spec.Containers))
	for i := range pod.Spec.InitContainers {
		all = append(all, Container{&pod.Spec.InitContainers[i], index("spec.initContainers", i), true})
	}
	for i := range pod.Spec.Containers {
		all = append(all, Container{&pod.Spec.Containers[i], index("spec.containers", i), false})
	}
	return all
}

func value[T any](p *T) T {
	var zero T
	if p == nil {
		return zero
	}
	return *p
}
