package integration

import (
	"context"
	"math"
	"math/rand/v2"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/integration/harness"
	"berth/internal/errdefs"
)

// The server's own fuzz tests send arbitrary bytes to a fake manager. These tests send requests
// with unusual fields to a real daemon, a new one for each request. The daemon runs accepted
// requests, and the leak check follows. A CRI client may name any path of the node, so the tests
// move paths below their own directories.
//
//	go test -tags seccomp -exec contrib/machine ./integration -run '^$' -fuzz FuzzCreateContainer

// fits fails the test if the method does not document the error's code.
func fits(t *testing.T, method string, err error) {
	t.Helper()
	if code := harness.CodeOf(err); !errdefs.Allowed(method, code, status.Convert(err).Message()) {
		t.Errorf("%s: undocumented code %s: %v", method, code, err)
	}
}

// below returns a path inside dir that resembles path.
func below(dir, path string) string {
	if path == "" {
		return ""
	}
	return filepath.Join(dir, filepath.Join("/", strings.ReplaceAll(path, "\x00", "0")))
}

// confinePod keeps a pod within the test's directories and cgroups.
func confinePod(d *harness.Daemon, config *runtimeapi.PodSandboxConfig) {
	config.LogDirectory = below(d.LogDir, config.LogDirectory)
	if len(config.LogDirectory) > 1024 {
		config.LogDirectory = ""
	}
	if linux := config.Linux; linux != nil && linux.CgroupParent != "" {
		// The parent has one level, because the fixture removes only the pod's own cgroup, as
		// kubelet does.
		name := strings.NewReplacer("/", "-", "\x00", "-").Replace(linux.CgroupParent)
		linux.CgroupParent = "/" + harness.Machine + "/pod" + filepath.Base(d.Dir) + name[:min(len(name), 200)]
		d.Parents = append(d.Parents, linux.CgroupParent)
	}
}

// confineContainer keeps a container within the test's directories, and mostly sets an existing
// image.
func confineContainer(d *harness.Daemon, config *runtimeapi.ContainerConfig, r *rand.Rand) {
	if config.Image != nil && r.IntN(8) > 0 {
		config.Image.Image = harness.BaseImage
	}
	for _, m := range config.Mounts {
		m.HostPath = below(d.LogDir, m.HostPath)
	}
	for _, dev := range config.Devices {
		dev.HostPath = pick(r, []string{"/dev/null", "/dev/zero", "/dev/no-such", "/dev/null/x", ""})
	}
}

// addSeeds adds the unchanged message of each form, and some scrambled ones.
func addSeeds(f *testing.F, forms int) {
	for form := range forms {
		for seed := range uint64(4) {
			f.Add(uint8(form), seed)
		}
	}
}

// scrambled returns a copy of one of the forms, scrambled unless seed is 0.
func scrambled[T proto.Message](forms []T, form uint8, seed uint64) T {
	m := proto.Clone(forms[int(form)%len(forms)]).(T)
	if seed != 0 {
		scramble(m.ProtoReflect(), rand.New(rand.NewPCG(seed, 0)))
	}
	return m
}

