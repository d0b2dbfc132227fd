package image_test

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"berth/image"
	"berth/image/pull"
	"berth/internal/testutil"
)

// preloading runs Preload until stop.
func preloading(t *testing.T, s *node, dir string) (stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		s.Preload(ctx, []string{dir})
	}()
	return func() { cancel(); <-done }
}

func waitImage(t *testing.T, s *node, ref string) *image.Image {
	t.Helper()
	for deadline := time.Now().Add(20 * time.Second); ; time.Sleep(20 * time.Millisecond) {
		img, err := s.Get(ref)
		if err == nil {
			return img
		}
		if time.Now().After(deadline) {
			t.Fatal(err)
		}
	}
}

func TestPreload(t *testing.T) {
	dir, root := t.TempDir(), t.TempDir()
	testutil.Must(t, os.Chmod(dir, 0o755))
	put := func(name string, data []byte) {
		testutil.Must(t, os.WriteFile(filepath.Join(dir, name), data, 0o600))
	}
	put("bad.tar", []byte("not an archive"))
	put("one.tar.gz", gzipBytes(t, dockerArchive(t, "example.com/one:v1", imageWith(t, "one"))))
	log := &testutil.Buffer{}
	s := openUnsettled(t, pull.Config{Root: root}, log)
	testutil.Must(t, s.CollectGarbage(t.Context()))
	stop := preloading(t, s, dir)
	one := waitImage(t, s, "example.com/one:v1")
	if !one.Pinned {
		t.Error("the image is not pinned")
	}
	put("two.tar", dockerArchive(t, "example.com/two:v1", imageWith(t, "two")))
	waitImage(t, s, "example.com/two:v1")
	stop()
	if text := log.String(); strings.Count(text, "bad.tar") == 0 || strings.Count(text, "image loaded") != 2 {
		t.Errorf("log: %s", text)
	}

	// The next daemon loads only the archive whose image was removed.
	testutil.Must(t, s.Remove(t.Context(), "example.com/two:v1"))
	testutil.Must(t, s.Close())
	log = &testutil.Buffer{}
	s = openUnsettled(t, pull.Config{Root: root}, log)
	testutil.Must(t, s.CollectGarbage(t.Context()))
	stop = preloading(t, s, dir)
	waitImage(t, s, "example.com/two:v1")
	stop()
	if n := strings.Count(log.String(), "image loaded"); n != 1 {
		t.Errorf("%d images loaded again: %s", n, log.String())
	}

	// A tag that has moved does not move back after the removal of the older image.
	_, err := s.Tag(t.Context(), "example.com/two:v1", "example.com/one:v1")
	testutil.Must(t, err)
	testutil.Must(t, s.Remove(t.Context(), one.ID))
	stop = preloading(t, s, dir)
	put("three.tar", dockerArchive(t, "example.com/three:v1", imageWith(t, "three")))
	waitImage(t, s, "example.com/three:v1") // after the others
	stop()
	if now, err := s.Get("example.com/one:v1"); err != nil || now.ID == one.ID {
		t.Errorf("the tag names %+v, %v", now, err)
	}
}
