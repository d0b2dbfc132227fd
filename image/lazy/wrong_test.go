package lazy

import (
	"testing"

	"github.com/opencontainers/go-digest"
)

// Layers that are found before the function is set are not lost.
func TestWrongFilesBeforeTheirUser(t *testing.T) {
	var w wrongFiles
	layer := digest.FromString("layer")
	w.add(layer, "it lied")
	got := map[digest.Digest]string{}
	w.set(func(layer digest.Digest, reason string) { got[layer] = reason })
	w.add(digest.FromString("second"), "it lied, too")
	if len(got) != 2 || got[layer] != "it lied" {
		t.Error(got)
	}
}
