package oci

import (
	"encoding/json"
	"path"
	"slices"
	"strings"
	"testing"

	"github.com/opencontainers/runtime-spec/specs-go"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/internal/errdefs"
	"berth/internal/testutil"
)

// FuzzContainerSpec builds specs from arbitrary requests and checks the invariants of every spec.
func FuzzContainerSpec(f *testing.F) {
	privileged := testInput()
	privileged.privilege()
	privileged.Config.Devices = []*runtimeapi.Device{{HostPath: "/dev/snd"}}
	hostNet := testInput()
	hostNet.Pod.Config.Linux.SecurityContext.NamespaceOptions = &runtimeapi.NamespaceOption{Network: nsNode}
	hostNet.sc().Seccomp = profile(runtimeDefault, "")
	hostNet.Config.Mounts = []*runtimeapi.Mount{{ContainerPath: "/dev", HostPath: "/dev", Readonly: true}}
	users := testInput()
	users.Pod.giveUserNamespace(usernsOptions(65536, 65536))
	users.sc().NamespaceOptions.UsernsOptions = usernsOptions(65536, 65536)
	users.Config.Mounts = []*runtimeapi.Mount{{ContainerPath: "/data", HostPath: "/srv/data", UidMappings: mapping(0, 65536, 65536), GidMappings: mapping(0, 7, 8)}}
	for _, in := range []ContainerInput{testInput(), kubeletInput(), privileged, hostNet, users} {
		config, err := proto.Marshal(in.Config)
		testutil.Must(f, err)
		pod, err := proto.Marshal(in.Pod.Config)
		testutil.Must(f, err)
		f.Add(config, pod)
	}
	withImage, err := proto.Marshal(&runtimeapi.ContainerConfig{Command: []string{"x"}, Mounts: []*runtimeapi.Mount{imageMount(nil)}})
	testutil.Must(f, err)
	f.Add(withImage, []byte{})
	f.Add([]byte{}, []byte{})
	f.Fuzz(func(t *testing.T, config, pod []byte) {
		in := testInput()
		in.Config, in.Pod.Config = &runtimeapi.ContainerConfig{}, &runtimeapi.PodSandboxConfig{}
		if proto.Unmarshal(config, in.Config) != nil || proto.Unmarshal(pod, in.Pod.Config) != nil {
			return
		}
		in.Pod.CgroupParent = in.Pod.Config.GetLinux().GetCgroupParent()
		in.ImageVolumes = map[int]string{}
		for i := range in.Config.GetMounts() {
			in.ImageVolumes[i] = imagePlace
		}
		var err error
		if in.Pod.Mappings, err = UserNamespace(in.Pod.Config); err != nil {
			checkRefusal(t, err)
			return
		}
		in.Pod.UserNS = testUserNS
		spec, err := ContainerSpec(in)
		if err != nil {
			checkRefusal(t, err)
		} else {
			checkContainer(t, in, spec)
		}
		sandbox := testSandbox()
		sandbox.Pod = in.Pod
		if spec, err = SandboxSpec(sandbox); err != nil {
			checkRefusal(t, err)
		} else {
			checkCommon(t, in.Pod, spec)
		}
	})
}

// imagePlace is the mount point of fuzzed containers' image volumes.
const imagePlace = "/run/berth/c/ctr1/volume"

// checkRefusal checks that an error has a code for invalid requests.
func checkRefusal(t *testing.T, err error) {
	t.Helper()
	switch errdefs.Code(err) {
	case codes.InvalidArgument, codes.FailedPrecondition, codes.Unimplemented:
	default:
		t.Errorf("code %v of %v", errdefs.Code(err), err)
	}
}

// checkCommon checks the invariants of containers and pauses.
func checkCommon(t *testing.T, pod Pod, spec *specs.Spec) {
	t.Helper()
	if _, err := json.Marshal(spec); err != nil {
		t.Errorf("encode spec: %v", err)
	}
	if spec.Annotations != nil || spec.Hooks != nil {
		t.Errorf("annotations %v, hooks %v", spec.Annotations, spec.Hooks)
	}
	for _, ns := range []struct {
		t     specs.LinuxNamespaceType
		hosts bool
	}{{specs.MountNamespace, false}, {specs.NetworkNamespace, pod.hostNetwork()}, {specs.UTSNamespace, pod.hostNetwork()}, {specs.IPCNamespace, pod.hostIPC()}} {
		if _, listed := findNamespace(spec, ns.t); listed == ns.hosts {
			t.Errorf("%s namespace listed: %v", ns.t, listed)
		}
	}
	if _, listed := findNamespace(spec, specs.UserNamespace); listed != (pod.Mappings != nil) {
		t.Errorf("user namespace listed: %v", listed)
	}
	if strings.Contains(spec.Linux.CgroupsPath, "..") {
		t.Errorf("cgroup %q", spec.Linux.CgroupsPath)
	}
	for _, s := range append(slices.Clone(spec.Process.Args), spec.Process.Env...) {
		if strings.IndexByte(s, 0) >= 0 {
			t.Errorf("NUL in %q", s)
		}
	}
}

func checkContainer(t *testing.T, in ContainerInput, spec *specs.Spec) {
	t.Helper()
	checkCommon(t, in.Pod, spec)
	if _, listed := findNamespace(spec, specs.PIDNamespace); !listed && !in.Pod.hostPID() {
		t.Error("on the node's PID namespace")
	}
	if !slices.ContainsFunc(spec.Process.Env, func(kv string) bool { return strings.HasPrefix(kv, "HOME=/") }) &&
		!slices.ContainsFunc(in.Config.GetEnvs(), func(kv *runtimeapi.KeyValue) bool { return kv.GetKey() == "HOME" }) {
		t.Errorf("no HOME in %q", spec.Process.Env)
	}
	if c := spec.Process.Capabilities; !slices.Equal(c.Inheritable, c.Ambient) || !slices.Equal(c.Effective, c.Bounding) {
		t.Errorf("capabilities %+v", c)
	}
	for _, m := range spec.Mounts {
		if m.Destination != path.Clean(m.Destination) || !path.IsAbs(m.Destination) || m.Destination == "/" {
			t.Errorf("mount at %q", m.Destination)
		}
		if m.Source == imagePlace && (slices.Contains(m.Options, "rw") || slices.Contains(m.Options, "rshared")) {
			t.Errorf("image mounted with %q", m.Options)
		}
	}
	if cwd := spec.Process.Cwd; cwd != path.Clean(cwd) || isProcessDir(cwd) {
		t.Errorf("cwd %q", cwd)
	}
	if first := spec.Linux.Resources.Devices[0]; first.Allow != in.security().GetPrivileged() {
		t.Errorf("first device rule %+v", first)
	}
}
