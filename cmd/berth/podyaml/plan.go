package podyaml

import (
	"fmt"
	"path"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// Labels by which kubelet, crictl and berth's own commands know whose a sandbox
// or a container is.
const (
	LabelPodName       = "io.kubernetes.pod.name"
	LabelPodNamespace  = "io.kubernetes.pod.namespace"
	LabelPodUID        = "io.kubernetes.pod.uid"
	LabelContainerName = "io.kubernetes.container.name"
)

// Host is what a plan must know about the machine.
type Host struct {
	NodeName    string   // as kubelet would name the node
	IPs         []string // of the host, the one of the default route first; may be empty
	CPUs        int64
	Memory      int64  // bytes
	ResolvConf  []byte // the host's, for dnsPolicy Default with a dnsConfig
	EtcHosts    []byte // the host's, for hostNetwork
	SeccompRoot string // where Localhost seccomp profiles are
	// RecursiveReadOnly: the runtime can make mounts read-only with all below them.
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

// Plan is a parsed pod on its way to a runtime. It does not change once made.
type Plan struct {
	Pod          *corev1.Pod // from Parse
	UID          string      // of this run
	Host         Host
	LogDir       string // where the runtime puts the containers' logs
	CgroupParent string // empty: the runtime's own default
	FirstHostID  uint32 // of the UserNamespaceIDs users and groups of a pod that WantsUserNamespace
}

// Containers returns the pod's containers, init containers first, in order.
func (p *Plan) Containers() []Container { return containers(p.Pod) }

// LogPath is the path of a container's log below LogDir.
func LogPath(container string, attempt uint32) string {
	return path.Join(container, fmt.Sprintf("%d.log", attempt))
}

// Sandbox is the pod's sandbox config, as kubelet's generatePodSandboxConfig makes it.
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

// labels are the given ones plus those by which everybody finds the pod.
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

// hostname is spec.hostname or the pod's name, cut to what the kernel and DNS take.
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

// Run is what one attempt of a container needs beyond the plan.
type Run struct {
	Attempt  uint32
	ImageRef string            // the ID that the runtime gave the image
	Image    *runtimeapi.Image // what the runtime knows about it
	PodIPs   []string
	EtcHosts string // path of the pod's hosts file
	// Source returns the host path behind a volume mount, with subPath resolved
	// (subPathExpr expanded) below the volume.
	Source func(c Container, mount int, subPath string) (string, error)
}

// Container is a container's config, as kubelet's generateContainerConfig makes it.
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
