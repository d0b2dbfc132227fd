package oci

import (
	"slices"
	"testing"

	"google.golang.org/grpc/codes"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

const (
	cgroupReadOnly  = runtimeapi.CgroupMountMode_CGROUP_MOUNT_MODE_READ_ONLY
	cgroupReadWrite = runtimeapi.CgroupMountMode_CGROUP_MOUNT_MODE_READ_WRITE
)

func TestCgroupMountModeRefused(t *testing.T) {
	t.Parallel()
	delegated := func(in *ContainerInput) { in.Host.CgroupV2, in.Host.CgroupOptions = true, []string{"nsdelegate"} }
	for _, test := range []struct {
		mode   runtimeapi.CgroupMountMode
		change func(*ContainerInput)
		code   codes.Code
		err    string
	}{
		{7, delegated, codes.InvalidArgument, "unknown mode 7"},
		{cgroupReadOnly, func(in *ContainerInput) { in.privilege() }, codes.InvalidArgument, "READ_ONLY"},
		{cgroupReadWrite, func(in *ContainerInput) {
			delegated(in)
			in.sc().NamespaceOptions = &runtimeapi.NamespaceOption{CgroupnsOptions: cgroupns(nsNode)}
		}, codes.InvalidArgument, "privileged"},
		{cgroupReadWrite, func(in *ContainerInput) { in.Host.CgroupV2 = false }, codes.FailedPrecondition, "cgroup v2"},
		{cgroupReadWrite, func(in *ContainerInput) { in.Host.CgroupOptions = []string{"memory_recursiveprot"} }, codes.FailedPrecondition, "nsdelegate"},
		{cgroupReadWrite, func(in *ContainerInput) {
			in.privilege()
			in.Host.CgroupV2 = false
		}, codes.FailedPrecondition, "cgroup v2"},
		{cgroupReadWrite, func(in *ContainerInput) {
			in.privilege()
			in.Host.CgroupOptions = nil
		}, codes.FailedPrecondition, "nsdelegate"},
	} {
		refused(t, func(in *ContainerInput) {
			in.sc().CgroupMountMode = test.mode
			test.change(in)
		}, test.code, test.err)
	}
}

// Only a container that is not privileged has limits for the cgroups that it makes.
func TestCgroupMountModeAllowed(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		mode       runtimeapi.CgroupMountMode
		privileged bool
		access     string
		depth      string
	}{
		{0, false, "ro", ""},
		{cgroupReadOnly, false, "ro", ""},
		{cgroupReadWrite, false, "rw", "12"},
		{0, true, "rw", ""},
		{cgroupReadWrite, true, "rw", ""},
	} {
		in := testInput()
		in.Host.CgroupV2, in.Host.CgroupOptions = true, []string{"nsdelegate"}
		in.sc().CgroupMountMode = test.mode
		if test.privileged {
			in.privilege()
		}
		spec := mustSpec(t, in)
		if o := findMount(spec, "/sys/fs/cgroup").Options; !slices.Contains(o, test.access) {
			t.Errorf("%+v: options %v", test, o)
		}
		if depth := spec.Linux.Resources.Unified["cgroup.max.depth"]; depth != test.depth {
			t.Errorf("%+v: depth %q", test, depth)
		}
	}
}
