package podyaml

import (
	"errors"
	"fmt"
	"reflect"
	"strings"
	"testing"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

var testHost = Host{
	NodeName: "node1", IPs: []string{"192.0.2.7", "2001:db8::7"}, CPUs: 4, Memory: 8 << 30,
	ResolvConf: []byte("# host\nnameserver 192.0.2.53\nnameserver 192.0.2.54\nsearch old.test\nsearch example.test\noptions ndots:2 rotate\n"),
	EtcHosts:   []byte("127.0.0.1 localhost\n192.0.2.7 node1"), SeccompRoot: "/profiles", RecursiveReadOnly: true,
}

func plan(t *testing.T, spec string) *Plan {
	t.Helper()
	return &Plan{Pod: parsePod(t, manifest(spec)), UID: "uid-1", Host: testHost, LogDir: "/logs"}
}

var testRun = Run{
	ImageRef: "sha256:1", Image: &runtimeapi.Image{Id: "sha256:1"}, PodIPs: []string{"10.0.0.2", "fd00::2"}, EtcHosts: "/pod/hosts",
	Source: func(c Container, mount int, sub string) (string, error) {
		return strings.TrimSuffix(fmt.Sprintf("/vol/%s/%s", c.VolumeMounts[mount].Name, sub), "/"), nil
	},
}

// config returns the config of the last container.
func config(t *testing.T, p *Plan) *runtimeapi.ContainerConfig {
	t.Helper()
	all := p.Containers()
	c, err := p.Container(all[len(all)-1], testRun)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func same[T any](t *testing.T, what string, got, want T) {
	t.Helper()
	if !reflect.DeepEqual(got, want) {
		t.Errorf("%s: %+v, want %+v", what, got, want)
	}
}

func TestSandbox(t *testing.T) {
	t.Parallel()
	p := plan(t, `
hostIPC: true
shareProcessNamespace: true
hostname: shop
dnsConfig: {nameservers: [1.1.1.1], searches: [svc.test], options: [{name: ndots, value: '5'}, {name: edns0}]}
securityContext:
  runAsUser: 7
  runAsGroup: 8
  fsGroup: 9
  supplementalGroups: [10]
  supplementalGroupsPolicy: Strict
  seLinuxOptions: {level: s0}
  sysctls: [{name: net/ipv4/ip_forward, value: '1'}]
initContainers: [{name: i, image: b, resources: {requests: {cpu: '3'}}}]
containers:
- {name: a, image: b, ports: [{containerPort: 80, hostPort: 8080, hostIP: 127.0.0.1}, {containerPort: 53, protocol: UDP}], resources: {limits: {cpu: '1', memory: 1Gi}}}
- {name: c, image: b, securityContext: {privileged: true}, resources: {limits: {cpu: 500m, memory: 1Gi}}}`)
	p.CgroupParent = "/pods"
	got := p.Sandbox()
	same(t, "metadata", got.Metadata, &runtimeapi.PodSandboxMetadata{Name: "web", Namespace: "default", Uid: "uid-1"})
	same(t, "hostname", got.Hostname, "shop")
	same(t, "labels", got.Labels, map[string]string{"app": "web", LabelPodName: "web", LabelPodNamespace: "default", LabelPodUID: "uid-1"})
	same(t, "annotations", got.Annotations, map[string]string{"note": "hi"})
	same(t, "ports", got.PortMappings, []*runtimeapi.PortMapping{{ContainerPort: 80, HostPort: 8080, HostIp: "127.0.0.1"}})
	same(t, "dns", got.DnsConfig, &runtimeapi.DNSConfig{
		Servers:  []string{"192.0.2.53", "192.0.2.54", "1.1.1.1"},
		Searches: []string{"example.test", "svc.test"}, Options: []string{"rotate", "ndots:5", "edns0"},
	})
	same(t, "cgroup parent", got.Linux.CgroupParent, "/pods")
	same(t, "sysctls", got.Linux.Sysctls, map[string]string{"net.ipv4.ip_forward": "1"})
	same(t, "security", got.Linux.SecurityContext, &runtimeapi.LinuxSandboxSecurityContext{
		NamespaceOptions: &runtimeapi.NamespaceOption{Pid: runtimeapi.NamespaceMode_POD, Ipc: runtimeapi.NamespaceMode_NODE},
		SelinuxOptions:   &runtimeapi.SELinuxOption{Level: "s0"},
		RunAsUser:        &runtimeapi.Int64Value{Value: 7}, RunAsGroup: &runtimeapi.Int64Value{Value: 8},
		SupplementalGroups: []int64{9, 10}, SupplementalGroupsPolicy: runtimeapi.SupplementalGroupsPolicy_Strict,
		Privileged: true, Seccomp: &runtimeapi.SecurityProfile{},
	})
	// The init container has the largest request but no limit, so the pod has no limit.
	same(t, "resources", got.Linux.Resources, &runtimeapi.LinuxContainerResources{CpuPeriod: 100000, CpuShares: 3072})
}

func TestSandboxOnHostNetwork(t *testing.T) {
	t.Parallel()
	got := plan(t, "hostNetwork: true\nhostPID: true\n"+one("ports: [{containerPort: 80}]")).Sandbox()
	same(t, "hostname", got.Hostname, "")
	same(t, "ports", got.PortMappings, nil)
	same(t, "dns", got.DnsConfig, nil)
	same(t, "namespaces", got.Linux.SecurityContext.NamespaceOptions, &runtimeapi.NamespaceOption{
		Network: runtimeapi.NamespaceMode_NODE, Pid: runtimeapi.NamespaceMode_NODE})
}

func TestUserNamespace(t *testing.T) {
	t.Parallel()
	p := plan(t, "hostUsers: false\nvolumes: [{name: v, emptyDir: {}}]\n"+one("volumeMounts: [{name: v, mountPath: /v}]"))
	p.FirstHostID = 1 << 20
	ids := []*runtimeapi.IDMapping{{HostId: 1 << 20, ContainerId: 0, Length: 65536}}
	want := &runtimeapi.UserNamespace{Mode: runtimeapi.NamespaceMode_POD, Uids: ids, Gids: ids}
	same(t, "pod", p.Sandbox().Linux.SecurityContext.NamespaceOptions.UsernsOptions, want)
	c := config(t, p)
	same(t, "container", c.Linux.SecurityContext.NamespaceOptions.UsernsOptions, want)
	for _, m := range c.Mounts {
		same(t, m.ContainerPath+" users", m.UidMappings, ids)
		same(t, m.ContainerPath+" groups", m.GidMappings, ids)
	}
	same(t, "mounts", len(c.Mounts), 2)

	p = plan(t, "hostUsers: true\n"+one("volumeMounts: []"))
	same(t, "pod on the host's users", p.Sandbox().Linux.SecurityContext.NamespaceOptions.UsernsOptions, (*runtimeapi.UserNamespace)(nil))
	same(t, "its hosts file", config(t, p).Mounts[0].UidMappings, []*runtimeapi.IDMapping(nil))
}

func TestHostnameIsTruncated(t *testing.T) {
	t.Parallel()
	p := plan(t, one(""))
	p.Pod.Name = strings.Repeat("a", 62) + ".b"
	same(t, "hostname", p.Sandbox().Hostname, strings.Repeat("a", 62))
}

func TestContainerEnvironment(t *testing.T) {
	t.Parallel()
	got := config(t, plan(t, one(`
command: [sh, -c, 'echo $(A) $$(A) $(NONE) $'], args: ['$(BOTH)'], workingDir: /w, tty: true,
resources: {limits: {cpu: 1500m}, requests: {memory: 100Mi}},
env: [
  {name: A, value: one}, {name: BOTH, value: '$(A)-$(LATER)-$(POD)'}, {name: LATER, value: x},
  {name: POD, valueFrom: {fieldRef: {fieldPath: metadata.name}}},
  {name: NS, valueFrom: {fieldRef: {apiVersion: v1, fieldPath: metadata.namespace}}},
  {name: UID, valueFrom: {fieldRef: {fieldPath: metadata.uid}}},
  {name: LABEL, valueFrom: {fieldRef: {fieldPath: "metadata.labels['app']"}}},
  {name: NOTE, valueFrom: {fieldRef: {fieldPath: "metadata.annotations['note']"}}},
  {name: NODE, valueFrom: {fieldRef: {fieldPath: spec.nodeName}}},
  {name: IP, valueFrom: {fieldRef: {fieldPath: status.podIP}}},
  {name: IPS, valueFrom: {fieldRef: {fieldPath: status.podIPs}}},
  {name: HOST, valueFrom: {fieldRef: {fieldPath: status.hostIP}}},
  {name: CPU, valueFrom: {resourceFieldRef: {resource: limits.cpu}}},
  {name: MCPU, valueFrom: {resourceFieldRef: {resource: limits.cpu, divisor: 1m}}},
  {name: MEM, valueFrom: {resourceFieldRef: {resource: requests.memory, divisor: 1Mi}}},
  {name: ALL, valueFrom: {resourceFieldRef: {resource: limits.memory, divisor: 1Gi}}},
  {name: A, value: again}]`)))
	var env []string
	for _, kv := range got.Envs {
		env = append(env, kv.Key+"="+string(kv.Value))
	}
	same(t, "env", env, []string{
		"A=again", "BOTH=one-$(LATER)-$(POD)", "LATER=x", "POD=web", "NS=default", "UID=uid-1", "LABEL=web", "NOTE=hi", "NODE=node1",
		"IP=10.0.0.2", "IPS=10.0.0.2,fd00::2", "HOST=192.0.2.7", "CPU=2", "MCPU=1500", "MEM=100", "ALL=8",
	})
	same(t, "command", got.Command, []string{"sh", "-c", "echo again $(A) $(NONE) $"})
	same(t, "args", got.Args, []string{"one-$(LATER)-$(POD)"})
	same(t, "rest", []any{got.WorkingDir, got.Tty, got.LogPath, got.Image.Image, got.Metadata.Name}, []any{"/w", true, "app/0.log", "sha256:1", "app"})
}

func TestContainerMounts(t *testing.T) {
	t.Parallel()
	got := config(t, plan(t, "volumes: [{name: d, emptyDir: {}}, {name: h, hostPath: {path: /srv}}]\n"+one(`
env: [{name: WHO, value: me}], securityContext: {privileged: true},
volumeMounts: [
  {name: d, mountPath: /data, subPathExpr: 'of/$(WHO)', bindMountOptions: [noexec]},
  {name: h, mountPath: /srv, readOnly: true, recursiveReadOnly: IfPossible},
  {name: h, mountPath: /both, mountPropagation: Bidirectional}, {name: h, mountPath: /in, mountPropagation: HostToContainer}]`)))
	same(t, "mounts", got.Mounts, []*runtimeapi.Mount{
		{ContainerPath: "/data", HostPath: "/vol/d/of/me", SelinuxRelabel: true, MountOptions: []string{"noexec"}},
		{ContainerPath: "/srv", HostPath: "/vol/h", Readonly: true, RecursiveReadOnly: true},
		{ContainerPath: "/both", HostPath: "/vol/h", Propagation: runtimeapi.MountPropagation_PROPAGATION_BIDIRECTIONAL},
		{ContainerPath: "/in", HostPath: "/vol/h", Propagation: runtimeapi.MountPropagation_PROPAGATION_HOST_TO_CONTAINER},
		{ContainerPath: "/etc/hosts", HostPath: "/pod/hosts", SelinuxRelabel: true},
	})
}

func TestManifestMayMountOverHostsFile(t *testing.T) {
	t.Parallel()
	got := config(t, plan(t, "volumes: [{name: h, hostPath: {path: /srv/hosts}}]\n"+one("volumeMounts: [{name: h, mountPath: /etc/hosts}]")))
	same(t, "mounts", len(got.Mounts), 1)
}

func TestContainerErrors(t *testing.T) {
	t.Parallel()
	tests := []struct{ name, spec, want string }{
		{"escaping expression", "volumes: [{name: d, emptyDir: {}}]\n" + one("env: [{name: A, value: ../..}], volumeMounts: [{name: d, mountPath: /d, subPathExpr: 'x/$(A)'}]"),
			"spec.containers[0].volumeMounts[0].subPathExpr: \"x/../..\" must be a relative path"},
		{"unknown variable", "volumes: [{name: d, emptyDir: {}}]\n" + one("volumeMounts: [{name: d, mountPath: /d, subPathExpr: '$(A)'}]"), "variable A is not set"},
		{"root by number", one("securityContext: {runAsNonRoot: true, runAsUser: 0}"), "contradict"},
		{"root by image", "securityContext: {runAsNonRoot: true}\n" + one(""), "the image runs as root"},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			p := plan(t, test.spec)
			_, err := p.Container(p.Containers()[0], testRun)
			if err == nil || !strings.Contains(err.Error(), test.want) {
				t.Errorf("error %v, want %q", err, test.want)
			}
		})
	}
	gone := errors.New("gone")
	p := plan(t, "volumes: [{name: d, emptyDir: {}}]\n"+one("volumeMounts: [{name: d, mountPath: /d}]"))
	_, err := p.Container(p.Containers()[0], Run{Source: func(Container, int, string) (string, error) { return "", gone }})
	if !errors.Is(err, gone) {
		t.Errorf("error of a volume: %v", err)
	}
}

