package operator

import (
	"bytes"
	"encoding/json"
	"slices"
	"strings"
	"testing"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/checkpoint/process/archive"
	"berth/cmd/berth/podrun"
	"berth/cmd/berth/podyaml"
)

const testImageID = "sha256:6d5f7a0b3c1e9f8a7b6c5d4e3f2a1b0c9d8e7f6a5b4c3d2e1f0a9b8c7d6e5f4a"

func encoded(t *testing.T, m proto.Message) json.RawMessage {
	t.Helper()
	data, err := protojson.Marshal(m)
	if err != nil {
		t.Fatal(err)
	}
	return data
}

// savedPod returns a manifest of a pod with a container that accesses nothing of the node. The
// functions change its configurations.
func savedPod(t *testing.T, changePod func(*runtimeapi.PodSandboxConfig), change func(*runtimeapi.ContainerConfig)) *archive.Manifest {
	t.Helper()
	pod := &runtimeapi.PodSandboxConfig{
		Metadata: &runtimeapi.PodSandboxMetadata{Name: "web", Namespace: "shop", Uid: "old"}, Hostname: "web", LogDirectory: "/etc",
		Annotations: map[string]string{"a": "b"}, Labels: map[string]string{"app": "web", "io.kubernetes.pod.uid": "old"},
		Linux: &runtimeapi.LinuxPodSandboxConfig{CgroupParent: "/system.slice"},
	}
	c := &runtimeapi.ContainerConfig{
		Metadata: &runtimeapi.ContainerMetadata{Name: "other", Attempt: 3}, Image: &runtimeapi.ImageSpec{Image: "elsewhere"},
		LogPath: "../../../etc/passwd", Command: []string{"sleep"}, Args: []string{"1000"},
		Mounts: []*runtimeapi.Mount{{HostPath: "/etc/shadow", ContainerPath: "/etc/hosts"}, {ContainerPath: "/model", Image: &runtimeapi.ImageSpec{Image: "model"}}},
		Linux: &runtimeapi.LinuxContainerConfig{SecurityContext: &runtimeapi.LinuxContainerSecurityContext{
			Seccomp:     &runtimeapi.SecurityProfile{ProfileType: runtimeapi.SecurityProfile_RuntimeDefault},
			MaskedPaths: podyaml.MaskedPaths, ReadonlyPaths: podyaml.ReadonlyPaths,
		}},
	}
	if changePod != nil {
		changePod(pod)
	}
	if change != nil {
		change(c)
	}
	return &archive.Manifest{Version: 1,
		Pod:        &archive.Pod{Name: pod.GetMetadata().GetName(), Namespace: pod.GetMetadata().GetNamespace(), Handler: "crun", Config: encoded(t, pod)},
		Containers: []archive.Container{{Name: "app", Image: archive.Image{Name: "busybox", ID: testImageID}, Config: encoded(t, c)}},
	}
}

// Paths, identities and the image of a restored pod are those of this node, whatever the archive
// says.
func TestRestorePlanUsesThisNode(t *testing.T) {
	t.Parallel()
	plan, err := newRestorePlan(savedPod(t, nil, nil), podIdentity{name: "copy"})
	if err != nil {
		t.Fatal(err)
	}
	if access := plan.hostAccess(); len(access) > 0 {
		t.Errorf("accesses the node: %q", access)
	}
	dir := t.TempDir()
	files, err := podrun.MakeRestored(dir, "", "shop", "copy", plan.names())
	if err != nil {
		t.Fatal(err)
	}
	plan.use(files)
	plan.withoutAnnotations()
	pod, c := plan.sandbox, plan.containers[0]
	for _, test := range []struct{ what, got, want string }{
		{"name", pod.GetMetadata().GetName(), "copy"}, {"namespace", pod.GetMetadata().GetNamespace(), "shop"},
		{"uid", pod.GetMetadata().GetUid(), files.UID}, {"uid label", pod.GetLabels()["io.kubernetes.pod.uid"], files.UID},
		{"user's label", pod.GetLabels()["app"], "web"}, {"label of the container", c.GetLabels()["io.kubernetes.pod.name"], "copy"},
		{"log directory", pod.GetLogDirectory(), dir + "/" + files.UID + "/logs"}, {"log", c.GetLogPath(), "app/0.log"},
		{"cgroup", pod.GetLinux().GetCgroupParent(), ""}, {"handler", plan.handler, "crun"},
		{"container", c.GetMetadata().GetName(), "app"}, {"image", c.GetImage().GetImage(), testImageID},
		{"hosts file", c.GetMounts()[0].GetHostPath(), files.Hosts}, {"command", strings.Join(c.GetCommand(), " "), "sleep"},
	} {
		if test.got != test.want {
			t.Errorf("%s is %q, want %q", test.what, test.got, test.want)
		}
	}
	if len(pod.GetAnnotations())+len(c.GetAnnotations()) > 0 || c.GetMetadata().GetAttempt() != 0 {
		t.Errorf("annotations %v, %v; attempt %d", pod.GetAnnotations(), c.GetAnnotations(), c.GetMetadata().GetAttempt())
	}
}

