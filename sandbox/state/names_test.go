package state

import (
	"testing"

	"google.golang.org/grpc/codes"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
	crierrors "k8s.io/cri-api/pkg/errors"

	"berth/internal/errdefs"
)

func TestNamesExplainErrors(t *testing.T) {
	t.Parallel()
	pod := &runtimeapi.PodSandboxMetadata{Namespace: "default", Name: "web"}
	inPod, inContainer := NamesOf(pod, nil), NamesOf(pod, &runtimeapi.ContainerMetadata{Name: "app"})
	for _, tt := range []struct {
		names      Names
		text, want string
	}{
		{inPod, "it is not ready", "pod default/web: it is not ready"},
		{inPod, "run default/web: no address", "run default/web: no address"},
		{inPod, "run default/web-2: no address", "pod default/web: run default/web-2: no address"},
		{inContainer, "not running", "pod default/web: container app: not running"},
		{inContainer, "mapped it", "pod default/web: container app: mapped it"},
		{inContainer, "app in default/web: no", "app in default/web: no"},
		{inContainer, "start app: no", "pod default/web: start app: no"},
		{Names{Container: "app"}, "no", "container app: no"},
		{Names{}, "no", "no"},
		{NamesOf(&runtimeapi.PodSandboxMetadata{Namespace: "a", Name: "b\nc"}, nil), "no", "pod a/bc: no"},
	} {
		err := tt.names.Explain(errdefs.NotFound("%s", tt.text))
		if err.Error() != tt.want || errdefs.Code(err) != codes.NotFound {
			t.Errorf("%+v, %s: %v, code %v, want %s", tt.names, tt.text, err, errdefs.Code(err), tt.want)
		}
	}
	// kubelet matches the beginning of these.
	for _, begins := range []error{crierrors.ErrImageVolumeMountFailed, crierrors.ErrRROUnsupported} {
		err := inContainer.Explain(errdefs.NotFound("%w: no", begins))
		if want := begins.Error() + ": no (pod default/web: container app)"; err.Error() != want || errdefs.Code(err) != codes.NotFound {
			t.Errorf("%v, code %v, want %s", err, errdefs.Code(err), want)
		}
	}
	if err := inPod.Explain(nil); err != nil {
		t.Error(err)
	}
}