func TestContainerSecurity(t *testing.T) {
	t.Parallel()
	number := func(n int64) *runtimeapi.Int64Value { return &runtimeapi.Int64Value{Value: n} }
	private := &runtimeapi.NamespaceOption{Pid: runtimeapi.NamespaceMode_CONTAINER}
	def := &runtimeapi.SecurityProfile{ProfileType: runtimeapi.SecurityProfile_RuntimeDefault}
	tests := []struct {
		name, spec string
		want       *runtimeapi.LinuxContainerSecurityContext
	}{
		{"none", one(""), &runtimeapi.LinuxContainerSecurityContext{
			NamespaceOptions: private, Seccomp: def, MaskedPaths: MaskedPaths, ReadonlyPaths: ReadonlyPaths}},
		{"from the pod", "securityContext: {runAsUser: 5, runAsGroup: 6, runAsNonRoot: true, fsGroup: 7, seccompProfile: {type: Unconfined}, appArmorProfile: {type: Localhost, localhostProfile: p}, seLinuxOptions: {type: t}}\n" + one(""),
			&runtimeapi.LinuxContainerSecurityContext{
				NamespaceOptions: private, RunAsUser: number(5), RunAsGroup: number(6), SupplementalGroups: []int64{7},
				Seccomp:        &runtimeapi.SecurityProfile{ProfileType: runtimeapi.SecurityProfile_Unconfined},
				Apparmor:       &runtimeapi.SecurityProfile{ProfileType: runtimeapi.SecurityProfile_Localhost, LocalhostRef: "p"},
				SelinuxOptions: &runtimeapi.SELinuxOption{Type: "t"}, MaskedPaths: MaskedPaths, ReadonlyPaths: ReadonlyPaths}},
		{"own", "securityContext: {runAsUser: 5}\n" + one("securityContext: {runAsUser: 9, capabilities: {add: [NET_ADMIN], drop: [ALL]}, readOnlyRootFilesystem: true, allowPrivilegeEscalation: false, procMount: Unmasked, seccompProfile: {type: Localhost, localhostProfile: a/b.json}}"),
			&runtimeapi.LinuxContainerSecurityContext{
				NamespaceOptions: private, RunAsUser: number(9), ReadonlyRootfs: true, NoNewPrivs: true,
				Capabilities: &runtimeapi.Capability{AddCapabilities: []string{"NET_ADMIN"}, DropCapabilities: []string{"ALL"}},
				Seccomp:      &runtimeapi.SecurityProfile{ProfileType: runtimeapi.SecurityProfile_Localhost, LocalhostRef: "/profiles/a/b.json"}}},
		{"privileged", one("securityContext: {privileged: true}"), &runtimeapi.LinuxContainerSecurityContext{
			NamespaceOptions: private, Privileged: true, MaskedPaths: MaskedPaths, ReadonlyPaths: ReadonlyPaths,
			Seccomp: &runtimeapi.SecurityProfile{ProfileType: runtimeapi.SecurityProfile_Unconfined}}},
		{"group alone", one("securityContext: {runAsGroup: 3}"), &runtimeapi.LinuxContainerSecurityContext{
			NamespaceOptions: private, RunAsUser: number(0), RunAsGroup: number(3), Seccomp: def, MaskedPaths: MaskedPaths, ReadonlyPaths: ReadonlyPaths}},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			same(t, "security", config(t, plan(t, test.spec)).Linux.SecurityContext, test.want)
		})
	}
}

