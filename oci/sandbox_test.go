package oci

import (
	"maps"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"github.com/opencontainers/runtime-spec/specs-go"
	"google.golang.org/grpc/codes"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/internal/errdefs"
	"berth/internal/testutil"
	"berth/oci/users"
)

func (in *SandboxInput) sc() *runtimeapi.LinuxSandboxSecurityContext {
	return in.Pod.Config.Linux.SecurityContext
}

func sandboxRefused(t *testing.T, change func(*SandboxInput), code codes.Code, parts ...string) {
	t.Helper()
	in := testSandbox()
	change(&in)
	_, err := SandboxSpec(in)
	testutil.WantError(t, err, code, parts...)
}

func TestSandboxNamespaces(t *testing.T) {
	t.Parallel()
	const net = "/run/netns/berth-pod1"
	for _, test := range []struct {
		name string
		o    *runtimeapi.NamespaceOption
		want map[string]string
	}{
		{"own", nil, map[string]string{"network": net, "uts": "", "ipc": "", "pid": ""}},
		{"PID namespace per container", &runtimeapi.NamespaceOption{Pid: nsContainer}, map[string]string{"network": net, "uts": "", "ipc": "", "pid": ""}},
		{"host network", &runtimeapi.NamespaceOption{Network: nsNode}, map[string]string{"ipc": "", "pid": ""}},
		{"all the host's", &runtimeapi.NamespaceOption{Network: nsNode, Ipc: nsNode, Pid: nsNode}, map[string]string{}},
	} {
		t.Run(test.name, func(t *testing.T) {
			in := testSandbox()
			in.sc().NamespaceOptions = test.o
			spec, err := SandboxSpec(in)
			testutil.Must(t, err)
			if got := paths(spec); !maps.Equal(got, test.want) {
				t.Errorf("%s: got %v, want %v", test.name, got, test.want)
			}
			if host := test.o.GetNetwork() == nsNode; host != (spec.Hostname == "") {
				t.Errorf("%s: hostname %q", test.name, spec.Hostname)
			}
		})
	}
}

func TestSandboxProcess(t *testing.T) {
	t.Parallel()
	in := testSandbox()
	in.User = users.User{UID: 65535, GID: 65535, Groups: []uint32{5, 65535}}
	in.sc().Seccomp = profile(runtimeDefault, "")
	spec, err := SandboxSpec(in)
	testutil.Must(t, err)
	p := spec.Process
	if !slices.Equal(p.Args, []string{PausePath}) || *p.OOMScoreAdj != -998 || p.User.UID != 65535 || !spec.Root.Readonly {
		t.Errorf("got %+v", p)
	}
	if len(p.Capabilities.Bounding) != 0 || spec.Linux.Seccomp == nil {
		t.Errorf("capabilities %v, seccomp %v", p.Capabilities, spec.Linux.Seccomp)
	}
	if spec.Linux.CgroupsPath != "/kubepods/pod1/pod1" {
		t.Errorf("cgroup %s", spec.Linux.CgroupsPath)
	}

	in.Image = &ocispec.ImageConfig{Entrypoint: []string{"/pause"}, Cmd: []string{"-v"}, Env: []string{"PATH=/x"}, WorkingDir: "/w"}
	spec, err = SandboxSpec(in)
	testutil.Must(t, err)
	p = spec.Process
	if !slices.Equal(p.Args, []string{"/pause", "-v"}) || p.Cwd != "/w" || !slices.Equal(p.Env, []string{"PATH=/x", "HOME=/"}) {
		t.Errorf("pause image: got %+v", p)
	}
}

func TestSandboxRefused(t *testing.T) {
	t.Parallel()
	sandboxRefused(t, func(in *SandboxInput) { in.Pod.NetNS = "" }, codes.Internal, "network namespace")
	sandboxRefused(t, func(in *SandboxInput) { in.Pod.Config.Hostname = strings.Repeat("a", 65) }, codes.InvalidArgument, "hostname")
	sandboxRefused(t, func(in *SandboxInput) { in.Pod.Config.Hostname = "a\nb" }, codes.InvalidArgument, "hostname")
	sandboxRefused(t, func(in *SandboxInput) { in.Pod.Config.Hostname = "../b" }, codes.InvalidArgument, "hostname")
	sandboxRefused(t, func(in *SandboxInput) { in.Pod.CgroupParent = "/a/../b" }, codes.InvalidArgument, "cgroup parent")
	sandboxRefused(t, func(in *SandboxInput) { in.Image = &ocispec.ImageConfig{} }, codes.InvalidArgument, "no command")
	sandboxRefused(t, func(in *SandboxInput) { in.sc().NamespaceOptions = &runtimeapi.NamespaceOption{Pid: nsTarget} },
		codes.InvalidArgument, "namespace_options.pid")
	sandboxRefused(t, func(in *SandboxInput) { in.sc().Seccomp = profile(localhost, "/no") }, codes.InvalidArgument, "/no")
}

