package cni

import (
	"math"
	"net/netip"
	"strings"

	"github.com/containernetworking/cni/libcni"
	"github.com/containernetworking/cni/pkg/utils"
	"k8s.io/apimachinery/pkg/api/resource"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/internal/errdefs"
)

// Pod is the input of plugins for one pod, from [NewPod]. DEL needs the same input as ADD.
type Pod struct {
	ID        string // the container ID of CNI
	Name      string
	Namespace string
	UID       string
	NetNS     string // path of its network namespace; may be gone at Del

	// Capability arguments. A plugin gets only capabilities that its configuration declares.
	PortMappings []PortMapping
	Bandwidth    *Bandwidth
	DNS          *DNS
	IPRanges     [][]IPRange
	PreferredIPs []netip.Addr // a capability of berth: addresses to assign if they are free
	CgroupPath   string
}

// PortMapping opens a port of the host for the pod.
type PortMapping struct {
	HostPort      int32  `json:"hostPort"`
	ContainerPort int32  `json:"containerPort"`
	Protocol      string `json:"protocol"` // tcp, udp or sctp
	HostIP        string `json:"hostIP,omitempty"`
}

// Bandwidth limits the pod's traffic. Rates are in bits per second, and bursts in bits. 0 means no
// limit.
type Bandwidth struct {
	IngressRate  uint64 `json:"ingressRate,omitempty"`
	IngressBurst uint64 `json:"ingressBurst,omitempty"`
	EgressRate   uint64 `json:"egressRate,omitempty"`
	EgressBurst  uint64 `json:"egressBurst,omitempty"`
}

// DNS is the pod's resolver configuration.
type DNS struct {
	Servers  []string `json:"servers,omitempty"`
	Searches []string `json:"searches,omitempty"`
	Options  []string `json:"options,omitempty"`
}

// IPRange is a range of addresses for pods.
type IPRange struct {
	Subnet     string `json:"subnet"`
	RangeStart string `json:"rangeStart,omitempty"`
	RangeEnd   string `json:"rangeEnd,omitempty"`
	Gateway    string `json:"gateway,omitempty"`
}

// The names of the capabilities (CNI CONVENTIONS.md).
const (
	capPortMappings = "portMappings"
	capBandwidth    = "bandwidth"
	capDNS          = "dns"
	capIPRanges     = "ipRanges"
	capPreferredIPs = "preferredIPs" // a capability of berth-net; CNI's capability ips fails if an address is used
	capCgroupPath   = "cgroupPath"
)

// NewPod translates a CRI pod config. It returns InvalidArgument for invalid ports, bandwidth
// annotations, and names that [Pod.Validate] refuses.
func NewPod(id, netns string, cfg *runtimeapi.PodSandboxConfig) (Pod, error) {
	ports, err := portMappings(cfg.GetPortMappings())
	if err != nil {
		return Pod{}, err
	}
	bandwidth, err := ParseBandwidth(cfg.GetAnnotations())
	if err != nil {
		return Pod{}, err
	}
	pod := Pod{
		ID:           id,
		Name:         cfg.GetMetadata().GetName(),
		Namespace:    cfg.GetMetadata().GetNamespace(),
		UID:          cfg.GetMetadata().GetUid(),
		NetNS:        netns,
		PortMappings: ports,
		Bandwidth:    bandwidth,
		CgroupPath:   cfg.GetLinux().GetCgroupParent(),
	}
	if d := cfg.GetDnsConfig(); len(d.GetServers())+len(d.GetSearches())+len(d.GetOptions()) > 0 {
		pod.DNS = &DNS{Servers: d.Servers, Searches: d.Searches, Options: d.Options}
	}
	return pod, pod.Validate()
}

// portMappings translates CRI port mappings and drops those without a host port.
func portMappings(in []*runtimeapi.PortMapping) ([]PortMapping, error) {
	var out []PortMapping
	for _, m := range in {
		if m.GetHostPort() == 0 {
			continue
		}
		name, known := runtimeapi.Protocol_name[int32(m.GetProtocol())]
		switch {
		case !known:
			return nil, errdefs.InvalidArgument("port mapping: unknown protocol %d", m.GetProtocol())
		case !isPort(m.GetHostPort()) || !isPort(m.GetContainerPort()):
			return nil, errdefs.InvalidArgument("port mapping %d:%d: a port is a number from 1 to 65535",
				m.GetHostPort(), m.GetContainerPort())
		}
		if ip := m.GetHostIp(); ip != "" {
			if _, err := netip.ParseAddr(ip); err != nil {
				return nil, errdefs.InvalidArgument("port mapping %d:%d: host IP: %w", m.GetHostPort(), m.GetContainerPort(), err)
			}
		}
		out = append(out, PortMapping{
			HostPort:      m.GetHostPort(),
			ContainerPort: m.GetContainerPort(),
			Protocol:      strings.ToLower(name),
			HostIP:        m.GetHostIp(),
		})
	}
	return out, nil
}