// RestorePod refuses a privileged container in a pod that is not privileged.
func TestRestorePlanPermitsPrivileged(t *testing.T) {
	t.Parallel()
	for _, privileged := range []bool{false, true} {
		plan, err := newRestorePlan(savedPod(t, nil, func(c *runtimeapi.ContainerConfig) {
			c.Linux.SecurityContext.Privileged = privileged
		}), podIdentity{})
		if err != nil {
			t.Fatal(err)
		}
		plan.permitPrivileged()
		if got := plan.sandbox.GetLinux().GetSecurityContext().GetPrivileged(); got != privileged {
			t.Errorf("the pod is privileged: %v, its container: %v", got, privileged)
		}
	}
}

// without returns a copy of a list without a value.
func without(list []string, value string) []string {
	return slices.DeleteFunc(slices.Clone(list), func(v string) bool { return v == value })
}

// Everything that a pod of an archive would get from the node is listed.
func TestRestorePlanListsAccess(t *testing.T) {
	t.Parallel()
	options := func(o *runtimeapi.NamespaceOption) func(*runtimeapi.PodSandboxConfig) {
		return func(p *runtimeapi.PodSandboxConfig) {
			p.Linux.SecurityContext = &runtimeapi.LinuxSandboxSecurityContext{NamespaceOptions: o}
		}
	}
	security := func(change func(*runtimeapi.LinuxContainerSecurityContext)) func(*runtimeapi.ContainerConfig) {
		return func(c *runtimeapi.ContainerConfig) { change(c.Linux.SecurityContext) }
	}
	for want, change := range map[string]any{
		"network namespace of the node": options(&runtimeapi.NamespaceOption{Network: runtimeapi.NamespaceMode_NODE}),
		"PID namespace of the node":     options(&runtimeapi.NamespaceOption{Pid: runtimeapi.NamespaceMode_NODE}),
		"IPC namespace of the node":     options(&runtimeapi.NamespaceOption{Ipc: runtimeapi.NamespaceMode_NODE}),
		"privileged": func(p *runtimeapi.PodSandboxConfig) {
			p.Linux.SecurityContext = &runtimeapi.LinuxSandboxSecurityContext{Privileged: true}
		},
		"sysctl kernel.msgmax=1": func(p *runtimeapi.PodSandboxConfig) { p.Linux.Sysctls = map[string]string{"kernel.msgmax": "1"} },
		"host port 80": func(p *runtimeapi.PodSandboxConfig) {
			p.PortMappings = []*runtimeapi.PortMapping{{HostPort: 80, ContainerPort: 80}, {ContainerPort: 81}}
		},
		"container app: mount of /": func(c *runtimeapi.ContainerConfig) {
			c.Mounts = append(c.Mounts, &runtimeapi.Mount{HostPath: "/", ContainerPath: "/host"})
		},
		"container app: device /dev/sda": func(c *runtimeapi.ContainerConfig) {
			c.Devices = []*runtimeapi.Device{{HostPath: "/dev/sda"}}
		},
		"container app: device vendor.example/dev=0": func(c *runtimeapi.ContainerConfig) {
			c.CDIDevices = []*runtimeapi.CDIDevice{{Name: "vendor.example/dev=0"}}
		},
		"container app: privileged": security(func(s *runtimeapi.LinuxContainerSecurityContext) { s.Privileged = true }),
		"container app: PID namespace of the node": security(func(s *runtimeapi.LinuxContainerSecurityContext) {
			s.NamespaceOptions = &runtimeapi.NamespaceOption{Pid: runtimeapi.NamespaceMode_NODE}
		}),
		"container app: capability SYS_ADMIN": security(func(s *runtimeapi.LinuxContainerSecurityContext) {
			s.Capabilities = &runtimeapi.Capability{AddCapabilities: []string{"SYS_ADMIN"}}
		}),
		"container app: capability NET_ADMIN": security(func(s *runtimeapi.LinuxContainerSecurityContext) {
			s.Capabilities = &runtimeapi.Capability{AddAmbientCapabilities: []string{"NET_ADMIN"}}
		}),
		"container app: not masked: " + strings.Join(podyaml.MaskedPaths, ", "): security(
			func(s *runtimeapi.LinuxContainerSecurityContext) { s.MaskedPaths = nil }),
		"container app: not masked: /proc/kcore": security(func(s *runtimeapi.LinuxContainerSecurityContext) {
			s.MaskedPaths = without(s.GetMaskedPaths(), "/proc/kcore")
		}),
		"container app: not read-only: /proc/sys": security(func(s *runtimeapi.LinuxContainerSecurityContext) {
			s.ReadonlyPaths = without(s.GetReadonlyPaths(), "/proc/sys")
		}),
		"container app: not read-only: " + strings.Join(podyaml.ReadonlyPaths, ", "): security(
			func(s *runtimeapi.LinuxContainerSecurityContext) { s.ReadonlyPaths = nil }),
		"container app: SELinux label ::spc_t:": security(func(s *runtimeapi.LinuxContainerSecurityContext) {
			s.SelinuxOptions = &runtimeapi.SELinuxOption{Type: "spc_t"}
		}),
		"SELinux label system_u:system_r:spc_t:s0": func(p *runtimeapi.PodSandboxConfig) {
			p.Linux.SecurityContext = &runtimeapi.LinuxSandboxSecurityContext{SelinuxOptions: &runtimeapi.SELinuxOption{
				User: "system_u", Role: "system_r", Type: "spc_t", Level: "s0"}}
		},
		"container app: seccomp profile unconfined": security(func(s *runtimeapi.LinuxContainerSecurityContext) { s.Seccomp = nil }),
		"container app: seccomp profile x.json": security(func(s *runtimeapi.LinuxContainerSecurityContext) {
			s.Seccomp = &runtimeapi.SecurityProfile{ProfileType: runtimeapi.SecurityProfile_Localhost, LocalhostRef: "x.json"}
		}),
		"container app: AppArmor profile unconfined": security(func(s *runtimeapi.LinuxContainerSecurityContext) {
			s.Apparmor = &runtimeapi.SecurityProfile{ProfileType: runtimeapi.SecurityProfile_Unconfined}
		}),
	} {
		t.Run(want, func(t *testing.T) {
			t.Parallel()
			pod, _ := change.(func(*runtimeapi.PodSandboxConfig))
			c, _ := change.(func(*runtimeapi.ContainerConfig))
			plan, err := newRestorePlan(savedPod(t, pod, c), podIdentity{})
			if err != nil {
				t.Fatal(err)
			}
			if access := plan.hostAccess(); !slices.Equal(access, []string{want}) {
				t.Errorf("%q", access)
			}
		})
	}
}

