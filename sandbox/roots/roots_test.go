package roots

import (
	"testing"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/internal/rootfs"
	"berth/sandbox/record"
	"berth/shim"
)

// Everything that is mounted for a pod shows its label, not the files' own: image volumes and
// pause's directory too. Without SELinux pause needs no overlay.
func TestMountsGetTheirLabel(t *testing.T) {
	var kit Kit
	root := kit.Pause("/pause", nil, "pod-files")
	if root.Label != "pod-files" || len(root.Layers) < 2 || root.Layers[len(root.Layers)-1].Path != "/pause" {
		t.Errorf("pause's root is %+v: only overlays are labelled", root)
	}
	if root = kit.Pause("/pause", nil, ""); root.Label != "" || len(root.Layers) != 1 {
		t.Errorf("without SELinux pause's root is %+v", root)
	}

	like := rootfs.Spec{Label: "own-files", IDMap: &rootfs.IDMap{UserNS: "ns"}}
	volumes := ShownAs(like, []shim.Volume{{Path: "/v", Rootfs: rootfs.Spec{Upper: "u"}}})
	if v := volumes[0]; v.Rootfs.Label != like.Label || v.Rootfs.IDMap != like.IDMap || v.Rootfs.Upper != "u" || v.Path != "/v" {
		t.Errorf("an image volume is %+v", v)
	}
}

func TestStatusMounts(t *testing.T) {
	mounts := []*runtimeapi.Mount{
		{ContainerPath: "/a", HostPath: "/b"},
		{ContainerPath: "/v", Image: &runtimeapi.ImageSpec{Image: "name", ImageRef: "made up"}},
	}
	got := StatusMounts(&runtimeapi.ContainerConfig{Mounts: mounts}, []record.Volume{{Mount: 1, ImageID: "sha256:1"}})
	if got[0] != mounts[0] || got[1].Image.Image != "name" || got[1].Image.ImageRef != "sha256:1" {
		t.Errorf("got %v", got)
	}
	if mounts[1].Image.ImageRef != "made up" {
		t.Error("the config was changed")
	}
}