func isPort(p int32) bool { return p >= 1 && p <= math.MaxUint16 }

// The pod annotations that Kubernetes documents for traffic shaping.
const (
	ingressAnnotation = "kubernetes.io/ingress-bandwidth"
	egressAnnotation  = "kubernetes.io/egress-bandwidth"
)

// Bounds of a rate in bits per second, as kubelet validates bandwidth.
var minRate, maxRate = resource.MustParse("1k"), resource.MustParse("1P")

// ParseBandwidth reads the limits from a pod's annotations. It returns nil if the pod has none.
// Like containerd and CRI-O it sets the largest burst that the bandwidth plugin accepts. It returns
// InvalidArgument for a value that is not a quantity from 1k to 1P.
func ParseBandwidth(annotations map[string]string) (*Bandwidth, error) {
	ingress, err := parseRate(annotations, ingressAnnotation)
	if err != nil {
		return nil, err
	}
	egress, err := parseRate(annotations, egressAnnotation)
	if err != nil {
		return nil, err
	}
	if ingress == 0 && egress == 0 {
		return nil, nil
	}
	b := &Bandwidth{IngressRate: ingress, EgressRate: egress}
	if ingress > 0 {
		b.IngressBurst = math.MaxUint32
	}
	if egress > 0 {
		b.EgressBurst = math.MaxUint32
	}
	return b, nil
}

func parseRate(annotations map[string]string, key string) (uint64, error) {
	text, ok := annotations[key]
	if !ok {
		return 0, nil
	}
	q, err := resource.ParseQuantity(text)
	if err != nil {
		return 0, errdefs.InvalidArgument("annotation %s: %q: %w", key, text, err)
	}
	if q.Cmp(minRate) < 0 || q.Cmp(maxRate) > 0 {
		return 0, errdefs.InvalidArgument("annotation %s: %q is not between 1k and 1P", key, text)
	}
	return uint64(q.Value()), nil
}

// ParsePodCIDRs translates the comma-separated pod CIDRs of UpdateRuntimeConfig into one set of
// IPRanges each. A pod gets one address of each set. The result for "" is nil.
func ParsePodCIDRs(cidrs string) ([][]IPRange, error) {
	if cidrs == "" {
		return nil, nil
	}
	var sets [][]IPRange
	for text := range strings.SplitSeq(cidrs, ",") {
		prefix, err := netip.ParsePrefix(strings.TrimSpace(text))
		if err != nil {
			return nil, errdefs.InvalidArgument("pod CIDR %q: %w", text, err)
		}
		sets = append(sets, []IPRange{{Subnet: prefix.Masked().String()}})
	}
	return sets, nil
}

// Validate returns InvalidArgument for a pod with names that could change the plugins' input. Names
// go into CNI_ARGS, where ";" and "=" separate arguments. The ID goes into file names.
func (p Pod) Validate() error {
	if err := utils.ValidateContainerID(p.ID); err != nil {
		return errdefs.InvalidArgument("pod ID %q: %w", p.ID, err)
	}
	for _, kv := range p.args() {
		if strings.ContainsFunc(kv[1], unfitForArgs) {
			return errdefs.InvalidArgument("pod %s: %s %q: \";\", \"=\" and control characters cannot be passed to CNI plugins",
				p.ID, kv[0], kv[1])
		}
	}
	return nil
}

func unfitForArgs(r rune) bool { return r == ';' || r == '=' || r < ' ' || r == 0x7f }

// args returns the CNI_ARGS that every Kubernetes runtime passes.
func (p Pod) args() [][2]string {
	return [][2]string{
		{"IgnoreUnknown", "1"},
		{"K8S_POD_NAMESPACE", p.Namespace},
		{"K8S_POD_NAME", p.Name},
		{"K8S_POD_INFRA_CONTAINER_ID", p.ID},
		{"K8S_POD_UID", p.UID},
	}
}

func (p Pod) runtimeConf(ifName string) *libcni.RuntimeConf {
	return &libcni.RuntimeConf{
		ContainerID:    p.ID,
		NetNS:          p.NetNS,
		IfName:         ifName,
		Args:           p.args(),
		CapabilityArgs: p.capabilityArgs(),
	}
}

func (p Pod) capabilityArgs() map[string]any {
	args := map[string]any{}
	if len(p.PortMappings) > 0 {
		args[capPortMappings] = p.PortMappings
	}
	if p.Bandwidth != nil {
		args[capBandwidth] = p.Bandwidth
	}
	if p.DNS != nil {
		args[capDNS] = p.DNS
	}
	if len(p.IPRanges) > 0 {
		args[capIPRanges] = p.IPRanges
	}
	if len(p.PreferredIPs) > 0 {
		args[capPreferredIPs] = p.PreferredIPs
	}
	if p.CgroupPath != "" {
		args[capCgroupPath] = p.CgroupPath
	}
	return args
}
