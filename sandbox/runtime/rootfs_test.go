package runtime

import (
	"testing"

	"berth/internal/rootfs"
	"berth/shim/proto"
)

// Everything that is mounted for a pod shows its label, not the files' own: image volumes and
// pause's directory too. Without SELinux pause needs no overlay.
func TestMountsGetTheirLabel(t *testing.T) {
	var kit Roots
	root := kit.Pause("/pause", nil, "pod-files")
	if root.Label != "pod-files" || len(root.Layers) < 2 || root.Layers[len(root.Layers)-1].Path != "/pause" {
		t.Errorf("pause's root is %+v: only overlays are labelled", root)
	}
	if root = kit.Pause("/pause", nil, ""); root.Label != "" || len(root.Layers) != 1 {
		t.Errorf("without SELinux pause's root is %+v", root)
	}

	like := rootfs.Spec{Label: "own-files", IDMap: &rootfs.IDMap{UserNS: "ns"}}
	volumes := ShownAs(like, []proto.Volume{{Path: "/v", Rootfs: rootfs.Spec{Upper: "u"}}})
	if v := volumes[0]; v.Rootfs.Label != like.Label || v.Rootfs.IDMap != like.IDMap || v.Rootfs.Upper != "u" || v.Path != "/v" {
		t.Errorf("an image volume is %+v", v)
	}
}
