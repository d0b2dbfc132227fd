package sandbox

import (
	"testing"

	"google.golang.org/grpc/codes"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/internal/errdefs"
	"berth/internal/testutil"
	"berth/sandbox/handler"
)

// The creation of a pod and an update reject the same resources.
func TestInvalidPodResourcesAreRejected(t *testing.T) {
	m, _, _ := managerWithPod(t)
	var err error
	m.handlers, err = handler.Open(t.Context(), handler.Options{BuiltIn: "berth"})
	testutil.Must(t, err)
	good, bad := &runtimeapi.LinuxContainerResources{CpuShares: 2}, &runtimeapi.LinuxContainerResources{CpuShares: -2}
	for _, tt := range []struct {
		overhead, resources *runtimeapi.LinuxContainerResources
		want                codes.Code
	}{
		{nil, nil, codes.OK}, {good, good, codes.OK}, {bad, good, codes.InvalidArgument}, {good, bad, codes.InvalidArgument},
	} {
		config := &runtimeapi.PodSandboxConfig{Metadata: &runtimeapi.PodSandboxMetadata{Name: "n", Namespace: "s", Uid: "u"},
			Linux: &runtimeapi.LinuxPodSandboxConfig{Overhead: tt.overhead, Resources: tt.resources}}
		if err := m.checkPodConfig(config, ""); errdefs.Code(err) != tt.want {
			t.Errorf("%v, %v: %v", tt.overhead, tt.resources, err)
		}
		err := m.UpdatePodSandboxResources(t.Context(), "p", tt.overhead, tt.resources)
		if got := errdefs.Code(err); got != tt.want {
			t.Errorf("update to %v, %v: %v", tt.overhead, tt.resources, err)
		}
	}
}
