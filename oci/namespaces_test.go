package oci

import (
	"maps"
	"testing"

	"github.com/opencontainers/runtime-spec/specs-go"
	"google.golang.org/grpc/codes"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

const (
	nsPod       = runtimeapi.NamespaceMode_POD
	nsContainer = runtimeapi.NamespaceMode_CONTAINER
	nsNode      = runtimeapi.NamespaceMode_NODE
	nsTarget    = runtimeapi.NamespaceMode_TARGET
)

// paths returns the namespaces of a spec except for mount, "" for a new one.
func paths(spec *specs.Spec) map[string]string {
	m := make(map[string]string)
	for _, ns := range spec.Linux.Namespaces {
		if ns.Type != specs.MountNamespace {
			m[string(ns.Type)] = ns.Path
		}
	}
	return m
}

func cgroupns(mode runtimeapi.NamespaceMode) *runtimeapi.CgroupNamespace {
	return &runtimeapi.CgroupNamespace{Mode: mode}
}

func TestNamespaces(t *testing.T) {
	t.Parallel()
	const net, ipc, uts, pid = "/run/netns/berth-pod1", "/proc/4242/ns/ipc", "/proc/4242/ns/uts", "/proc/4242/ns/pid"
	type m = map[string]string
	type o = runtimeapi.NamespaceOption
	for _, test := range []struct {
		name     string
		pod, ctr *o
		change   func(*ContainerInput)
		want     m
	}{
		{name: "own PID namespace", ctr: &o{Pid: nsContainer}, want: m{"network": net, "ipc": ipc, "uts": uts, "pid": "", "cgroup": ""}},
		{name: "pod's PID namespace", want: m{"network": net, "ipc": ipc, "uts": uts, "pid": pid, "cgroup": ""}},
		{name: "target", ctr: &o{Pid: nsTarget, TargetId: "x"}, change: func(in *ContainerInput) { in.TargetPIDNS = "/proc/7/ns/pid" },
			want: m{"network": net, "ipc": ipc, "uts": uts, "pid": "/proc/7/ns/pid", "cgroup": ""}},
		{name: "host network", pod: &o{Network: nsNode, Pid: nsContainer}, ctr: &o{Network: nsNode, Pid: nsContainer},
			want: m{"ipc": ipc, "pid": "", "cgroup": ""}},
		{name: "host network of the pod counts", pod: &o{Network: nsNode}, ctr: &o{Pid: nsContainer},
			change: func(in *ContainerInput) { in.Pod.NetNS = "" }, want: m{"ipc": ipc, "pid": "", "cgroup": ""}},
		{name: "host IPC", pod: &o{Ipc: nsNode}, ctr: &o{Ipc: nsNode}, want: m{"network": net, "uts": uts, "pid": pid, "cgroup": ""}},
		{name: "host PID", pod: &o{Pid: nsNode}, ctr: &o{Pid: nsNode}, want: m{"network": net, "ipc": ipc, "uts": uts, "cgroup": ""}},
		{name: "pod's PID namespace is the host's", pod: &o{Pid: nsNode}, want: m{"network": net, "ipc": ipc, "uts": uts, "cgroup": ""}},
		{name: "privileged sees the host's cgroups", ctr: &o{Pid: nsContainer}, change: func(in *ContainerInput) { in.privilege() },
			want: m{"network": net, "ipc": ipc, "uts": uts, "pid": ""}},
		{name: "cgroup v1", ctr: &o{Pid: nsContainer}, change: func(in *ContainerInput) { in.Host.CgroupV2 = false },
			want: m{"network": net, "ipc": ipc, "uts": uts, "pid": ""}},
		{name: "own cgroup namespace on v1", ctr: &o{CgroupnsOptions: cgroupns(nsContainer)},
			change: func(in *ContainerInput) { in.Host.CgroupV2 = false },
			want:   m{"network": net, "ipc": ipc, "uts": uts, "pid": pid, "cgroup": ""}},
		{name: "own cgroup namespace of a privileged container", ctr: &o{CgroupnsOptions: cgroupns(nsContainer)},
			change: func(in *ContainerInput) { in.privilege() },
			want:   m{"network": net, "ipc": ipc, "uts": uts, "pid": pid, "cgroup": ""}},
		{name: "node's cgroup namespace", ctr: &o{CgroupnsOptions: cgroupns(nsNode)},
			want: m{"network": net, "ipc": ipc, "uts": uts, "pid": pid}},
	} {
		t.Run(test.name, func(t *testing.T) {
			in := testInput()
			in.Pod.Config.Linux.SecurityContext.NamespaceOptions = test.pod
			in.sc().NamespaceOptions = test.ctr
			if test.change != nil {
				test.change(&in)
			}
			if got := paths(mustSpec(t, in)); !maps.Equal(got, test.want) {
				t.Errorf("got %v, want %v", got, test.want)
			}
		})
	}
}

func TestNamespacesRefused(t *testing.T) {
	t.Parallel()
	type o = runtimeapi.NamespaceOption
	for _, test := range []struct {
		ctr  *o
		code codes.Code
		err  string
	}{
		{&o{Network: nsNode}, codes.InvalidArgument, "namespace_options.network"},
		{&o{Ipc: nsNode}, codes.InvalidArgument, "namespace_options.ipc"},
		{&o{Pid: nsNode}, codes.InvalidArgument, "namespace_options.pid"},
		{&o{Pid: nsTarget, TargetId: "ghost"}, codes.InvalidArgument, `"ghost"`},
		{&o{CgroupnsOptions: cgroupns(nsPod)}, codes.InvalidArgument, "mode POD"},
		{&o{CgroupnsOptions: cgroupns(nsTarget)}, codes.InvalidArgument, "mode TARGET"},
		{&o{CgroupnsOptions: cgroupns(9)}, codes.InvalidArgument, "mode 9"},
		{&o{Pid: 9}, codes.InvalidArgument, "mode 9"},
		{&o{UsernsOptions: &runtimeapi.UserNamespace{Mode: nsPod}}, codes.InvalidArgument, "userns_options"},
	} {
		refused(t, func(in *ContainerInput) { in.sc().NamespaceOptions = test.ctr }, test.code, test.err)
	}
	in := testInput()
	in.sc().NamespaceOptions.UsernsOptions = &runtimeapi.UserNamespace{Mode: nsNode} // kubelet sends this without user namespaces
	mustSpec(t, in)
}

// A missing path must not put a container into the node's namespace.
func TestNamespacesNeverMissing(t *testing.T) {
	t.Parallel()
	refused(t, func(in *ContainerInput) { in.Pod.NetNS = "" }, codes.Internal, "network")
	for name, options := range map[string]*runtimeapi.NamespaceOption{
		"uts": {}, "ipc": {Network: nsNode}, "pid": {Network: nsNode, Ipc: nsNode},
	} {
		refused(t, func(in *ContainerInput) {
			in.Pod.PausePID, in.Pod.Config.Linux.SecurityContext.NamespaceOptions = 0, options
			in.sc().NamespaceOptions = nil
		}, codes.Internal, name)
	}
}
