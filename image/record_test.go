package image

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"google.golang.org/grpc/codes"

	"berth/checkpoint/record"
	"berth/image/registry"
	"berth/internal/errdefs"
)

func TestIndexFindsPrefixes(t *testing.T) {
	id := func(s string) string { return "sha256:" + s + strings.Repeat("0", 64-len(s)) }
	x := &Snapshot{byID: map[string]*Image{}}
	for _, s := range []string{"1234567a", "1234567b", "9999999"} {
		img := &Image{ID: id(s)}
		x.images = append(x.images, img)
		x.byID[img.ID] = img
	}
	for prefix, want := range map[string]codes.Code{
		"1234567": codes.InvalidArgument, "1234567a": codes.OK, "1234567b0": codes.OK, "9999999": codes.OK,
		"1234568": codes.NotFound, "99999990000001": codes.NotFound, "fffffff": codes.NotFound, "0000000": codes.NotFound,
	} {
		_, err := x.find(prefix)
		if got := errdefs.Code(err); got != want {
			t.Errorf("%s: %v, want %v: %v", prefix, got, want, err)
		}
	}
}

func TestRecordOfAnotherImageIsRefused(t *testing.T) {
	body := []byte(`{"sequence":1,"config":"e30="}`) // {}
	if _, err := decodeRecord(digest.FromString("{}").String(), body); err != nil {
		t.Error(err)
	}
	for _, id := range []string{"sha256:" + strings.Repeat("0", 64), "sha256:../x"} {
		if _, err := decodeRecord(id, body); err == nil {
			t.Errorf("accepted as %s", id)
		}
	}
}

// Only the fields of a configuration that containers use are kept decoded and written to their
// records.
func TestImageKeepsOnlyContainerConfigDecoded(t *testing.T) {
	used := ocispec.ImageConfig{User: "u", Env: []string{"A=1"}, Entrypoint: []string{"e"}, Cmd: []string{"c"}, WorkingDir: "/w", StopSignal: "SIGHUP",
		Volumes: map[string]struct{}{"/v": {}}}
	all := ocispec.Image{Author: "a", Config: used, History: []ocispec.History{{Comment: "h"}}}
	all.Config.Labels = map[string]string{"l": "1"}
	all.Config.ExposedPorts = map[string]struct{}{"80/tcp": {}}
	raw, err := json.Marshal(all)
	if err != nil {
		t.Fatal(err)
	}
	img := imageRecord{Config: raw}.image("sha256:x", nil)
	if !reflect.DeepEqual(img.Config, used) {
		t.Errorf("kept: %+v", img.Config)
	}
	if got, err := img.Specification(); err != nil || !reflect.DeepEqual(got, all) {
		t.Errorf("all of it: %+v, %v", got, err)
	}
}

// If a tag is pushed again and again, the number of an image's digests is limited; the last ones
// stay.
func TestImageKeepsLastDigests(t *testing.T) {
	ref, err := registry.ParseReference("example.com/app:v1")
	if err != nil {
		t.Fatal(err)
	}
	var r imageRecord
	for i := range 3 * maxDigests {
		r = r.with(ref, digest.FromString(fmt.Sprint(i)))
		if last := ref.WithDigest(digest.FromString(fmt.Sprint(i))); len(r.Digests) > maxDigests || r.Digests[len(r.Digests)-1] != last {
			t.Fatalf("%d digests, the last is %s, not %s", len(r.Digests), r.Digests[len(r.Digests)-1], last)
		}
	}
	if !slices.Equal(r.Tags, []string{ref.String()}) {
		t.Errorf("tags %q", r.Tags)
	}
}

func TestRecordDiskSize(t *testing.T) {
	dir := t.TempDir()
	records, err := record.OpenDir(dir, "image", recordVersion, record.Power)
	if err != nil {
		t.Fatal(err)
	}
	rec := imageRecord{Sequence: 7, Tags: []string{"docker.io/library/a:b"}, Digests: slices.Repeat([]string{"docker.io/library/a@" + digest.FromString("x").String()}, 50), Size: 1 << 40}
	for _, n := range []int{0, 1000, 100_000} {
		rec.Config = bytes.Repeat([]byte("x"), n)
		if err := records.Write("r", rec); err != nil {
			t.Fatal(err)
		}
		file, err := filepath.Glob(filepath.Join(dir, "r*"))
		if err != nil || len(file) != 1 {
			t.Fatal(file, err)
		}
		info, err := os.Stat(file[0])
		if err != nil {
			t.Fatal(err)
		}
		if got := int64(rec.diskSize()); got < info.Size() || got > info.Size()+4096+256 {
			t.Errorf("config of %d bytes: %d, the file has %d", n, got, info.Size())
		}
	}
}

