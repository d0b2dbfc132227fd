package image_test

import (
	"bytes"
	"context"
	"io"
	"os"
	"slices"
	"testing"

	"github.com/opencontainers/go-digest"

	"berth/checkpoint/record"
	"berth/image"
	"berth/image/layer"
	"berth/image/pull"
	"berth/image/registry/registrytest"
	"berth/image/unpack"
)

// takenOver unpacks as unpack.Layer does, with one exception: it treats blob as one that
// compromised the process. For that it creates other files and reports claim as the tar's digest.
func takenOver(t *testing.T, blob []byte, claim digest.Digest) layer.Unpacker {
	return func(ctx context.Context, tree *os.File, in io.Reader, job unpack.Job) (unpack.Result, error) {
		sum := digest.SHA256.Digester()
		result, err := unpack.Layer(ctx, tree, io.TeeReader(in, sum.Hash()), job)
		if sum.Digest() == digest.FromBytes(blob) {
			result.Digest = claim
		}
		return result, err
	}
}

// A layer with a false digest affects only images that name its blob. That holds if it is used in
// an image of its own, and below the same configuration as the image that it imitates.
func TestFalseLayerServesOnlyItsBlob(t *testing.T) {
	for _, liarFirst := range []bool{true, false} {
		reg := registrytest.New(t)
		honest, evil := gzipped(t, "f", "honest"), gzipped(t, "f", "evil")
		liar := registrytest.Layer{Blob: evil.Blob, MediaType: evil.MediaType, DiffID: honest.DiffID}
		reg.PutImage("victim", "v1", "the same configuration", honest)
		reg.PutImage("liar", "v1", "the same configuration", liar)
		reg.PutImage("other", "v1", "another one", liar)
		root := t.TempDir()
		s := openStore(t, pull.Config{Root: root, Unpack: takenOver(t, evil.Blob, honest.DiffID)})
		names := []string{"/victim:v1", "/liar:v1", "/other:v1"}
		if liarFirst {
			slices.Reverse(names)
		}
		for _, name := range names {
			mustPull(t, s, reg.Host()+name)
		}
		check := func(s *node) {
			t.Helper()
			for name, want := range map[string]string{"/victim:v1": "honest", "/liar:v1": "evil", "/other:v1": "evil"} {
				img, err := s.Get(reg.Host() + name)
				if err != nil {
					t.Fatal(err)
				}
				if got := readFile(t, s, img, "f"); got != want {
					t.Errorf("%s holds %q, want %q", name, got, want)
				}
				if byID, err := s.Get(img.ID); err != nil || byID != img {
					t.Errorf("by its ID %s is %v, %v", name, byID, err)
				}
			}
		}
		check(s)
		if err := s.Close(); err != nil {
			t.Fatal(err)
		}
		s = openStore(t, pull.Config{Root: root})
		check(s)
		// A pull of each by another name finds the same image and adds no layer.
		reg.PutImage("victim-again", "v1", "the same configuration", honest)
		reg.PutImage("liar-again", "v1", "the same configuration", liar)
		for _, name := range []string{"liar", "victim"} {
			before, err := s.Get(reg.Host() + "/" + name + ":v1")
			if err != nil {
				t.Fatal(err)
			}
			if again := mustPull(t, s, reg.Host()+"/"+name+"-again:v1"); again.ID != before.ID {
				t.Errorf("%s is %s, and by another name %s", name, before.ID, again.ID)
			}
		}
		if len(s.List()) != 3 || len(s.LayerNames()) != 2 {
			t.Errorf("%d images, layers %v", len(s.List()), s.LayerNames())
		}
		for _, img := range s.List() {
			if err := s.Remove(t.Context(), img.ID); err != nil {
				t.Error(err)
			}
		}
		wantEmpty(t, s)
	}
}

// Layers that berth 0.2.0 unpacked serve the images that it recorded, and no others.
func TestLayersOfOlderBerthServeTheirImages(t *testing.T) {
	reg := registrytest.New(t)
	content := gzipped(t, "f", "content")
	reg.PutImage("app", "v1", "", content)
	reg.PutImage("app", "v2", "another configuration", content)
	root := t.TempDir()
	s := openStore(t, pull.Config{Root: root})
	img := mustPull(t, s, reg.Host()+"/app:v1")
	rec := s.Snapshot().Records()[img.ID]
	if err := s.Remove(t.Context(), img.ID); err != nil {
		t.Fatal(err)
	}
	// As 0.2.0 would have it.
	if err := s.Primary().Create(t.Context(), layer.Source{DiffID: content.DiffID}, bytes.NewReader(content.Blob), unpack.Limits{}); err != nil {
		t.Fatal(err)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	rec.Blobs = nil
	old, err := record.OpenDir(root+"/"+"records", image.RecordKind, 1, record.Power)
	if err != nil {
		t.Fatal(err)
	}
	if err := old.Write(image.RecordName(img.ID), rec); err != nil {
		t.Fatal(err)
	}

	s = openStore(t, pull.Config{Root: root})
	if again := mustPull(t, s, reg.Host()+"/app:v1"); again.ID != img.ID || readFile(t, s, again, "f") != "content" || reg.Count("/blobs/"+digest.FromBytes(content.Blob).String()) != 1 {
		t.Errorf("got %+v", again)
	}
	newer := mustPull(t, s, reg.Host()+"/app:v2")
	if slices.Equal(newer.Layers, []digest.Digest{content.DiffID}) || readFile(t, s, newer, "f") != "content" {
		t.Errorf("got %+v", newer)
	}
	if err := s.Remove(t.Context(), img.ID); err != nil {
		t.Error(err)
	}
	if got := s.LayerNames(); !slices.Equal(got, newer.Layers) {
		t.Errorf("layers %v are left, %v are needed", got, newer.Layers)
	}
}
