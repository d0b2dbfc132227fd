package peers

import (
	"fmt"
	"net/url"
	"slices"
	"strings"
	"testing"

	"github.com/opencontainers/go-digest"
)

func testKey(name string) Key {
	return Key{Registry: "registry.example:5000", Blob: digest.FromString(name + " blob"), DiffID: digest.FromString(name)}
}

func TestKeyInURL(t *testing.T) {
	t.Parallel()
	k := testKey("layer")
	u, err := url.Parse("https://10.0.0.1:4789" + k.path())
	if err != nil {
		t.Fatal(err)
	}
	if got, err := keyOf(u); err != nil || got != k {
		t.Errorf("got %+v, %v; want %+v", got, err, k)
	}
}

func TestInvalidKeys(t *testing.T) {
	t.Parallel()
	good := testKey("x")
	for name, k := range map[string]Key{
		"empty":                {},
		"no registry":          {Blob: good.Blob, DiffID: good.DiffID},
		"path for a registry":  {Registry: "a/b", Blob: good.Blob, DiffID: good.DiffID},
		"long registry":        {Registry: strings.Repeat("a", maxRegistry+1), Blob: good.Blob, DiffID: good.DiffID},
		"path for a blob":      {Registry: "a", Blob: "sha256:../../etc/passwd", DiffID: good.DiffID},
		"unknown algorithm":    {Registry: "a", Blob: "md5:d41d8cd98f00b204e9800998ecf8427e", DiffID: good.DiffID},
		"short digest":         {Registry: "a", Blob: good.Blob, DiffID: "sha256:1234"},
		"diffID and no digest": {Registry: "a", Blob: good.Blob, DiffID: "latest"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			if k.Validate() == nil {
				t.Errorf("%+v is valid", k)
			}
		})
	}
}

func TestHomesAreStable(t *testing.T) {
	t.Parallel()
	var members []string
	for i := range 20 {
		members = append(members, fmt.Sprintf("10.0.0.%d:4789", i))
	}
	const layers = 1000
	moved, load := 0, map[string]int{}
	for i := range layers {
		k := testKey(fmt.Sprint(i))
		before := homes(members, k, homeCount)
		if len(before) != homeCount || before[0] == before[1] {
			t.Fatalf("homes %v", before)
		}
		if reversed := slices.Clone(members); true {
			slices.Reverse(reversed)
			if got := homes(reversed, k, homeCount); !slices.Equal(got, before) {
				t.Fatalf("homes depend on the order: %v, %v", before, got)
			}
		}
		load[before[0]]++
		if homes(members[1:], k, homeCount)[0] != before[0] {
			moved++
		}
	}
	if moved > layers/10 {
		t.Errorf("%d of %d layers moved when one of 20 members left", moved, layers)
	}
	for m, n := range load {
		if n > layers/5 {
			t.Errorf("%s is home of %d of %d layers", m, n, layers)
		}
	}
	if got := homes(members[:1], testKey("x"), homeCount); !slices.Equal(got, members[:1]) {
		t.Errorf("homes among one member: %v", got)
	}
}

// FuzzKey: a URL of a peer is refused, or names a layer that has the same URL.
func FuzzKey(f *testing.F) {
	f.Add(testKey("x").path())
	f.Add(layerPath + "sha256:..%2f?registry=a&diffID=b")
	f.Fuzz(func(t *testing.T, path string) {
		u, err := url.Parse("https://peer" + path)
		if err != nil {
			return
		}
		k, err := keyOf(u)
		if err != nil {
			return
		}
		again, err := url.Parse("https://peer" + k.path())
		if err != nil {
			t.Fatal(err)
		}
		if got, err := keyOf(again); err != nil || got != k {
			t.Errorf("%+v became %+v, %v", k, got, err)
		}
	})
}