// Manifests that name no valid pod are refused.
func TestRestorePlanRefuses(t *testing.T) {
	t.Parallel()
	for want, change := range map[string]func(*archive.Manifest){
		"set --name":                       func(m *archive.Manifest) { m.Pod.Name = "../../etc" },
		"set --name and --namespace":       func(m *archive.Manifest) { m.Pod.Namespace = "a/b" },
		"configuration of the pod: it is":  func(m *archive.Manifest) { m.Pod.Config = nil },
		"unknown field":                    func(m *archive.Manifest) { m.Pod.Config = json.RawMessage(`{"hooks":1}`) },
		"configuration of container app":   func(m *archive.Manifest) { m.Containers[0].Config = json.RawMessage(`[]`) },
		"cannot be the name of a director": func(m *archive.Manifest) { m.Containers[0].Name = "../x" },
	} {
		m := savedPod(t, nil, nil)
		change(m)
		if _, err := newRestorePlan(m, podIdentity{}); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %q", err, want)
		}
	}
}

// Texts of an archive cannot control the terminal.
func TestRestorePlanPrintsPlainText(t *testing.T) {
	t.Parallel()
	plan, err := newRestorePlan(savedPod(t, nil, func(c *runtimeapi.ContainerConfig) {
		c.Command = []string{"sh\x1b]0;title\x07\n  uses the node: nothing", strings.Repeat("x", 100000)}
	}), podIdentity{})
	if err != nil {
		t.Fatal(err)
	}
	var out bytes.Buffer
	if err := plan.print(&out, []string{"mount of /"}); err != nil {
		t.Fatal(err)
	}
	if strings.ContainsAny(out.String(), "\x1b\x07") || strings.Count(out.String(), "\n  uses the node") != 1 || out.Len() > 2000 {
		t.Errorf("%d bytes: %q", out.Len(), out.String())
	}
}

// Access to this node needs a flag.
func TestRestorePermit(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		name    string
		options restoreOptions
		access  []string
		want    string
	}{
		{"none", restoreOptions{}, nil, ""},
		{"access", restoreOptions{}, []string{"mount of /"}, "mount of /; use --allow-node-access"},
		{"access allowed", restoreOptions{allowAccess: true}, []string{"mount of /"}, ""},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			plan, err := newRestorePlan(savedPod(t, nil, nil), podIdentity{})
			if err != nil {
				t.Fatal(err)
			}
			err = test.options.permit(plan, test.access)
			if (err == nil) != (test.want == "") || err != nil && !strings.Contains(err.Error(), test.want) {
				t.Errorf("%v, want %q", err, test.want)
			}
			if kept := len(plan.sandbox.GetAnnotations()) > 0; err == nil && kept != test.options.allowAccess {
				t.Errorf("annotations kept: %v", kept)
			}
		})
	}
}