func FuzzRunPodSandbox(f *testing.F) {
	metadata := &runtimeapi.PodSandboxMetadata{Name: "n", Namespace: "s", Uid: "u", Attempt: 1}
	forms := []*runtimeapi.PodSandboxConfig{
		{Metadata: metadata, Hostname: "h", LogDirectory: "/logs", Linux: &runtimeapi.LinuxPodSandboxConfig{CgroupParent: "/p"},
			DnsConfig:    &runtimeapi.DNSConfig{Servers: []string{"10.0.0.1"}, Searches: []string{"a.b"}, Options: []string{"ndots:5"}},
			PortMappings: []*runtimeapi.PortMapping{{HostPort: 4000, ContainerPort: 80, HostIp: "127.0.0.1"}}},
		{Metadata: metadata, Linux: &runtimeapi.LinuxPodSandboxConfig{CgroupParent: "/p", Sysctls: map[string]string{"net.ipv4.ip_forward": "1"},
			SecurityContext: &runtimeapi.LinuxSandboxSecurityContext{RunAsUser: &runtimeapi.Int64Value{Value: 5}, SupplementalGroups: []int64{7},
				NamespaceOptions: &runtimeapi.NamespaceOption{Network: runtimeapi.NamespaceMode_NODE}},
			Overhead: &runtimeapi.LinuxContainerResources{MemoryLimitInBytes: 1 << 20}}},
		{Metadata: metadata, Hostname: "h", Linux: &runtimeapi.LinuxPodSandboxConfig{CgroupParent: "/p",
			SecurityContext: &runtimeapi.LinuxSandboxSecurityContext{
				NamespaceOptions: &runtimeapi.NamespaceOption{Network: runtimeapi.NamespaceMode_NODE, UsernsOptions: usernsOptions(fuzzUserNamespace)}}}},
	}
	addSeeds(f, len(forms))
	f.Fuzz(func(t *testing.T, form uint8, seed uint64) {
		config := scrambled(forms, form, seed)
		d := harness.StartDaemon(t)
		confinePod(d, config)
		id, err := harness.RawRuntime(t, d).RunPodSandbox(t.Context(), &runtimeapi.RunPodSandboxRequest{Config: config})
		fits(t, "RunPodSandbox", err)
		if err == nil {
			d.Objects = append(d.Objects, id.PodSandboxId)
			harness.Get(d.Cri.PodSandboxStatus(t.Context(), id.PodSandboxId, true))(t)
		}
	})
}

func FuzzCreateContainer(f *testing.F) {
	metadata := &runtimeapi.ContainerMetadata{Name: "n", Attempt: 1}
	image := &runtimeapi.ImageSpec{Image: harness.BaseImage}
	forms := []*runtimeapi.ContainerConfig{
		{Metadata: metadata, Image: image, Command: []string{"true"}, LogPath: "l", WorkingDir: "/w", StopSignal: 9,
			Envs:   []*runtimeapi.KeyValue{{Key: "K", Value: []byte("v")}},
			Mounts: []*runtimeapi.Mount{{ContainerPath: "/m", HostPath: "/", Readonly: true}}},
		{Metadata: metadata, Image: image, Command: []string{"sh", "-c", "exit 3"}, Tty: true, Stdin: true, StdinOnce: true,
			Linux: &runtimeapi.LinuxContainerConfig{
				Resources: &runtimeapi.LinuxContainerResources{CpuShares: 10, MemoryLimitInBytes: 32 << 20, HugepageLimits: []*runtimeapi.HugepageLimit{{PageSize: "2MB", Limit: 1}}},
				SecurityContext: &runtimeapi.LinuxContainerSecurityContext{RunAsUsername: "root", Capabilities: &runtimeapi.Capability{AddCapabilities: []string{"NET_ADMIN"}},
					NamespaceOptions: &runtimeapi.NamespaceOption{Network: runtimeapi.NamespaceMode_NODE, Pid: runtimeapi.NamespaceMode_CONTAINER}, MaskedPaths: []string{"/proc/keys"}}}},
		{Metadata: metadata, Image: image, Command: []string{"true"},
			Devices: []*runtimeapi.Device{{HostPath: "/dev/null", ContainerPath: "/dev/d", Permissions: "rw"}},
			Mounts:  []*runtimeapi.Mount{{ContainerPath: "/m", HostPath: "/", UidMappings: idMapping(fuzzUserNamespace), GidMappings: idMapping(fuzzUserNamespace)}},
			Linux: &runtimeapi.LinuxContainerConfig{SecurityContext: &runtimeapi.LinuxContainerSecurityContext{
				NamespaceOptions: &runtimeapi.NamespaceOption{Pid: runtimeapi.NamespaceMode_CONTAINER, UsernsOptions: usernsOptions(fuzzUserNamespace)}}}},
	}
	// Each form runs in a pod of each kind. The first kind is the fastest.
	addSeeds(f, len(forms))
	for form := len(forms); form < len(forms)*len(fuzzPods); form++ {
		f.Add(uint8(form), uint64(form))
	}
	f.Fuzz(func(t *testing.T, form uint8, seed uint64) {
		config := scrambled(forms, form, seed)
		kind := fuzzPods[int(form)/len(forms)%len(fuzzPods)]
		d := harness.StartDaemon(t)
		confineContainer(d, config, rand.New(rand.NewPCG(seed, 1)))
		d.Pull(t, harness.BaseImage)
		pod := d.RunPod(t, kind)
		runtime := harness.RawRuntime(t, d)
		created, err := runtime.CreateContainer(t.Context(), &runtimeapi.CreateContainerRequest{PodSandboxId: pod.Id, Config: config, SandboxConfig: pod.Config})
		fits(t, "CreateContainer", err)
		if err != nil {
			return
		}
		d.Objects = append(d.Objects, created.ContainerId)
		_, err = runtime.StartContainer(t.Context(), &runtimeapi.StartContainerRequest{ContainerId: created.ContainerId})
		fits(t, "StartContainer", err)
		harness.Get(d.Cri.ContainerStatus(t.Context(), created.ContainerId, true))(t)
	})
}

