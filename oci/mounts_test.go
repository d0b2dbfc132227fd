package oci

import (
	"slices"
	"testing"

	"google.golang.org/grpc/codes"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/internal/testutil"
)

func destinations(t *testing.T, in ContainerInput) []string {
	t.Helper()
	var dests []string
	for _, m := range mustSpec(t, in).Mounts {
		dests = append(dests, m.Destination)
	}
	return dests
}

var defaultDestinations = []string{"/proc", "/dev", "/dev/pts", "/dev/mqueue", "/sys", "/sys/fs/cgroup",
	"/etc/hostname", "/etc/hosts", "/etc/resolv.conf", "/dev/shm"}

func TestDefaultMounts(t *testing.T) {
	t.Parallel()
	if got := destinations(t, testInput()); !slices.Equal(got, defaultDestinations) {
		t.Errorf("got %q", got)
	}
	in := testInput()
	in.Pod.Hosts, in.Pod.Hostname, in.Pod.ResolvConf = "", "", ""
	if got := destinations(t, in); !slices.Equal(got, append(slices.Clone(defaultDestinations[:6]), "/dev/shm")) {
		t.Errorf("without files: got %q", got)
	}
}

func TestMountsPrivileged(t *testing.T) {
	t.Parallel()
	in := testInput()
	for _, priv := range []bool{false, true} {
		want := "ro"
		if priv {
			in.privilege()
			want = "rw"
		}
		spec := mustSpec(t, in)
		for _, dest := range []string{"/sys", "/sys/fs/cgroup"} {
			if o := findMount(spec, dest).Options; !slices.Contains(o, want) {
				t.Errorf("privileged %v: %s has %q", priv, dest, o)
			}
		}
	}
}

// A mount of cgroup v2 in the node's cgroup namespace repeats the node's options, except those of
// SELinux.
func TestCgroupMountOptions(t *testing.T) {
	t.Parallel()
	in := testInput()
	in.Host.CgroupOptions = []string{"seclabel", "nsdelegate", "rootcontext=system_u", "memory_recursiveprot"}
	if o := findMount(mustSpec(t, in), "/sys/fs/cgroup").Options; slices.Contains(o, "nsdelegate") {
		t.Errorf("with its own cgroup namespace: %q", o)
	}
	in.privilege()
	want := []string{"nosuid", "noexec", "nodev", "relatime", "rw", "nsdelegate", "memory_recursiveprot"}
	if o := findMount(mustSpec(t, in), "/sys/fs/cgroup").Options; !slices.Equal(o, want) {
		t.Errorf("privileged: %q, want %q", o, want)
	}
}

func TestMountsReadonlyRoot(t *testing.T) {
	t.Parallel()
	in := testInput()
	in.sc().ReadonlyRootfs = true
	spec := mustSpec(t, in)
	if !spec.Root.Readonly {
		t.Error("root is not read-only")
	}
	for dest, want := range map[string]string{"/etc/hosts": "ro", "/etc/resolv.conf": "ro", "/etc/hostname": "ro", "/dev/shm": "rw"} {
		if o := findMount(spec, dest).Options; !slices.Contains(o, want) {
			t.Errorf("%s has %q", dest, o)
		}
	}
}

func TestShm(t *testing.T) {
	t.Parallel()
	in := testInput()
	if m := findMount(mustSpec(t, in), "/dev/shm"); m.Source != in.Pod.Shm || !slices.Contains(m.Options, "noexec") {
		t.Errorf("pod's: %+v", m)
	}
	in.Pod.Config.Linux.SecurityContext.NamespaceOptions = &runtimeapi.NamespaceOption{Ipc: runtimeapi.NamespaceMode_NODE}
	if m := findMount(mustSpec(t, in), "/dev/shm"); m.Source != "/dev/shm" {
		t.Errorf("host IPC: %+v", m)
	}
	refused(t, func(in *ContainerInput) { in.Pod.Shm = "" }, codes.Internal, "/dev/shm")
}

// A CRI mount replaces a default one, and hides the kernel's filesystems below it.
func TestMountsReplaced(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		at   string
		gone []string
	}{
		{"/dev/shm", nil},
		{"/etc/hosts", nil},
		{"/etc/resolv.conf/", nil},
		{"/sys", []string{"/sys/fs/cgroup"}},
		{"/sys/fs", []string{"/sys/fs/cgroup"}},
		{"/dev", []string{"/dev/pts", "/dev/mqueue"}},
		{"/proc/./", nil},
		{"/etc", nil},
		{"/data", nil},
	} {
		t.Run(test.at, func(t *testing.T) {
			in := testInput()
			in.Config.Mounts = []*runtimeapi.Mount{{ContainerPath: test.at, HostPath: "/srv/data"}}
			var at []string
			seen := make(map[string]bool)
			for _, m := range mustSpec(t, in).Mounts {
				if m.Source == "/srv/data" {
					at = append(at, m.Destination)
				}
				if seen[m.Destination] {
					t.Errorf("%s: two mounts at %s", test.at, m.Destination)
				}
				seen[m.Destination] = true
			}
			if len(at) != 1 {
				t.Errorf("%s: mounted at %q", test.at, at)
			}
			for _, dest := range defaultDestinations {
				if seen[dest] == slices.Contains(test.gone, dest) {
					t.Errorf("%s: %s listed: %v", test.at, dest, seen[dest])
				}
			}
		})
	}
}

