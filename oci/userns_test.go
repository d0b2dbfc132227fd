package oci

import (
	"math"
	"slices"
	"strings"
	"testing"

	"github.com/opencontainers/runtime-spec/specs-go"
	"google.golang.org/grpc/codes"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/internal/errdefs"
	"berth/internal/testutil"
)

const testUserNS = "/run/berth/pods/pod1/userns"

func usernsOptions(host, length uint32) *runtimeapi.UserNamespace {
	return &runtimeapi.UserNamespace{Mode: nsPod, Uids: mapping(0, host, length), Gids: mapping(0, host, length)}
}

func mapping(container, host, length uint32) []*runtimeapi.IDMapping {
	return []*runtimeapi.IDMapping{{ContainerId: container, HostId: host, Length: length}}
}

// giveUserNamespace gives the pod a user namespace.
func (p *Pod) giveUserNamespace(options *runtimeapi.UserNamespace) {
	sc := p.Config.Linux.SecurityContext
	if sc.NamespaceOptions == nil {
		sc.NamespaceOptions = &runtimeapi.NamespaceOption{Pid: runtimeapi.NamespaceMode_CONTAINER}
	}
	sc.NamespaceOptions.UsernsOptions = options
	p.Mappings, _ = UserNamespace(p.Config) // fails for invalid options, which tests pass to UserNamespace again
	p.UserNS = testUserNS
}

func TestUserNamespaceValidation(t *testing.T) {
	t.Parallel()
	type u = runtimeapi.UserNamespace
	for _, test := range []struct {
		name    string
		options *u
		change  func(*runtimeapi.NamespaceOption)
		err     string // "" and own: the pod has a namespace; "" and not own: the node's
		own     bool
	}{
		{name: "older kubelets", options: nil},
		{name: "node", options: &u{Mode: nsNode}},
		{name: "pod", options: usernsOptions(65536, 65536), own: true},
		{name: "users and groups differ", options: &u{Uids: mapping(0, 65536, 10), Gids: mapping(0, 131072, 20)}, own: true},
		{name: "on the node's network", options: usernsOptions(65536, 65536), own: true,
			change: func(o *runtimeapi.NamespaceOption) { o.Network = nsNode }},
		{name: "the highest IDs", options: usernsOptions(math.MaxUint32-10, 10), own: true},
		{name: "target", options: &u{Mode: nsTarget}, err: "TARGET"},
		{name: "container", options: &u{Mode: runtimeapi.NamespaceMode_CONTAINER}, err: "CONTAINER"},
		{name: "unknown mode", options: &u{Mode: 9}, err: "mode 9"},
		{name: "node with mappings", options: &u{Mode: nsNode, Uids: mapping(0, 65536, 10)}, err: "NODE"},
		{name: "no mappings", options: &u{}, err: "uids: 0 mappings"},
		{name: "no groups", options: &u{Uids: mapping(0, 65536, 10)}, err: "gids: 0 mappings"},
		{name: "two mappings", options: &u{Uids: append(mapping(0, 65536, 10), mapping(10, 131072, 10)...)}, err: "uids: 2 mappings"},
		{name: "root is not mapped", options: &u{Uids: mapping(1, 65536, 10), Gids: mapping(0, 65536, 10)}, err: "starts with ID 1"},
		{name: "empty", options: usernsOptions(65536, 0), err: "length 0"},
		{name: "too high", options: usernsOptions(math.MaxUint32-10, 11), err: "exceeds"},
		{name: "overflow", options: usernsOptions(65536, math.MaxUint32), err: "exceeds"},
		{name: "host PID", options: usernsOptions(65536, 65536), change: func(o *runtimeapi.NamespaceOption) { o.Pid = nsNode }, err: "namespace_options.pid"},
		{name: "host IPC", options: usernsOptions(65536, 65536), change: func(o *runtimeapi.NamespaceOption) { o.Ipc = nsNode }, err: "namespace_options.ipc"},
	} {
		t.Run(test.name, func(t *testing.T) {
			pod := testPod()
			pod.giveUserNamespace(test.options)
			if test.change != nil {
				test.change(pod.Config.Linux.SecurityContext.NamespaceOptions)
			}
			got, err := UserNamespace(pod.Config)
			if test.err != "" {
				testutil.WantError(t, err, codes.InvalidArgument, test.err)
			} else if err != nil || (got != nil) != test.own {
				t.Errorf("got %v, %v", got, err)
			}
		})
	}
}