func TestNonRootImages(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		image *runtimeapi.Image
		want  string
	}{
		{&runtimeapi.Image{Uid: &runtimeapi.Int64Value{Value: 5}}, ""},
		{&runtimeapi.Image{Uid: &runtimeapi.Int64Value{}}, "runs as root"},
		{&runtimeapi.Image{Username: "nobody"}, "is a name"},
		{nil, "runs as root"},
	} {
		err := checkNonRoot(nil, test.image)
		if (err == nil) != (test.want == "") || err != nil && !strings.Contains(err.Error(), test.want) {
			t.Errorf("%+v: %v, want %q", test.image, err, test.want)
		}
	}
}

func TestContainerResources(t *testing.T) {
	t.Parallel()
	tests := []struct {
		name, resources string
		want            *runtimeapi.LinuxContainerResources
	}{
		{"best effort", "{}", &runtimeapi.LinuxContainerResources{CpuPeriod: 100000, CpuShares: 2, OomScoreAdj: 1000}},
		{"guaranteed", "{limits: {cpu: '2', memory: 1Gi}}", &runtimeapi.LinuxContainerResources{
			CpuPeriod: 100000, CpuQuota: 200000, CpuShares: 2048, MemoryLimitInBytes: 1 << 30, OomScoreAdj: -997}},
		{"burstable", "{requests: {cpu: 250m, memory: 2Gi}, limits: {memory: 4Gi}}", &runtimeapi.LinuxContainerResources{
			CpuPeriod: 100000, CpuShares: 256, MemoryLimitInBytes: 4 << 30, OomScoreAdj: 750}},
		{"burstable with nearly all", "{requests: {memory: 8Gi}}", &runtimeapi.LinuxContainerResources{CpuPeriod: 100000, CpuShares: 2, OomScoreAdj: 3}},
		{"burstable with next to nothing", "{requests: {memory: '1'}}", &runtimeapi.LinuxContainerResources{CpuPeriod: 100000, CpuShares: 2, OomScoreAdj: 999}},
		{"tiny limit", "{limits: {cpu: 1m}}", &runtimeapi.LinuxContainerResources{CpuPeriod: 100000, CpuQuota: 1000, CpuShares: 2, OomScoreAdj: 999}},
		{"huge pages", "{limits: {hugepages-2Mi: 4Mi, hugepages-1Gi: 1Gi}}", &runtimeapi.LinuxContainerResources{
			CpuPeriod: 100000, CpuShares: 2, OomScoreAdj: 1000,
			HugepageLimits: []*runtimeapi.HugepageLimit{{PageSize: "1GB", Limit: 1 << 30}, {PageSize: "2MB", Limit: 4 << 20}}}},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			same(t, "resources", config(t, plan(t, one("resources: "+test.resources))).Linux.Resources, test.want)
		})
	}
}