func TestMountsParentsFirst(t *testing.T) {
	t.Parallel()
	in := testInput()
	for _, at := range []string{"/data/a/b", "/etc", "/z", "/data", "/data/a", "/data/a/a"} {
		in.Config.Mounts = append(in.Config.Mounts, &runtimeapi.Mount{ContainerPath: at, HostPath: "/srv/data"})
	}
	dests := destinations(t, in)
	for i, dest := range dests {
		for _, later := range dests[i+1:] {
			if isBelow(dest, later) {
				t.Errorf("%s comes before its parent %s: %q", dest, later, dests)
			}
		}
	}
}

func TestMountOptions(t *testing.T) {
	t.Parallel()
	const (
		private = runtimeapi.MountPropagation_PROPAGATION_PRIVATE
		slave   = runtimeapi.MountPropagation_PROPAGATION_HOST_TO_CONTAINER
		shared  = runtimeapi.MountPropagation_PROPAGATION_BIDIRECTIONAL
	)
	for _, test := range []struct {
		name  string
		mount *runtimeapi.Mount
		want  []string
		root  string
	}{
		{"plain", &runtimeapi.Mount{HostPath: "/srv/data"}, []string{"rbind", "rprivate", "rw"}, ""},
		{"link", &runtimeapi.Mount{HostPath: "/srv/link"}, []string{"rbind", "rprivate", "rw"}, ""},
		{"read-only", &runtimeapi.Mount{HostPath: "/srv/data", Readonly: true}, []string{"rbind", "rprivate", "ro"}, ""},
		{"recursively", &runtimeapi.Mount{HostPath: "/srv/data", Readonly: true, RecursiveReadOnly: true}, []string{"rbind", "rprivate", "rro"}, ""},
		{"slave of shared", &runtimeapi.Mount{HostPath: "/srv/shared/vol", Propagation: slave}, []string{"rbind", "rslave", "rw"}, "rslave"},
		{"slave of slave", &runtimeapi.Mount{HostPath: "/srv/slave/vol", Propagation: slave}, []string{"rbind", "rslave", "rw"}, "rslave"},
		{"shared", &runtimeapi.Mount{HostPath: "/srv/shared/vol", Propagation: shared}, []string{"rbind", "rshared", "rw"}, "rshared"},
		{"flags", &runtimeapi.Mount{HostPath: "/srv/data", MountOptions: []string{"noexec", "nosuid"}, Propagation: private},
			[]string{"rbind", "rprivate", "rw", "noexec", "nosuid"}, ""},
	} {
		t.Run(test.name, func(t *testing.T) {
			in := testInput()
			test.mount.ContainerPath = "/data"
			in.Config.Mounts = []*runtimeapi.Mount{test.mount}
			spec := mustSpec(t, in)
			m := findMount(spec, "/data")
			if !slices.Equal(m.Options, test.want) || m.Type != "bind" {
				t.Errorf("got %+v", m)
			}
			if test.name == "link" && m.Source != "/srv/data" {
				t.Errorf("link not followed: %s", m.Source)
			}
			if spec.Linux.RootfsPropagation != test.root {
				t.Errorf("root propagation %q, want %q", spec.Linux.RootfsPropagation, test.root)
			}
		})
	}
}

func TestRootPropagationIsTheWidest(t *testing.T) {
	t.Parallel()
	for _, order := range [][2]int32{{1, 2}, {2, 1}} {
		in := testInput()
		for i, p := range order {
			in.Config.Mounts = append(in.Config.Mounts, &runtimeapi.Mount{ContainerPath: []string{"/a", "/b"}[i],
				HostPath: "/srv/shared/vol", Propagation: runtimeapi.MountPropagation(p)})
		}
		if got := mustSpec(t, in).Linux.RootfsPropagation; got != "rshared" {
			t.Errorf("%v: got %q", order, got)
		}
	}
}