func TestContainerInUserNamespace(t *testing.T) {
	t.Parallel()
	in := testInput()
	in.Pod.giveUserNamespace(usernsOptions(65536, 1000))
	spec := mustSpec(t, in) // no options in the request
	if first := spec.Linux.Namespaces[0]; first != (specs.LinuxNamespace{Type: specs.UserNamespace, Path: testUserNS}) {
		t.Errorf("first namespace %v, want the user namespace, because joining the others needs its rights", first)
	}
	ids := []specs.LinuxIDMapping{{HostID: 65536, Size: 1000}}
	if !slices.Equal(spec.Linux.UIDMappings, ids) || !slices.Equal(spec.Linux.GIDMappings, ids) {
		t.Errorf("mappings %v, %v", spec.Linux.UIDMappings, spec.Linux.GIDMappings)
	}
	for _, file := range []string{"/etc/hosts", "/etc/hostname", "/etc/resolv.conf"} {
		if m := findMount(spec, file); !slices.Contains(m.Options, idMapOption) {
			t.Errorf("%s: %q", file, m.Options)
		}
	}
	if m := findMount(spec, "/sys"); m.Type != "sysfs" {
		t.Errorf("/sys: %v", m)
	}
	in.sc().NamespaceOptions.UsernsOptions = usernsOptions(65536, 1000)
	mustSpec(t, in)

	for name, test := range map[string]struct {
		change func(*ContainerInput)
		err    string
	}{
		"other mappings": {func(in *ContainerInput) { in.sc().NamespaceOptions.UsernsOptions = usernsOptions(131072, 1000) }, "different from pod"},
		"the node's": {func(in *ContainerInput) {
			in.sc().NamespaceOptions.UsernsOptions = &runtimeapi.UserNamespace{Mode: nsNode}
		}, "different from pod"},
		"user not mapped":    {func(in *ContainerInput) { in.User.UID = 1000 }, "user 1000"},
		"group not mapped":   {func(in *ContainerInput) { in.User.GID = 1001 }, "group 1001"},
		"another not mapped": {func(in *ContainerInput) { in.User.Groups = []uint32{0, 1002} }, "group 1002"},
	} {
		t.Run(name, func(t *testing.T) {
			refused(t, func(in *ContainerInput) {
				in.Pod.giveUserNamespace(usernsOptions(65536, 1000))
				test.change(in)
			}, codes.InvalidArgument, test.err)
		})
	}
	refused(t, func(in *ContainerInput) { in.sc().NamespaceOptions.UsernsOptions = usernsOptions(65536, 1000) },
		codes.InvalidArgument, "different from pod")
	refused(t, func(in *ContainerInput) {
		in.Pod.giveUserNamespace(usernsOptions(65536, 1000))
		in.Pod.UserNS = ""
	}, codes.Internal, "user namespace is missing")
	for name, change := range map[string]func(*Pod){
		"lost mappings":        func(p *Pod) { p.Mappings = nil },
		"unrequested":          func(p *Pod) { p.options().UsernsOptions = nil },
		"the node's requested": func(p *Pod) { p.options().UsernsOptions = &runtimeapi.UserNamespace{Mode: nsNode} },
	} {
		t.Run(name, func(t *testing.T) {
			refused(t, func(in *ContainerInput) {
				in.Pod.giveUserNamespace(usernsOptions(65536, 1000))
				change(&in.Pod)
			}, codes.Internal, "do not match its config")
		})
	}
}

func TestUserNamespaceOnHostNetwork(t *testing.T) {
	t.Parallel()
	in := testInput()
	in.Pod.giveUserNamespace(usernsOptions(65536, 65536))
	in.Pod.Config.Linux.SecurityContext.NamespaceOptions.Network = nsNode
	for _, test := range []struct {
		name                  string
		privileged, recursive bool
		access                string
	}{
		{name: "submounts are read-only", recursive: true, access: "rro"},
		{name: "kernel without recursive read-only mounts", access: "ro"},
		{name: "privileged", privileged: true, recursive: true, access: "rw"},
	} {
		t.Run(test.name, func(t *testing.T) {
			in := in
			in.Host.RecursiveReadOnly = test.recursive
			if test.privileged {
				in.privilege()
			}
			want := []string{"rbind", "rprivate", "nosuid", "noexec", "nodev", test.access}
			if m := findMount(mustSpec(t, in), "/sys"); m.Type != "bind" || !slices.Equal(m.Options, want) {
				t.Errorf("/sys: %v", m)
			}
		})
	}
}

func TestSandboxInUserNamespace(t *testing.T) {
	t.Parallel()
	spec := sandboxSpec(t, func(in *SandboxInput) { in.Pod.giveUserNamespace(usernsOptions(65536, 1000)) })
	if path, _ := findNamespace(spec, specs.UserNamespace); path != testUserNS {
		t.Errorf("user namespace %q", path)
	}
	if got := spec.Linux.Sysctl["net.ipv4.ping_group_range"]; got != "0 999" {
		t.Errorf("ping_group_range %q, want the groups of the user namespace", got)
	}
	sandboxRefused(t, func(in *SandboxInput) {
		in.Pod.giveUserNamespace(usernsOptions(65536, 1000))
		in.User.UID = 65535
	}, codes.InvalidArgument, "user 65535")
}

