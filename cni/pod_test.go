package cni

import (
	"math"
	"reflect"
	"testing"

	"google.golang.org/grpc/codes"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/internal/errdefs"
	"berth/internal/testutil"
)

func TestNewPod(t *testing.T) {
	t.Parallel()
	pod, err := NewPod("p1", "/run/netns/p1", &runtimeapi.PodSandboxConfig{
		Metadata:  &runtimeapi.PodSandboxMetadata{Name: "web", Namespace: "shop", Uid: "u", Attempt: 1},
		DnsConfig: &runtimeapi.DNSConfig{Servers: []string{"192.0.2.1"}, Searches: []string{"shop"}},
		PortMappings: []*runtimeapi.PortMapping{
			{Protocol: runtimeapi.Protocol_UDP, ContainerPort: 53, HostPort: 5353, HostIp: "::1"},
			{ContainerPort: 80}, // no host port
			{Protocol: runtimeapi.Protocol_SCTP, ContainerPort: 1, HostPort: 65535},
		},
		Annotations: map[string]string{"kubernetes.io/ingress-bandwidth": "10M", "kubernetes.io/egress-bandwidth": "1.5Gi"},
		Linux:       &runtimeapi.LinuxPodSandboxConfig{CgroupParent: "/kubepods/u"},
	})
	testutil.Must(t, err)
	want := Pod{
		ID: "p1", Name: "web", Namespace: "shop", UID: "u", NetNS: "/run/netns/p1",
		PortMappings: []PortMapping{
			{HostPort: 5353, ContainerPort: 53, Protocol: "udp", HostIP: "::1"},
			{HostPort: 65535, ContainerPort: 1, Protocol: "sctp"},
		},
		Bandwidth:  &Bandwidth{IngressRate: 10_000_000, IngressBurst: math.MaxUint32, EgressRate: 3 << 29, EgressBurst: math.MaxUint32},
		DNS:        &DNS{Servers: []string{"192.0.2.1"}, Searches: []string{"shop"}},
		CgroupPath: "/kubepods/u",
	}
	if !reflect.DeepEqual(pod, want) {
		t.Errorf("pod %+v, want %+v", pod, want)
	}
	if pod, err = NewPod("p2", "", &runtimeapi.PodSandboxConfig{}); err != nil || len(pod.capabilityArgs()) != 0 {
		t.Errorf("empty config: %+v, %v", pod, err)
	}
}

func TestNewPodRefuses(t *testing.T) {
	t.Parallel()
	port := func(m *runtimeapi.PortMapping) *runtimeapi.PodSandboxConfig {
		return &runtimeapi.PodSandboxConfig{PortMappings: []*runtimeapi.PortMapping{m}}
	}
	note := func(key, value string) *runtimeapi.PodSandboxConfig {
		return &runtimeapi.PodSandboxConfig{Annotations: map[string]string{key: value}}
	}
	for name, cfg := range map[string]*runtimeapi.PodSandboxConfig{
		"host port":         port(&runtimeapi.PortMapping{ContainerPort: 80, HostPort: 65536}),
		"negative port":     port(&runtimeapi.PortMapping{ContainerPort: 80, HostPort: -1}),
		"container port":    port(&runtimeapi.PortMapping{HostPort: 80}),
		"host IP":           port(&runtimeapi.PortMapping{ContainerPort: 80, HostPort: 80, HostIp: "localhost"}),
		"protocol":          port(&runtimeapi.PortMapping{ContainerPort: 80, HostPort: 80, Protocol: 9}),
		"rate":              note("kubernetes.io/ingress-bandwidth", "fast"),
		"rate too small":    note("kubernetes.io/egress-bandwidth", "999"),
		"rate too large":    note("kubernetes.io/egress-bandwidth", "2P"),
		"negative rate":     note("kubernetes.io/egress-bandwidth", "-5M"),
		"name for CNI_ARGS": {Metadata: &runtimeapi.PodSandboxMetadata{Name: "a;b"}},
	} {
		t.Run(name, func(t *testing.T) {
			if pod, err := NewPod("p1", "", cfg); errdefs.Code(err) != codes.InvalidArgument {
				t.Errorf("%s: %+v, %v", name, pod, err)
			}
		})
	}
}

func TestParsePodCIDRs(t *testing.T) {
	t.Parallel()
	for in, want := range map[string][][]IPRange{
		"":                         nil,
		"10.1.2.3/16":              {{{Subnet: "10.1.0.0/16"}}},
		"10.1.0.0/16, fd00:1::/64": {{{Subnet: "10.1.0.0/16"}}, {{Subnet: "fd00:1::/64"}}},
	} {
		if got, err := ParsePodCIDRs(in); err != nil || !reflect.DeepEqual(got, want) {
			t.Errorf("%q: %v, %v, want %v", in, got, err, want)
		}
	}
	for _, in := range []string{"10.0.0.0", ",", "10.0.0.0/33", "10.0.0.0/8;fd00::/64"} {
		if got, err := ParsePodCIDRs(in); errdefs.Code(err) != codes.InvalidArgument {
			t.Errorf("%q: %v, %v", in, got, err)
		}
	}
}
