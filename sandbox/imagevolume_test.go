package sandbox

import (
	"errors"
	"testing"

	"google.golang.org/grpc/codes"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
	crierrors "k8s.io/cri-api/pkg/errors"

	"berth/internal/errdefs"
	"berth/sandbox/record"
)

// kubelet looks at how the text of some errors begins; their codes stay what they are.
func TestCreateFailed(t *testing.T) {
	volume := volumeFailed(&runtimeapi.Mount{ContainerPath: "/v"}, errdefs.NotFound("image %q: not found", "x"))
	for _, test := range []struct {
		err  error
		code codes.Code
		text string
	}{
		{volume, codes.NotFound, `ImageVolumeMountFailed: mount of /v: image "x": not found (create c)`},
		{errdefs.FailedPrecondition("%w: mount of /v: too old", crierrors.ErrRROUnsupported), codes.FailedPrecondition,
			"RROUnsupported: mount of /v: too old (create c)"},
		{errdefs.InvalidArgument("no"), codes.InvalidArgument, "create c: no"},
		{errors.New("no"), codes.Unknown, "create c: no"},
	} {
		got := createFailed("c", test.err)
		if got.Error() != test.text || errdefs.Code(got) != test.code {
			t.Errorf("got %v %q, want %v %q", errdefs.Code(got), got, test.code, test.text)
		}
	}
}

func TestStatusMounts(t *testing.T) {
	mounts := []*runtimeapi.Mount{
		{ContainerPath: "/a", HostPath: "/b"},
		{ContainerPath: "/v", Image: &runtimeapi.ImageSpec{Image: "name", ImageRef: "made up"}},
	}
	c := &container{config: &runtimeapi.ContainerConfig{Mounts: mounts}, rec: record.Container{Volumes: []record.Volume{{Mount: 1, ImageID: "sha256:1"}}}}
	got := statusMounts(c)
	if got[0] != mounts[0] || got[1].Image.Image != "name" || got[1].Image.ImageRef != "sha256:1" {
		t.Errorf("got %v", got)
	}
	if mounts[1].Image.ImageRef != "made up" {
		t.Error("the config was changed")
	}
}