func TestPodResources(t *testing.T) {
	t.Parallel()
	got := plan(t, `
initContainers:
- {name: s, image: b, restartPolicy: Always, resources: {limits: {cpu: 100m, memory: 100Mi}}}
- {name: i, image: b, resources: {limits: {cpu: '2', memory: 50Mi}}}
containers:
- {name: a, image: b, resources: {limits: {cpu: '1', memory: 200Mi}}}`).podResources()
	same(t, "resources", got, &runtimeapi.LinuxContainerResources{
		CpuPeriod: 100000, CpuShares: 2150, CpuQuota: 210000, MemoryLimitInBytes: 300 << 20})
}

func TestStopSignal(t *testing.T) {
	t.Parallel()
	same(t, "signal", config(t, plan(t, one("lifecycle: {stopSignal: SIGUSR1}"))).StopSignal, runtimeapi.Signal_SIGNAL_SIGUSR1)
}

func TestEtcHosts(t *testing.T) {
	t.Parallel()
	alias := "hostAliases: [{ip: 192.0.2.9, hostnames: [db, cache]}]\n"
	own := string(plan(t, alias+one("")).EtcHosts([]string{"10.0.0.2", "fd00::2"}))
	for _, want := range []string{"127.0.0.1\tlocalhost\n", "\n10.0.0.2\tweb\nfd00::2\tweb\n", "\n192.0.2.9\tdb\tcache\n"} {
		if !strings.Contains(own, want) {
			t.Errorf("%q lacks %q", own, want)
		}
	}
	host := string(plan(t, "hostNetwork: true\n"+alias+one("")).EtcHosts(nil))
	if !strings.Contains(host, "192.0.2.7 node1\n\n# Entries") || !strings.HasSuffix(host, "192.0.2.9\tdb\tcache\n") {
		t.Errorf("hosts of the host's network: %q", host)
	}
}

