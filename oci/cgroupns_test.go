package oci

import (
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
		{cgroupReadWrite, func(in *ContainerInput) {
			in.privilege()
			in.Host.CgroupV2 = false
		}, codes.FailedPrecondition, "nsdelegate"},
		{cgroupReadWrite, func(in *ContainerInput) {
			in.privilege()
			in.Host.CgroupOptions = nil
		}, codes.FailedPrecondition, "nsdelegate"},
		{cgroupReadWrite, delegated, codes.FailedPrecondition, "only for privileged"},
	} {
		refused(t, func(in *ContainerInput) {
			in.sc().CgroupMountMode = test.mode
			test.change(in)
		}, test.code, test.err)
	}
}

func TestCgroupMountModeAllowed(t *testing.T) {
	t.Parallel()
	in := testInput()
	in.sc().CgroupMountMode = cgroupReadOnly
	mustSpec(t, in)
	in = testInput()
	in.privilege()
	in.Host.CgroupV2, in.Host.CgroupOptions = true, []string{"nsdelegate"}
	in.sc().CgroupMountMode = cgroupReadWrite
	mustSpec(t, in)
}
