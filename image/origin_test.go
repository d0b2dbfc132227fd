package image

import (
	"fmt"
	"strings"
	"testing"

	"github.com/opencontainers/go-digest"

	"berth/image/registry"
)

// The closest Origin counts, whichever image comes first. A name that only has the same beginning
// is another repository.
func TestOriginsFindClosest(t *testing.T) {
	layer := func(n int) digest.Digest { return digest.FromString(fmt.Sprint(n)) }
	one, two := "sha256:"+strings.Repeat("1", 64), "sha256:"+strings.Repeat("2", 64)
	ref, err := registry.ParseReference("reg.example/app:v1")
	if err != nil {
		t.Fatal(err)
	}
	for _, tc := range []struct {
		name  string
		names []string // of an image with the layers 1 and 2
		want  Origin   // of the layer 2
	}{
		{"a tag of the repository", []string{"other.example/app:v1", "reg.example/app:v3"}, FromRepository},
		{"a digest of the repository", []string{"reg.example/app@" + one}, FromRepository},
		{"another repository", []string{"reg.example/apple:v1"}, FromRegistry},
		{"a repository below it", []string{"reg.example/app/part:v1"}, FromRegistry},
		{"another registry", []string{"reg.example.org/app:v1"}, FromElsewhere},
		{"another port", []string{"reg.example:5000/app:v1"}, FromElsewhere},
		{"no name", nil, FromElsewhere},
	} {
		t.Run(tc.name, func(t *testing.T) {
			x := &Snapshot{
				byID:    map[string]*Image{one: {Layers: []digest.Digest{layer(1), layer(2)}}, two: {Layers: []digest.Digest{layer(1)}}},
				records: map[string]imageRecord{one: {Tags: tc.names}, two: {Tags: []string{"reg.example/app:v2"}}},
			}
			got := x.Origins(ref, []digest.Digest{layer(1), layer(2), layer(3)})
			if got[layer(1)] != FromRepository || got[layer(2)] != tc.want || got[layer(3)] != FromElsewhere {
				t.Errorf("got %v, want %d of layer 2", got, tc.want)
			}
		})
	}
}

// BenchmarkOrigins looks up the layers of one image among those of a thousand images of the same
// registry.
func BenchmarkOrigins(b *testing.B) {
	const layers = 10
	x := &Snapshot{byID: map[string]*Image{}, records: map[string]imageRecord{}}
	for i := range 1000 {
		id := digest.FromString(fmt.Sprint(i)).String()
		img := &Image{ID: id}
		for l := range layers {
			img.Layers = append(img.Layers, digest.FromString(fmt.Sprint(i, l)))
		}
		x.byID[id], x.records[id] = img, imageRecord{Tags: []string{fmt.Sprint("reg.example/app:", i)}, Digests: []string{"reg.example/app@" + id}}
	}
	ref, err := registry.ParseReference("reg.example/other:v1")
	if err != nil {
		b.Fatal(err)
	}
	for b.Loop() {
		x.Origins(ref, x.byID[digest.FromString("7").String()].Layers)
	}
}