func sandboxSpec(t *testing.T, change func(*SandboxInput)) *specs.Spec {
	t.Helper()
	in := testSandbox()
	change(&in)
	spec, err := SandboxSpec(in)
	testutil.Must(t, err)
	return spec
}

func TestSysctls(t *testing.T) {
	t.Parallel()
	in := testSandbox()
	in.Pod.Config.Linux.Sysctls = map[string]string{
		"net.ipv4.ip_local_port_range": "1024\t65535", "net/core/somaxconn": "4096",
		"kernel.shmmax": "68719476736", "kernel.shm_rmid_forced": "1", "kernel.sem": "250 32000 32 128", "fs.mqueue.msg_max": "10",
		"kernel.domainname":                        "example.org",
		"net/ipv4/conf/eth0.1/rp_filter":           "1",
		"net.ipv4.conf.eth0/2.rp_filter":           "2",
		"net.ipv4.ip_local_reserved_ports":         "",
		"net/ipv4/tcp_keepalive_time":              "600\n",
		"net.ipv4.conf.a/b/c.d/e.accept_redirects": "0",
	}
	spec, err := SandboxSpec(in)
	testutil.Must(t, err)
	want := maps.Clone(in.Pod.Config.Linux.Sysctls)
	delete(want, "net/core/somaxconn")
	want["net.core.somaxconn"] = "4096"
	delete(want, "net/ipv4/conf/eth0.1/rp_filter")
	want["net.ipv4.conf.eth0/1.rp_filter"] = "1"
	delete(want, "net/ipv4/tcp_keepalive_time")
	want["net.ipv4.tcp_keepalive_time"] = "600\n"
	for key, value := range defaultSysctls(testPod()) {
		want[key] = value
	}
	if !maps.Equal(spec.Linux.Sysctl, want) {
		t.Errorf("got %v", spec.Linux.Sysctl)
	}
}

func TestDefaultSysctls(t *testing.T) {
	t.Parallel()
	const ports = "net.ipv4.ip_unprivileged_port_start"
	own := sandboxSpec(t, func(in *SandboxInput) {
		in.Pod.Config.Linux.Sysctls = map[string]string{ports: "1024"}
	})
	if got := own.Linux.Sysctl; got[ports] != "1024" || got["net.ipv4.ping_group_range"] != "0 2147483647" {
		t.Errorf("the pod's own value must win over the default: %v", got)
	}
	host := sandboxSpec(t, func(in *SandboxInput) {
		in.sc().NamespaceOptions = &runtimeapi.NamespaceOption{Network: nsNode}
		in.Pod.Config.Linux.Sysctls = nil
	})
	if got := host.Linux.Sysctl; len(got) != 0 {
		t.Errorf("the node's network would be changed: %v", got)
	}
}