// FuzzRunning sends requests to a running container: resources, execs, stop timeouts.
func FuzzRunning(f *testing.F) {
	f.Add([]byte{}, int64(0), "true", "x")
	f.Add([]byte{}, int64(-1), "", "")
	addResources := func(r *runtimeapi.LinuxContainerResources) {
		data, err := proto.Marshal(r)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(data, int64(1), "sh", "-c")
	}
	addResources(&runtimeapi.LinuxContainerResources{MemoryLimitInBytes: 1, CpuQuota: 1000, CpuPeriod: 1})
	addResources(&runtimeapi.LinuxContainerResources{MemoryLimitInBytes: 64 << 20, MemorySwapLimitInBytes: 1, CpuShares: 1 << 40})
	addResources(&runtimeapi.LinuxContainerResources{CpusetCpus: "99999", CpusetMems: "-", Unified: map[string]string{"../x": "y"}})
	f.Fuzz(func(t *testing.T, resources []byte, seconds int64, command, argument string) {
		update := &runtimeapi.LinuxContainerResources{}
		if proto.Unmarshal(resources, update) != nil {
			t.Skip("no message")
		}
		d := harness.StartDaemon(t)
		c := d.RunPod(t, harness.HostNetwork).Run(t)
		runtime := harness.RawRuntime(t, d)
		_, err := runtime.UpdateContainerResources(t.Context(), &runtimeapi.UpdateContainerResourcesRequest{ContainerId: c.Id, Linux: update})
		fits(t, "UpdateContainerResources", err)
		_, err = runtime.UpdatePodSandboxResources(t.Context(), &runtimeapi.UpdatePodSandboxResourcesRequest{PodSandboxId: c.Pod.Id, Resources: update, Overhead: update})
		fits(t, "UpdatePodSandboxResources", err)
		ctx, cancel := context.WithTimeout(t.Context(), harness.Patience)
		defer cancel()
		_, err = runtime.ExecSync(ctx, &runtimeapi.ExecSyncRequest{ContainerId: c.Id, Cmd: []string{command, argument}, Timeout: 1})
		fits(t, "ExecSync", err)
		if ctx.Err() != nil {
			t.Errorf("ExecSync with a timeout of a second does not return: %v", err)
		}
		if seconds > 1 {
			seconds = 1
		}
		_, err = runtime.StopContainer(t.Context(), &runtimeapi.StopContainerRequest{ContainerId: c.Id, Timeout: seconds})
		fits(t, "StopContainer", err)
	})
}

// Values that clients send by mistake or malice.
var (
	unusualStrings = []string{"", "a", "..", "../../../etc", "/", "//", "/proc/self/fd/3", "/dev", "a\x00b", "a\nb=c", "\xff\xfe", "%s%n", "kubepods.slice",
		"-1", "0", "4294967296", "0-99999", ",", "sha256:", "2MB", "ALL", "CAP_SYS_ADMIN", "rwm", "net.ipv4.ip_forward", "unconfined", "localhost/x",
		"10.0.0.0/33", "::", strings.Repeat("x", 5000), strings.Repeat("/x", 3000)}
	unusualNumbers = []int64{0, 1, -1, 2, 3, 7, 99, 999, 1000, 65535, 65536, math.MaxInt32, math.MinInt32, math.MaxUint32, math.MaxUint32 + 1, math.MaxInt64, math.MinInt64}
)