func TestMountsRefused(t *testing.T) {
	t.Parallel()
	const slave, shared = runtimeapi.MountPropagation_PROPAGATION_HOST_TO_CONTAINER, runtimeapi.MountPropagation_PROPAGATION_BIDIRECTIONAL
	for _, test := range []struct {
		mount *runtimeapi.Mount
		code  codes.Code
		err   string
	}{
		{&runtimeapi.Mount{ContainerPath: "/a", HostPath: "/missing"}, codes.InvalidArgument, "host_path /missing does not exist"},
		{&runtimeapi.Mount{ContainerPath: "/a"}, codes.InvalidArgument, `host_path ""`},
		{&runtimeapi.Mount{ContainerPath: "/a", HostPath: "srv"}, codes.InvalidArgument, `host_path "srv"`},
		{&runtimeapi.Mount{ContainerPath: "/a", HostPath: "/a\x00"}, codes.InvalidArgument, "host_path"},
		{&runtimeapi.Mount{ContainerPath: "a", HostPath: "/srv/data"}, codes.InvalidArgument, `container_path "a"`},
		{&runtimeapi.Mount{ContainerPath: "/a\x00", HostPath: "/srv/data"}, codes.InvalidArgument, "container_path"},
		{&runtimeapi.Mount{ContainerPath: "/a/..", HostPath: "/srv/data"}, codes.InvalidArgument, "is the root"},
		{&runtimeapi.Mount{ContainerPath: "/a", HostPath: "/srv/data", Propagation: 9}, codes.InvalidArgument, "propagation 9"},
		{&runtimeapi.Mount{ContainerPath: "/a", HostPath: "/srv/data", Propagation: slave}, codes.FailedPrecondition,
			`path "/srv/data" is mounted on "/" but it is not a shared or slave mount`},
		{&runtimeapi.Mount{ContainerPath: "/a", HostPath: "/srv/slave/vol", Propagation: shared}, codes.FailedPrecondition,
			`path "/srv/slave/vol" is mounted on "/srv/slave" but it is not a shared mount`},
		{&runtimeapi.Mount{ContainerPath: "/a", HostPath: "/srv/data", RecursiveReadOnly: true}, codes.InvalidArgument, "without readonly"},
		{&runtimeapi.Mount{ContainerPath: "/a", HostPath: "/srv/shared/vol", Readonly: true, RecursiveReadOnly: true, Propagation: slave},
			codes.InvalidArgument, "recursive_read_only with propagation"},
		{&runtimeapi.Mount{ContainerPath: "/a", HostPath: "/srv/data", MountOptions: []string{"remount"}}, codes.InvalidArgument, `"remount"`},
		{&runtimeapi.Mount{ContainerPath: "/a", HostPath: "/srv/data", MountOptions: []string{"noexec,rw"}}, codes.InvalidArgument, `"noexec,rw"`},
		{&runtimeapi.Mount{ContainerPath: "/a", HostPath: "/srv/data", MountOptions: []string{"exec"}}, codes.InvalidArgument, "known are noatime, nodev"},
		{&runtimeapi.Mount{ContainerPath: "/a", HostPath: "/srv/data", MountOptions: []string{""}}, codes.InvalidArgument, `option ""`},
		{&runtimeapi.Mount{ContainerPath: "/a", HostPath: "/srv/data", ImageSubPath: "x"}, codes.InvalidArgument, "image_sub_path without image"},
		{&runtimeapi.Mount{ContainerPath: "/a", HostPath: "/srv/data", UidMappings: []*runtimeapi.IDMapping{{Length: 1}}}, codes.InvalidArgument, "only one of"},
	} {
		refused(t, func(in *ContainerInput) { in.Config.Mounts = []*runtimeapi.Mount{test.mount} }, test.code, test.err)
	}
}

func TestRecursiveReadOnlyUnsupported(t *testing.T) {
	t.Parallel()
	in := testInput()
	in.Host.RecursiveReadOnly = false
	in.Config.Mounts = []*runtimeapi.Mount{{ContainerPath: "/a", HostPath: "/srv/data", Readonly: true, RecursiveReadOnly: true}}
	_, err := ContainerSpec(in)
	testutil.WantError(t, err, codes.FailedPrecondition, "/a", "5.12")
	if got := err.Error()[:len("RROUnsupported")]; got != "RROUnsupported" { // kubelet matches this prefix
		t.Errorf("error begins with %q", got)
	}
}

func TestRelabelSources(t *testing.T) {
	t.Parallel()
	config := &runtimeapi.ContainerConfig{Mounts: []*runtimeapi.Mount{
		{ContainerPath: "/a", HostPath: "/srv/link", SelinuxRelabel: true}, {ContainerPath: "/b", HostPath: "/srv/shared/vol"},
	}}
	got, err := RelabelSources(config, testFiles())
	if err != nil || !slices.Equal(got, []string{"/srv/data"}) {
		t.Errorf("got %q, %v", got, err)
	}
}
