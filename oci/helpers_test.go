package oci

import (
	"fmt"
	"io/fs"
	"strings"
	"testing"

	"github.com/moby/sys/capability"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"github.com/opencontainers/runtime-spec/specs-go"
	"google.golang.org/grpc/codes"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/internal/host"
	"berth/internal/testutil"
	"berth/oci/users"
)

// fakeFiles is a host with few paths.
type fakeFiles struct {
	paths    map[string]string // existing path -> path without links
	mounts   map[string]host.Propagation
	devices  map[string][]host.Device
	profiles map[string]string
	apparmor []string
}

func (f fakeFiles) Resolve(p string) (string, error) {
	if to, ok := f.paths[p]; ok {
		return to, nil
	}
	if _, ok := f.devices[p]; ok {
		return p, nil
	}
	return "", fmt.Errorf("lstat %s: %w", p, fs.ErrNotExist)
}

func (f fakeFiles) Propagation(p string) (host.Propagation, error) {
	for at, prop := range f.mounts {
		if isBelow(p, at) {
			return prop, nil
		}
	}
	return host.Propagation{Mountpoint: "/"}, nil
}

func (f fakeFiles) Devices(p string) ([]host.Device, error) {
	if d, ok := f.devices[p]; ok {
		return d, nil
	}
	return nil, fmt.Errorf("%s: %w", p, host.ErrNotDevice)
}

func (f fakeFiles) ReadProfile(p string) ([]byte, error) {
	if body, ok := f.profiles[p]; ok {
		return []byte(body), nil
	}
	return nil, fmt.Errorf("open %s: %w", p, fs.ErrNotExist)
}

func (f fakeFiles) AppArmorLoaded(name string) (bool, error) {
	for _, n := range f.apparmor {
		if n == name {
			return true, nil
		}
	}
	return false, nil
}

var (
	fuse = host.Device{Path: "/dev/fuse", Type: "c", Major: 10, Minor: 229, Mode: 0o666}
	sda  = host.Device{Path: "/dev/sda", Type: "b", Major: 8, Minor: 0, Mode: 0o660, GID: 6}
	pcm  = host.Device{Path: "/dev/snd/pcm", Type: "c", Major: 116, Minor: 2, Mode: 0o660, GID: 29}
	seq  = host.Device{Path: "/dev/snd/by-path/seq", Type: "c", Major: 116, Minor: 1, Mode: 0o660, GID: 29}
)

func testFiles() fakeFiles {
	return fakeFiles{
		paths: map[string]string{
			"/srv/data": "/srv/data", "/srv/link": "/srv/data", "/srv/shared/vol": "/srv/shared/vol",
			"/srv/slave/vol": "/srv/slave/vol", "/dev": "/dev", "/sys": "/sys", "/dev/disk/by-id/x": "/dev/sda",
		},
		mounts: map[string]host.Propagation{
			"/srv/shared": {Mountpoint: "/srv/shared", Shared: true},
			"/srv/slave":  {Mountpoint: "/srv/slave", Slave: true},
		},
		devices: map[string][]host.Device{
			"/dev/fuse": {fuse}, "/dev/sda": {sda}, "/dev/snd": {seq, pcm}, "/dev/empty": nil, "/dev": {fuse, sda, pcm},
		},
		profiles: map[string]string{
			"/profiles/allow.json": `{"defaultAction":"SCMP_ACT_ALLOW","syscalls":[{"names":["mkdir"],"action":"SCMP_ACT_ERRNO"}]}`,
			"/profiles/empty.json": `{}`,
		},
		apparmor: []string{"custom"},
	}
}

// allNames returns all capabilities, ordered by number.
func allNames() []string {
	known := capability.ListKnown()
	names := make([]string, len(known))
	for _, c := range known {
		names[int(c)] = "CAP_" + strings.ToUpper(c.String())
	}
	return names
}

// testHost returns a usual node: cgroup v2 and all features except AppArmor and SELinux.
func testHost() Host {
	return Host{
		Hostname: "node-1", Kernel: "6.12.0", KernelMajor: 6, KernelMinor: 12,
		CgroupV2: true, Seccomp: true, Capabilities: allNames(), OOMScoreAdjMin: -1000,
		HugepageSizes: []string{"1GB", "2MB"}, SwapAccounting: true, RecursiveReadOnly: true, RootShared: true,
	}
}

func testPod() Pod {
	return Pod{
		ID: "pod1",
		Config: &runtimeapi.PodSandboxConfig{
			Metadata: &runtimeapi.PodSandboxMetadata{Name: "web", Namespace: "default", Uid: "u1"},
			Hostname: "web-0",
			Linux:    &runtimeapi.LinuxPodSandboxConfig{SecurityContext: &runtimeapi.LinuxSandboxSecurityContext{}},
		},
		CgroupParent: "/kubepods/pod1",
		NetNS:        "/run/netns/berth-pod1",
		PausePID:     4242,
		ResolvConf:   "/var/lib/berth/sandboxes/pod1/resolv.conf",
		Hostname:     "/var/lib/berth/sandboxes/pod1/hostname",
		Hosts:        "/var/lib/berth/sandboxes/pod1/hosts",
		Shm:          "/run/berth/pods/shm/pod1",
	}
}

// testInput returns a small container that tests modify.
func testInput() ContainerInput {
	return ContainerInput{
		ID:  "ctr1",
		Pod: testPod(),
		Config: &runtimeapi.ContainerConfig{
			Metadata: &runtimeapi.ContainerMetadata{Name: "app"},
			Linux: &runtimeapi.LinuxContainerConfig{
				Resources: &runtimeapi.LinuxContainerResources{},
				SecurityContext: &runtimeapi.LinuxContainerSecurityContext{
					NamespaceOptions: &runtimeapi.NamespaceOption{Pid: runtimeapi.NamespaceMode_CONTAINER},
				},
			},
		},
		Image: &ocispec.ImageConfig{Cmd: []string{"/bin/app"}},
		User:  users.User{Groups: []uint32{0}, Home: "/root"},
		Host:  testHost(),
		Files: testFiles(),
	}
}

func testSandbox() SandboxInput {
	return SandboxInput{Pod: testPod(), User: users.User{Groups: []uint32{0}}, Host: testHost(), Files: testFiles()}
}

// mustSpec builds a spec without an error.
func mustSpec(t *testing.T, in ContainerInput) *specs.Spec {
	t.Helper()
	spec, err := ContainerSpec(in)
	if err != nil {
		t.Fatalf("ContainerSpec: %v", err)
	}
	return spec
}

// refused checks that a changed testInput is refused.
func refused(t *testing.T, change func(*ContainerInput), code codes.Code, parts ...string) {
	t.Helper()
	in := testInput()
	change(&in)
	_, err := ContainerSpec(in)
	testutil.WantError(t, err, code, parts...)
}

func (in *ContainerInput) sc() *runtimeapi.LinuxContainerSecurityContext {
	return in.Config.Linux.SecurityContext
}

// privilege makes container and pod privileged.
func (in *ContainerInput) privilege() {
	in.sc().Privileged = true
	in.Pod.Config.Linux.SecurityContext.Privileged = true
}

func findMount(spec *specs.Spec, dest string) *specs.Mount {
	for i := range spec.Mounts {
		if spec.Mounts[i].Destination == dest {
			return &spec.Mounts[i]
		}
	}
	return nil
}

func findNamespace(spec *specs.Spec, t specs.LinuxNamespaceType) (path string, listed bool) {
	for _, ns := range spec.Linux.Namespaces {
		if ns.Type == t {
			return ns.Path, true
		}
	}
	return "", false
}