// scramble changes some fields of a message, at any depth.
func scramble(m protoreflect.Message, r *rand.Rand) {
	fields := m.Descriptor().Fields()
	for range 1 + r.IntN(3) {
		field := fields.Get(r.IntN(fields.Len()))
		switch {
		case r.IntN(8) == 0:
			m.Clear(field)
		case field.IsMap():
			entries := m.Mutable(field).Map()
			for range r.IntN(3) {
				entries.Set(unusual(field.MapKey(), r).MapKey(), unusual(field.MapValue(), r))
			}
		case field.IsList():
			list := m.Mutable(field).List()
			for range r.IntN(4) {
				if field.Message() == nil {
					list.Append(unusual(field, r))
					continue
				}
				scramble(list.AppendMutable().Message(), r)
			}
		case field.Message() != nil:
			scramble(m.Mutable(field).Message(), r)
		default:
			m.Set(field, unusual(field, r))
		}
	}
}

// unusual returns an unusual value of a field's type. Its text is valid UTF-8, because the client
// refuses to send other text.
func unusual(field protoreflect.FieldDescriptor, r *rand.Rand) protoreflect.Value {
	number := unusualNumbers[r.IntN(len(unusualNumbers))]
	text := unusualStrings[r.IntN(len(unusualStrings))]
	switch field.Kind() {
	case protoreflect.StringKind:
		return protoreflect.ValueOfString(strings.ToValidUTF8(text, "?"))
	case protoreflect.BytesKind:
		return protoreflect.ValueOfBytes([]byte(text))
	case protoreflect.BoolKind:
		return protoreflect.ValueOfBool(r.IntN(2) == 0)
	case protoreflect.EnumKind:
		return protoreflect.ValueOfEnum(protoreflect.EnumNumber(int32(number)))
	case protoreflect.Int32Kind:
		return protoreflect.ValueOfInt32(int32(number))
	case protoreflect.Uint32Kind:
		return protoreflect.ValueOfUint32(uint32(number))
	case protoreflect.Uint64Kind:
		return protoreflect.ValueOfUint64(uint64(number))
	case protoreflect.DoubleKind:
		return protoreflect.ValueOfFloat64(float64(number))
	}
	return protoreflect.ValueOfInt64(number)
}

// TestScrambleReachesEveryField checks the fuzz tests: they change every field of every request.
func TestScrambleReachesEveryField(t *testing.T) {
	const attempts, pause = 100_000, 1000
	for _, m := range methods(t) {
		touched := map[protoreflect.FullName]bool{}
		missed := untouched(m.input.Descriptor(), nil, touched)
		for seed := uint64(0); seed < attempts && len(missed) > 0; seed++ {
			request := m.input.New()
			scramble(request, rand.New(rand.NewPCG(seed, 0)))
			note(request, touched)
			if seed%pause == pause-1 {
				missed = untouched(m.input.Descriptor(), nil, touched)
			}
		}
		if len(missed) > 0 {
			t.Errorf("%s: never changed: %v", m.name, missed)
		}
	}
}

// untouched returns the fields of a message, at any depth, that are not in touched.
func untouched(d protoreflect.MessageDescriptor, above []protoreflect.FullName, touched map[protoreflect.FullName]bool) (missed []protoreflect.FullName) {
	if slices.Contains(above, d.FullName()) {
		return nil
	}
	for i := range d.Fields().Len() {
		field := d.Fields().Get(i)
		if !touched[field.FullName()] {
			missed = append(missed, field.FullName())
		}
		if field.Message() != nil && !field.IsMap() {
			missed = append(missed, untouched(field.Message(), append(above, d.FullName()), touched)...)
		}
	}
	return missed
}

// note adds the set fields to touched.
func note(m protoreflect.Message, touched map[protoreflect.FullName]bool) {
	m.Range(func(field protoreflect.FieldDescriptor, value protoreflect.Value) bool {
		touched[field.FullName()] = true
		switch {
		case field.Message() == nil || field.IsMap():
		case field.IsList():
			for i := range value.List().Len() {
				note(value.List().Get(i).Message(), touched)
			}
		default:
			note(value.Message(), touched)
		}
		return true
	})
}