func FuzzDecodeRecord(f *testing.F) {
	f.Add([]byte(`{"sequence":1,"tags":["docker.io/library/a:b"],"size":1,"config":"e30="}`))
	f.Add([]byte(`{"config":"eyJyb290ZnMiOnsiZGlmZl9pZHMiOlsiLi4vLi4iXX19"}`))
	f.Fuzz(func(t *testing.T, body []byte) {
		var rec imageRecord
		for _, id := range []string{digest.FromString("{}").String(), digest.FromBytes(body).String()} {
			var err error
			if rec, err = decodeRecord(id, body); err != nil {
				if text := err.Error(); len(text) > 1000 || !utf8.ValidString(text) {
					t.Fatalf("%d bytes: %q", len(text), text)
				}
				continue
			}
			for _, d := range rec.image(id, nil).Layers {
				if d.Validate() != nil {
					t.Fatalf("accepted the layer %q", d)
				}
			}
		}
	})
}

// A container's image is reported by the registry's digest, in the repository that the pod's author
// named.
func TestDigestedReference(t *testing.T) {
	digestOf := func(n int) string { return digest.FromString(fmt.Sprint(n)).String() }
	first, moved, other := "docker.io/library/app@"+digestOf(1), "docker.io/library/app@"+digestOf(2), "example.com/app@"+digestOf(1)
	img := &Image{ID: digestOf(9), RepoDigests: []string{first, moved, other}}
	for _, tc := range []struct{ name, written, want string }{
		{"tag", "example.com/app:v1", other},
		{"short name", "app", moved},
		{"digest that the image has", "app@" + digestOf(1), first},
		{"digest that the image lacks", "app@" + digestOf(3), moved},
		{"another repository", "example.com/apple:v1", other},
		{"the ID", digestOf(9), other},
		{"no reference", "//", other},
		{"nothing", "", other},
	} {
		t.Run(tc.name, func(t *testing.T) {
			if got := img.DigestedReference(tc.written); got != tc.want {
				t.Errorf("got %s, want %s", got, tc.want)
			}
		})
	}
	if got := (&Image{ID: digestOf(9)}).DigestedReference("app"); got != "" {
		t.Errorf("an image without digests: %q", got)
	}
	ref, err := registry.ParseReference("app")
	if err != nil {
		t.Fatal(err)
	}
	r := imageRecord{Digests: []string{first, moved}}.with(ref, digest.Digest(digestOf(1)))
	if !slices.Equal(r.Digests, []string{moved, first}) {
		t.Errorf("after another pull of the first digest: %q", r.Digests)
	}
}

// A record is invalid if its ID does not match its blobs.
func TestSameConfigWithOtherBlobsIsAnotherImage(t *testing.T) {
	rec := imageRecord{Config: []byte(`{"rootfs":{"diff_ids":["` + digest.FromString("tar").String() + `"]}}`), Blobs: []digest.Digest{digest.FromString("blob")}}
	other := rec.otherID()
	for _, id := range []string{digest.FromBytes(rec.Config).String(), other} {
		if _, err := decodeRecord(id, encoded(t, rec)); err != nil {
			t.Error(err)
		}
	}
	for what, blobs := range map[string][]digest.Digest{"others": {digest.FromString("other")}, "too many": {rec.Blobs[0], rec.Blobs[0]}, "no digest": {"x"}} {
		rec.Blobs = blobs
		if _, err := decodeRecord(other, encoded(t, rec)); err == nil {
			t.Errorf("%s: taken for %s", what, other)
		}
	}
}

func encoded(t *testing.T, rec imageRecord) []byte {
	t.Helper()
	data, err := json.Marshal(rec)
	if err != nil {
		t.Fatal(err)
	}
	return data
}