func TestSysctlsRefused(t *testing.T) {
	t.Parallel()
	hostNet := &runtimeapi.NamespaceOption{Network: nsNode}
	hostIPC := &runtimeapi.NamespaceOption{Ipc: nsNode}
	for _, test := range []struct {
		o          *runtimeapi.NamespaceOption
		key, value string
	}{
		{hostNet, "net.core.somaxconn", "1"},
		{hostNet, "kernel.domainname", "x"},
		{hostIPC, "kernel.shmmax", "1"},
		{hostIPC, "fs/mqueue/msg_max", "1"},
		{nil, "kernel.core_pattern", "|/x"},
		{nil, "kernel.hostname", "x"},
		{nil, "kernel.msg_other", "1"},
		{nil, "vm.swappiness", "1"},
		{nil, "user.max_user_namespaces", "1"},
		{nil, "net", "1"},
		{nil, "", "1"},
		{nil, "net.", "1"},
		{nil, "net..core", "1"},
		{nil, "net/../kernel/core_pattern", "1"},
		{nil, "../net/x", "1"},
		{nil, "net.core.x\n", "1"},
		{nil, "net.core.X", "1"},
		{nil, "net/ipv4/conf/../../kernel/core_pattern", "1"},
		{nil, "net.ipv4./.x", "1"},
		{nil, "net.ipv4.conf.//.//.kernel.core_pattern", "1"},
		{nil, "kernel.shm/max", "1"},
		{nil, "kernel/shm.max", "1"},
		{nil, "fs.mqueue.a/b", "1"},
		{hostNet, "net/ipv4/conf/eth0.1/rp_filter", "1"},
		{hostNet, "net.ipv4.conf.eth0/1.rp_filter", "1"},
		{nil, "net." + strings.Repeat("a", 250), "1"},
		{nil, "kernel.shm_rmid_forced", "1+kernel.core_pattern=|/evil"}, // CVE-2022-0811
		{nil, "net.core.somaxconn", "1\nx"},
		{nil, "net.core.somaxconn", "1\n\n"},
		{nil, "net.core.somaxconn", "\n1"},
		{nil, "net.core.somaxconn", "1\x00"},
		{nil, "net.core.somaxconn", "é"},
	} {
		sandboxRefused(t, func(in *SandboxInput) {
			in.sc().NamespaceOptions = test.o
			in.Pod.Config.Linux.Sysctls = map[string]string{test.key: test.value}
		}, codes.InvalidArgument, "sysctl")
	}
	sandboxRefused(t, func(in *SandboxInput) {
		in.Pod.Config.Linux.Sysctls = map[string]string{"net.core.somaxconn": "1", "net/core/somaxconn": "2"}
	}, codes.InvalidArgument, "twice")
	sandboxRefused(t, func(in *SandboxInput) {
		in.Pod.Config.Linux.Sysctls = map[string]string{"net/ipv4/conf/a.b/x": "1", "net.ipv4.conf.a/b.x": "2"}
	}, codes.InvalidArgument, "twice")
}

func FuzzSysctls(f *testing.F) {
	f.Add("net.core.somaxconn", "1")
	f.Add("kernel/shm_rmid_forced", "1+x")
	f.Add("fs.mqueue./..", "\t ")
	f.Add("net/ipv4/conf/eth0.1/x", "1\n")
	f.Add("net.ipv4.conf.eth0/1.x", "")
	f.Fuzz(func(t *testing.T, key, value string) {
		pod := testPod()
		pod.Config.Linux.Sysctls = map[string]string{key: value}
		got, err := sysctls(pod)
		if err != nil {
			if errdefs.Code(err) != codes.InvalidArgument {
				t.Errorf("code of %v", err)
			}
			return
		}
		for k, v := range got {
			path := strings.NewReplacer(".", "/", "/", ".").Replace(k)
			v = strings.TrimSuffix(v, "\n")
			if strings.ContainsAny(k, "+\n \x00") || filepath.Clean(path) != path || strings.ContainsAny(v, "+\n\x00") {
				t.Errorf("%q = %q", k, v)
			}
			if strings.Contains(k, "/") && !strings.HasPrefix(k, "net.") {
				t.Errorf("%q has a dot inside a component", k)
			}
			if !strings.HasPrefix(k, "net.") && !strings.HasPrefix(k, "fs.mqueue.") && !ipcSysctls[k] && k != "kernel.domainname" {
				t.Errorf("%q is not namespaced", k)
			}
		}
	})
}

func TestSetsNetworkSysctls(t *testing.T) {
	t.Parallel()
	for name, want := range map[string]bool{
		"net.ipv4.conf.eth0.arp_ignore": true, "net/ipv4/conf/eth0/arp_ignore": true, "net.core.somaxconn": true,
		"kernel.shm_rmid_forced": false, "fs.mqueue.msg_max": false, "netx.y": false,
	} {
		t.Run(name, func(t *testing.T) {
			config := &runtimeapi.PodSandboxConfig{Linux: &runtimeapi.LinuxPodSandboxConfig{Sysctls: map[string]string{name: "1"}}}
			if got := SetsNetworkSysctls(config); got != want {
				t.Errorf("got %t", got)
			}
		})
	}
	if SetsNetworkSysctls(&runtimeapi.PodSandboxConfig{}) {
		t.Error("a pod without sysctls sets some")
	}
}
