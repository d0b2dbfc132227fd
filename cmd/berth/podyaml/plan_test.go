package podyaml

import (
	"reflect"
	"strings"
	"testing"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

var testHost = Host{Memory: 8 << 30, EtcHosts: []byte("127.0.0.1 localhost\n192.0.2.7 node1"), SeccompRoot: "/profiles"}

func plan(t *testing.T, spec string) *Plan {
	t.Helper()
	return &Plan{Pod: parsePod(t, manifest(spec)), UID: "uid-1", Host: testHost, LogDir: "/logs"}
}

var testRun = Run{
	Image: &runtimeapi.Image{Id: "sha256:1"}, EtcHosts: "/pod/hosts",
	VolumeDir: func(volume string) string { return "/vol/" + volume },
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
hostname: shop
securityContext:
  runAsUser: 7
  runAsGroup: 8
  fsGroup: 9
  supplementalGroups: [10]
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
	same(t, "cgroup parent", got.Linux.CgroupParent, "/pods")
	same(t, "sysctls", got.Linux.Sysctls, map[string]string{"net.ipv4.ip_forward": "1"})
	same(t, "security", got.Linux.SecurityContext, &runtimeapi.LinuxSandboxSecurityContext{
		NamespaceOptions: &runtimeapi.NamespaceOption{Pid: runtimeapi.NamespaceMode_CONTAINER},
		SelinuxOptions:   &runtimeapi.SELinuxOption{Level: "s0"},
		RunAsUser:        &runtimeapi.Int64Value{Value: 7}, RunAsGroup: &runtimeapi.Int64Value{Value: 8},
		SupplementalGroups: []int64{9, 10},
		Privileged:         true, Seccomp: &runtimeapi.SecurityProfile{},
	})
}

func TestSandboxOnHostNetwork(t *testing.T) {
	t.Parallel()
	got := plan(t, "hostNetwork: true\n"+one("ports: [{containerPort: 80}]")).Sandbox()
	same(t, "hostname", got.Hostname, "")
	same(t, "ports", got.PortMappings, nil)
	same(t, "namespaces", got.Linux.SecurityContext.NamespaceOptions, &runtimeapi.NamespaceOption{
		Network: runtimeapi.NamespaceMode_NODE, Pid: runtimeapi.NamespaceMode_CONTAINER})
}

func TestHostnameIsTruncated(t *testing.T) {
	t.Parallel()
	p := plan(t, one(""))
	p.Pod.Name = strings.Repeat("a", 62) + ".b"
	same(t, "hostname", p.Sandbox().Hostname, strings.Repeat("a", 62))
}

// A value expands like kubelet's: from variables before it, also from those of envFrom.
func TestContainerEnvironment(t *testing.T) {
	t.Parallel()
	m, err := Parse([]byte(`
apiVersion: v1
kind: Secret
metadata: {name: db}
data: {DB_HOST: aG9zdA==}
stringData: {DB_USER: u1, DB_PASS: s3}
---
apiVersion: v1
kind: ConfigMap
metadata: {name: m}
data: {DB_USER: later, COLOR: blue}
binaryData: {RAW: AAE=}
---
` + manifest(one(`
command: [sh, -c, 'echo $(A) $$(A) $(NONE) $'], args: ['$(BOTH) $(P_DB_USER)'], workingDir: /w,
envFrom: [{secretRef: {name: db}}, {secretRef: {name: db}, prefix: P_}, {configMapRef: {name: m}}, {configMapRef: {name: none, optional: true}}],
env: [
  {name: A, value: one}, {name: BOTH, value: '$(A)-$(LATER)'}, {name: LATER, value: x},
  {name: URL, value: 'postgres://$(DB_USER):$(DB_PASS)@db $(P_DB_USER)'},
  {name: KEY, valueFrom: {secretKeyRef: {name: db, key: DB_PASS}}},
  {name: COLOR, valueFrom: {configMapKeyRef: {name: m, key: COLOR}}},
  {name: MAYBE, valueFrom: {configMapKeyRef: {name: m, key: none, optional: true}}},
  {name: EMPTY, valueFrom: {}},
  {name: A, value: again}]`))))
	if err != nil {
		t.Fatal(err)
	}
	got := config(t, &Plan{Pod: m.Pods[0], UID: "uid-1", Host: testHost, Objects: m.Objects})
	var env []string
	for _, kv := range got.Envs {
		env = append(env, kv.Key+"="+string(kv.Value))
	}
	same(t, "env", env, []string{
		"DB_HOST=host", "DB_PASS=s3", "DB_USER=later", "P_DB_HOST=host", "P_DB_PASS=s3", "P_DB_USER=u1", "COLOR=blue", "RAW=\x00\x01",
		"A=again", "BOTH=one-$(LATER)", "LATER=x", "URL=postgres://later:s3@db u1", "KEY=s3", "EMPTY=",
	})
	same(t, "command", got.Command, []string{"sh", "-c", "echo again $(A) $(NONE) $"})
	same(t, "args", got.Args, []string{"one-$(LATER) u1"})
	same(t, "rest", []any{got.WorkingDir, got.LogPath, got.Image.Image, got.Metadata.Name, got.Annotations[AnnotationGrace]},
		[]any{"/w", "app/0.log", "sha256:1", "app", "30"})
}

func TestContainerMounts(t *testing.T) {
	t.Parallel()
	got := config(t, plan(t, "volumes: [{name: d, emptyDir: {}}, {name: h, hostPath: {path: /srv}}]\n"+one(`
volumeMounts: [{name: d, mountPath: /data}, {name: h, mountPath: /srv, readOnly: true}]`)))
	same(t, "mounts", got.Mounts, []*runtimeapi.Mount{
		{ContainerPath: "/data", HostPath: "/vol/d", SelinuxRelabel: true},
		{ContainerPath: "/srv", HostPath: "/srv", Readonly: true},
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
		{"own", "securityContext: {runAsUser: 5}\n" + one("securityContext: {runAsUser: 9, capabilities: {add: [NET_ADMIN], drop: [ALL]}, readOnlyRootFilesystem: true, allowPrivilegeEscalation: false, seccompProfile: {type: Localhost, localhostProfile: a/b.json}}"),
			&runtimeapi.LinuxContainerSecurityContext{
				NamespaceOptions: private, RunAsUser: number(9), ReadonlyRootfs: true, NoNewPrivs: true,
				Capabilities: &runtimeapi.Capability{AddCapabilities: []string{"NET_ADMIN"}, DropCapabilities: []string{"ALL"}},
				Seccomp:      &runtimeapi.SecurityProfile{ProfileType: runtimeapi.SecurityProfile_Localhost, LocalhostRef: "/profiles/a/b.json"},
				MaskedPaths:  MaskedPaths, ReadonlyPaths: ReadonlyPaths}},
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
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			same(t, "resources", config(t, plan(t, one("resources: "+test.resources))).Linux.Resources, test.want)
		})
	}
}

func TestEtcHosts(t *testing.T) {
	t.Parallel()
	own := string(plan(t, one("")).EtcHosts([]string{"10.0.0.2", "fd00::2"}))
	for _, want := range []string{"127.0.0.1\tlocalhost\n", "\n10.0.0.2\tweb\nfd00::2\tweb\n"} {
		if !strings.Contains(own, want) {
			t.Errorf("%q lacks %q", own, want)
		}
	}
	if host := string(plan(t, "hostNetwork: true\n"+one("")).EtcHosts(nil)); !strings.Contains(host, "192.0.2.7 node1") {
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
