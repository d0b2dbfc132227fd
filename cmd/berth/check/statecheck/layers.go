package statecheck

import (
	"github.com/opencontainers/go-digest"

	"berth/image"
	"berth/image/layer"
	"berth/sandbox/state"
)

// Layers: each layer that an image or container needs exists. Each existing layer is needed, or
// being pulled. The layers' directories contain no other files. What failed pulls have left is
// younger than its limit.

func (f *facts) readLayers() error {
	f.layers = layer.NewSurvey()
	for _, root := range image.LayerRoots(f.imageRoot()) {
		found, err := layer.Inspect(root)
		if err != nil {
			return err
		}
		f.layers.Add(found)
	}
	return nil
}

func compareLayers(f *facts, d *finder) {
	needed := map[digest.Digest]bool{}
	need := func(object string, layers []digest.Digest, mustBe bool) {
		for _, l := range layers {
			needed[l] = true
			if _, there := f.layers.Layers[l]; mustBe && !there {
				d.differ(object, "its layer "+l.String(), "none")
			}
		}
	}
	for id, image := range f.images {
		need("image "+id, image.Layers, true)
	}
	for id, p := range f.pods {
		need(podName(id), p.Layers, p.Stage == state.Running)
	}
	for id, c := range f.containers {
		need(containerName(id), c.Layers, c.Stage == state.Created || c.Stage == state.Running)
	}
	comparePartial(f, d)
	need("failed pulls", f.partial.Layers, f.views != nil && f.views.pulls == 0)
	for path, err := range f.layers.Damaged {
		d.differ(path, "a layer", "%v", err)
	}
	for _, path := range f.layers.SetAside {
		d.differ(path, "no quarantined layer; a daemon that starts without containers on it deletes it", "one")
	}
	for _, j := range f.layers.Joins {
		for _, l := range j.Layers {
			if _, there := f.layers.Layers[l]; !there {
				d.differ(j.Dir, "the layer that it depends on, "+l.String(), "none")
			}
		}
	}
	if f.views == nil || f.views.pulls > 0 { // the next daemon collects unused layers, and a pull creates layers before its image
		return
	}
	for l, stored := range f.layers.Layers {
		if !needed[l] {
			d.differ("layer "+l.String(), "an image or container that needs it", "none (%d bytes)", stored.Usage.Bytes)
		}
	}
	for _, path := range f.layers.Making {
		d.differ(path, "a pull that is making this layer", "none in progress")
	}
}

// comparePartial checks what failed pulls have left. Its content may be anything, because the next
// pull verifies it.
func comparePartial(f *facts, d *finder) {
	for _, path := range f.partial.Unknown {
		d.differ(path, "", "not a berth file")
	}
	if f.daemon == 0 { // the next daemon deletes expired layers
		return
	}
	for _, path := range f.partial.Expired {
		d.differ(path, "a file that is at most "+f.node.PartialTTL.String()+" old (pull.partial_layer_ttl)", "an older one")
	}
}
