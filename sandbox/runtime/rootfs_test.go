package runtime

import (
	"testing"

	"berth/internal/rootfs"
	"berth/shim/proto"
)

// All mounts of a pod get the pod's SELinux label, including image volumes and the pause's
// directory. Without SELinux the pause needs no overlay.
func TestMountsGetPodLabel(t *testing.T) {
	var roots Roots
	root := roots.Pause("/pause", nil, "pod-files", false)
	if root.Label != "pod-files" || len(root.Layers) < 2 || root.Layers[len(root.Layers)-1].Path != "/pause" {
		t.Errorf("root of the pause is %+v, want an overlay with the label", root)
	}
	if root = roots.Pause("/pause", nil, "", false); root.Label != "" || len(root.Layers) != 1 {
		t.Errorf("root of the pause without SELinux is %+v", root)
	}
	if root = roots.Pause("/pause", nil, "", true); len(root.Layers) < 2 {
		t.Errorf("root of the pause of a shim is %+v, want an overlay", root)
	}

	like := rootfs.Spec{Label: "own-files", IDMap: &rootfs.IDMap{UserNS: "ns"}}
	volumes := WithMapping(like, []proto.Volume{{Path: "/v", Rootfs: rootfs.Spec{Upper: "u"}}})
	if v := volumes[0]; v.Rootfs.Label != like.Label || v.Rootfs.IDMap != like.IDMap || v.Rootfs.Upper != "u" || v.Path != "/v" {
		t.Errorf("image volume is %+v", v)
	}
}
