package podyaml

import (
	"fmt"
	"path"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// Labels that identify the pod of a sandbox or container for kubelet, crictl and berth's commands.
const (
	LabelPodName       = "io.kubernetes.pod.name"
	LabelPodNamespace  = "io.kubernetes.pod.namespace"
	LabelPodUID        = "io.kubernetes.pod.uid"
	LabelContainerName = "io.kubernetes.container.name"
)

// Host has the facts about the machine that a plan needs.
type Host struct {
	NodeName    string   // as kubelet would set it
	IPs         []string // of the host, the default route's address first; may be empty
	CPUs        int64
	Memory      int64  // bytes
	ResolvConf  []byte // of the host, for dnsPolicy Default with a dnsConfig
	EtcHosts    []byte // of the host, for hostNetwork
	SeccompRoot string // directory of Localhost seccomp profiles
	// RecursiveReadOnly reports that the runtime supports recursive read-only mounts.
	RecursiveReadOnly bool
}

func (h Host) capacity(name corev1.ResourceName) resource.Quantity {
	switch name {
	case corev1.ResourceCPU:
		return *resource.NewQuantity(h.CPUs, resource.DecimalSI)
	case corev1.ResourceMemory:
		return *resource.NewQuantity(h.Memory, resource.BinarySI)
	}
	return resource.Quantity{}
}

// Plan converts a parsed pod to CRI requests. It is immutable.
type Plan struct {
	Pod          *corev1.Pod // from Parse
	UID          string      // of this run
	Host         Host
	Objects      *Objects // of the manifest
	LogDir       string   // directory where the runtime writes the containers' logs
	CgroupParent string   // empty: the runtime's default
	FirstHostID  uint32   // first of UserNamespaceIDs host IDs, if WantsUserNamespace
}

// Containers returns the pod's containers in order, init containers first.
func (p *Plan) Containers() []Container { return containers(p.Pod) }

// LogPath returns the path of a container's log below LogDir.
func LogPath(container string, attempt uint32) string {
	return path.Join(container, fmt.Sprintf("%d.log", attempt))
}

// Sandbox returns the pod's sandbox config, as kubelet's generatePodSandboxConfig does.
func (p *Plan) Sandbox() *runtimeapi.PodSandboxConfig {
	config := &runtimeapi.PodSandboxConfig{
		Metadata: &runtimeapi.PodSandboxMetadata{
			Name: p.Pod.Name, Namespace: p.Pod.Namespace, Uid: p.UID,
		},
		LogDirectory: p.LogDir,
		DnsConfig:    p.dns(),
		Labels:       p.labels(p.Pod.Labels),
		Annotations:  p.Pod.Annotations,
		Linux: &runtimeapi.LinuxPodSandboxConfig{
			CgroupParent:    p.CgroupParent,
			SecurityContext: p.sandboxSecurity(),
			Sysctls:         p.sysctls(),
			Resources:       p.podResources(),
		},
	}
	if !p.Pod.Spec.HostNetwork {
		config.Hostname = p.hostname()
		config.PortMappings = p.portMappings()
	}
	return config
}

// labels returns more, plus the labels that identify the pod.
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

// Run has the inputs for one attempt of a container.
type Run struct {
	Attempt      uint32
	ImageRef     string            // the image's ID in the runtime
	Image        *runtimeapi.Image // the runtime's description of the image
	PodIPs       []string
	EtcHosts     string            // path of the pod's hosts file
	VolumeImages map[string]string // IDs of the images of image volumes, by volume
	// Source returns the host path behind a volume mount, with subPath resolved
	// (subPathExpr expanded) below the volume.
	Source func(c Container, mount int, subPath string) (string, error)
}

// Container returns a container's config, as kubelet's generateContainerConfig does.
func (p *Plan) Container(c Container, run Run) (*runtimeapi.ContainerConfig, error) {
	env, err := p.environment(c, run.PodIPs)
	if err != nil {
		return nil, err
	}
	mounts, err := p.mounts(c, env, run)
	if err != nil {
		return nil, err
	}
	security, err := p.containerSecurity(c, run.Image)
	if err != nil {
		return nil, fmt.Errorf("%s.securityContext: %w", c.Path, err)
	}
	labels := p.labels(nil)
	labels[LabelContainerName] = c.Name
	config := &runtimeapi.ContainerConfig{
		Metadata:   &runtimeapi.ContainerMetadata{Name: c.Name, Attempt: run.Attempt},
		Image:      &runtimeapi.ImageSpec{Image: run.ImageRef, UserSpecifiedImage: c.Image},
		Command:    env.expandAll(c.Command),
		Args:       env.expandAll(c.Args),
		WorkingDir: c.WorkingDir,
		Envs:       env.keyValues(),
		Mounts:     mounts,
		Labels:     labels,
		LogPath:    LogPath(c.Name, run.Attempt),
		Tty:        c.TTY,
		Stdin:      c.Stdin,
		StdinOnce:  c.StdinOnce,
		Linux: &runtimeapi.LinuxContainerConfig{
			Resources:       p.resources(c.Container),
			SecurityContext: security,
		},
	}
	if c.Lifecycle != nil && c.Lifecycle.StopSignal != nil {
		config.StopSignal, _ = stopSignal(*c.Lifecycle.StopSignal)
	}
	return config, nil
}
