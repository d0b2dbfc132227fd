package podyaml

import (
	"fmt"
	"path"
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// Labels that identify the pod of a sandbox or container for kubelet, crictl and berth's commands.
const (
	LabelPodName       = "io.kubernetes.pod.name"
	LabelPodNamespace  = "io.kubernetes.pod.namespace"
	LabelPodUID        = "io.kubernetes.pod.uid"
	LabelContainerName = "io.kubernetes.container.name"
)

// AnnotationGrace is kubelet's annotation of a container with its pod's grace period in seconds.
const AnnotationGrace = "io.kubernetes.pod.terminationGracePeriod"

// Host has the facts about the machine that a plan needs.
type Host struct {
	Memory      int64  // bytes
	EtcHosts    []byte // of the host, for hostNetwork
	SeccompRoot string // directory of Localhost seccomp profiles
}

// Plan converts a parsed pod to CRI requests. It is immutable.
type Plan struct {
	Pod          *corev1.Pod // from Parse
	UID          string      // of this run
	Host         Host
	Objects      *Objects // of the manifest
	LogDir       string   // directory where the runtime writes the containers' logs
	CgroupParent string   // empty: the runtime's default
}

// Containers returns the pod's containers in order, init containers first.
func (p *Plan) Containers() []Container { return containers(p.Pod) }

// LogPath returns the path of a container's log below LogDir.
func LogPath(container string) string { return path.Join(container, "0.log") }

// Sandbox returns the pod's sandbox config, as kubelet's generatePodSandboxConfig does.
func (p *Plan) Sandbox() *runtimeapi.PodSandboxConfig {
	config := &runtimeapi.PodSandboxConfig{
		Metadata: &runtimeapi.PodSandboxMetadata{
			Name: p.Pod.Name, Namespace: p.Pod.Namespace, Uid: p.UID,
		},
		LogDirectory: p.LogDir,
		Labels:       p.labels(p.Pod.Labels),
		Annotations:  p.Pod.Annotations,
		Linux: &runtimeapi.LinuxPodSandboxConfig{
			CgroupParent:    p.CgroupParent,
			SecurityContext: p.sandboxSecurity(),
			Sysctls:         p.sysctls(),
		},
	}
	if !p.Pod.Spec.HostNetwork {
		config.Hostname = p.hostname()
		config.PortMappings = p.portMappings()
	}
	return config
}

// labels returns the labels in more and the labels that identify the pod.
func (p *Plan) labels(more map[string]string) map[string]string {
	out := make(map[string]string, len(more)+3)
	for k, v := range more {
		out[k] = v
	}
	out[LabelPodName] = p.Pod.Name
	out[LabelPodNamespace] = p.Pod.Namespace
	out[LabelPodUID] = p.UID
	return out
}

// hostname returns spec.hostname or the pod's name, truncated to the limit of the kernel and DNS.
func (p *Plan) hostname() string {
	const most = 63
	name := p.Pod.Spec.Hostname
	if name == "" {
		name = p.Pod.Name
	}
	if len(name) > most {
		name = strings.TrimRight(name[:most], "-.")
	}
	return name
}

func (p *Plan) portMappings() []*runtimeapi.PortMapping {
	var out []*runtimeapi.PortMapping
	for _, c := range p.Containers() {
		for _, port := range c.Ports {
			if port.HostPort == 0 {
				continue
			}
			out = append(out, &runtimeapi.PortMapping{
				Protocol:      runtimeapi.Protocol(runtimeapi.Protocol_value[string(port.Protocol)]),
				ContainerPort: port.ContainerPort,
				HostPort:      port.HostPort,
				HostIp:        port.HostIP,
			})
		}
	}
	return out
}

func (p *Plan) sysctls() map[string]string {
	sc := p.Pod.Spec.SecurityContext
	if sc == nil || len(sc.Sysctls) == 0 {
		return nil
	}
	out := map[string]string{}
	for _, s := range sc.Sysctls {
		out[strings.ReplaceAll(s.Name, "/", ".")] = s.Value
	}
	return out
}

// Run has the inputs for a container.
type Run struct {
	Image    *runtimeapi.Image // the runtime's description of the image
	EtcHosts string            // path of the pod's hosts file
	// VolumeDir returns the host path of an emptyDir volume.
	VolumeDir func(volume string) string
}

// Container returns a container's config, as kubelet's generateContainerConfig does.
func (p *Plan) Container(c Container, run Run) (*runtimeapi.ContainerConfig, error) {
	env, err := p.environment(c)
	if err != nil {
		return nil, err
	}
	security, err := p.containerSecurity(c, run.Image)
	if err != nil {
		return nil, fmt.Errorf("%s.securityContext: %w", c.Path, err)
	}
	labels := p.labels(nil)
	labels[LabelContainerName] = c.Name
	return &runtimeapi.ContainerConfig{
		Metadata:   &runtimeapi.ContainerMetadata{Name: c.Name},
		Image:      &runtimeapi.ImageSpec{Image: run.Image.GetId(), UserSpecifiedImage: c.Image},
		Command:    env.expandAll(c.Command),
		Args:       env.expandAll(c.Args),
		WorkingDir: c.WorkingDir,
		Envs:       env.keyValues(),
		Mounts:     p.mounts(c, run),
		Labels:     labels,
		Annotations: map[string]string{
			AnnotationGrace: strconv.FormatInt(*p.Pod.Spec.TerminationGracePeriodSeconds, 10),
		},
		LogPath: LogPath(c.Name),
		Linux: &runtimeapi.LinuxContainerConfig{
			Resources:       p.resources(c.Container),
			SecurityContext: security,
		},
	}, nil
}