func TestIDMappedMounts(t *testing.T) {
	t.Parallel()
	pods := mapping(0, 65536, 1000)
	for name, test := range map[string]struct {
		mount      *runtimeapi.Mount
		plainPod   bool
		mapped     bool
		uids, gids []specs.LinuxIDMapping
		err        string
	}{
		"without":            {mount: &runtimeapi.Mount{}},
		"the pod's mappings": {mount: &runtimeapi.Mount{UidMappings: pods, GidMappings: pods}, mapped: true},
		"others": {mount: &runtimeapi.Mount{UidMappings: mapping(0, 7, 8), GidMappings: pods}, mapped: true,
			uids: []specs.LinuxIDMapping{{HostID: 7, Size: 8}}, gids: []specs.LinuxIDMapping{{HostID: 65536, Size: 1000}}},
		"a pod without a user namespace": {mount: &runtimeapi.Mount{UidMappings: pods, GidMappings: pods}, plainPod: true, mapped: true,
			uids: []specs.LinuxIDMapping{{HostID: 65536, Size: 1000}}, gids: []specs.LinuxIDMapping{{HostID: 65536, Size: 1000}}},
		"users only": {mount: &runtimeapi.Mount{UidMappings: pods}, err: "only one of"},
		"empty":      {mount: &runtimeapi.Mount{UidMappings: mapping(0, 1, 0), GidMappings: pods}, err: "length 0"},
		"too high":   {mount: &runtimeapi.Mount{UidMappings: pods, GidMappings: mapping(1, 1, math.MaxUint32)}, err: "exceeds"},
	} {
		t.Run(name, func(t *testing.T) {
			in := testInput()
			if !test.plainPod {
				in.Pod.giveUserNamespace(usernsOptions(65536, 1000))
			}
			test.mount.ContainerPath, test.mount.HostPath = "/data", "/srv/data"
			in.Config.Mounts = []*runtimeapi.Mount{test.mount}
			spec, err := ContainerSpec(in)
			if test.err != "" {
				testutil.WantError(t, err, codes.InvalidArgument, "/data", test.err)
				return
			}
			testutil.Must(t, err)
			m := findMount(spec, "/data")
			if IsIDMapped(*m) != test.mapped || !slices.Equal(m.UIDMappings, test.uids) || !slices.Equal(m.GIDMappings, test.gids) {
				t.Errorf("got %+v", m)
			}
		})
	}
}

// libcontainer binds the host's file at the node's path. A node needs a mount if the host has it at
// another path, or has another device at its path.
func TestDevicesInUserNamespace(t *testing.T) {
	t.Parallel()
	in := testInput()
	in.Pod.giveUserNamespace(usernsOptions(65536, 1000))
	in.Config.Devices = []*runtimeapi.Device{{HostPath: "/dev/fuse", ContainerPath: "/dev/other"}, {HostPath: "/dev/sda", ContainerPath: "/dev/sda"},
		{HostPath: "/dev/fuse", ContainerPath: "/dev/snd/pcm"}}
	spec := mustSpec(t, in)
	spec.Linux.Devices = append(spec.Linux.Devices, // like edits of a CDI vendor
		specs.LinuxDevice{Path: "/dev/vendor", Type: "u", Major: pcm.Major, Minor: pcm.Minor})
	testutil.Must(t, BindDevices(spec, []string{"/dev/missing", "/srv/data", "/dev/fuse", "/dev/snd"}, in.Files))
	for at, source := range map[string]string{"/dev/other": "/dev/fuse", "/dev/vendor": pcm.Path, "/dev/snd/pcm": "/dev/fuse"} {
		if m := findMount(spec, at); m == nil || m.Source != source || m.Type != "bind" {
			t.Errorf("mount at %s: %v", at, m)
		}
	}
	if len(spec.Linux.Devices) != 1 || spec.Linux.Devices[0].Path != "/dev/sda" {
		t.Errorf("devices %v", spec.Linux.Devices)
	}
	if rules := spec.Linux.Resources.Devices; len(rules) != 4 { // the rule that denies all, and these three
		t.Errorf("rules %v", rules)
	}
	for _, node := range []specs.LinuxDevice{{Path: "/dev/sda", Type: "b", Major: 8, Minor: 1}, {Path: "/dev/sda", Type: "c", Major: 8}, {Path: "/dev/pipe", Type: "p"}} {
		spec.Linux.Devices = []specs.LinuxDevice{node}
		if err := BindDevices(spec, nil, in.Files); errdefs.Code(err) != codes.FailedPrecondition || !strings.Contains(err.Error(), node.Path) {
			t.Errorf("%+v: %v", node, err)
		}
	}
}