func TestExpand(t *testing.T) {
	t.Parallel()
	lookup := func(name string) (string, bool) {
		v, ok := map[string]string{"A": "1", "EMPTY": "", "REC": "$(A)"}[name]
		return v, ok
	}
	// From Kubernetes' third_party/forked/golang/expansion.
	for _, test := range [][2]string{
		{"$(A)", "1"}, {"x$(A)y", "x1y"}, {"$$(A)", "$(A)"}, {"$$$(A)", "$1"}, {"$$$$(A)", "$$(A)"}, {"$(EMPTY)", ""}, {"$(NO)", "$(NO)"},
		{"$(REC)", "$(A)"}, {"$A", "$A"}, {"$", "$"}, {"$$", "$"}, {"a$", "a$"}, {"$(A", "$(A"}, {"$()", "$()"}, {"$(A)$(A)", "11"}, {"$(A$(A))", "$(A$(A))"},
		{"$$A", "$A"}, {"", ""}, {"$((A))", "$((A))"},
	} {
		if got := Expand(test[0], lookup); got != test[1] {
			t.Errorf("%q: %q, want %q", test[0], got, test[1])
		}
	}
}

func FuzzExpand(f *testing.F) {
	for _, seed := range []string{"", "$", "$$", "$(", "$(A)", "$$(A)", "a$(B)c$)", "$((A))"} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, text string) {
		unknown := Expand(text, func(string) (string, bool) { return "", false })
		if !strings.Contains(text, "$$") && unknown != text {
			t.Errorf("%q became %q though nothing is known", text, unknown)
		}
		if !strings.Contains(text, "$") && Expand(text, func(string) (string, bool) { return "x", true }) != text {
			t.Errorf("%q has no reference and was changed", text)
		}
	})
}
