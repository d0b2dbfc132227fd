package image_test

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"runtime"
	"strings"
	"sync"
	"testing"

	"github.com/opencontainers/go-digest"

	"berth/image/pull"
	"berth/image/registry/registrytest"
	"berth/image/unpack"
	"berth/internal/errdefs"
	"berth/internal/testutil"
)

// openFiles counts this process's descriptors.
func openFiles(t *testing.T) int {
	t.Helper()
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(entries)
}

// TestPullsLeaveNothingOpen: connections, files and goroutines are gone after
// pulls that succeed, fail and are cancelled.
func TestPullsLeaveNothingOpen(t *testing.T) {
	s := openStore(t, pull.Config{})
	files, goroutines := openFiles(t), runtime.NumGoroutine()
	t.Run("pulls", func(t *testing.T) { // its registry ends with it
		reg := registrytest.New(t)
		good, bad := gzipped(t, "good", strings.Repeat("x", 100_000)), gzipped(t, "bad", "x")
		bad.DiffID = digest.FromString("something else")
		reg.PutImage("good", "v1", "", good)
		reg.PutImage("bad", "v1", "", bad)
		reg.PutImage("held", "v1", "", gzipped(t, "held", "x"))
		mustPull(t, s, reg.Host()+"/good:v1")
		for _, ref := range []string{"/bad:v1", "/missing:v1"} {
			if _, err := s.Pull(t.Context(), reg.Host()+ref, nil); err == nil {
				t.Errorf("%s was pulled", ref)
			}
		}
		ctx, cancel := context.WithCancel(t.Context())
		g := gateBlob(reg, gzipped(t, "held", "x").Blob)
		done := pullLater(ctx, s, reg.Host()+"/held:v1")
		<-g.arrived
		cancel()
		if err := <-done; err == nil {
			t.Error("a cancelled pull has succeeded")
		}
		close(g.open)
		reg.Client().CloseIdleConnections() // connections that filled the registry
		listener := 1
		eventually(t, "connections to the registry are closed", func() bool { return openFiles(t) <= files+listener })
	})
	eventually(t, fmt.Sprintf("%d files and %d goroutines are left", files, goroutines), func() bool {
		return openFiles(t) <= files && runtime.NumGoroutine() <= goroutines
	})
}

// TestConcurrentPullsAndRemovals: images that share layers are pulled and removed concurrently.
// Held layers are complete at all times, and none is left in the end.
func TestConcurrentPullsAndRemovals(t *testing.T) {
	reg := registrytest.New(t)
	s := openStore(t, pull.Config{})
	base := gzipped(t, "base", "x")
	var refs []string
	for i := range 3 {
		name := fmt.Sprintf("app%d", i)
		reg.PutImage(name, "v1", name, base, gzipped(t, "own", name))
		refs = append(refs, reg.Host()+"/"+name+":v1")
	}
	var workers sync.WaitGroup
	for w := range 4 {
		workers.Go(func() {
			for i := range 12 {
				if err := pullHoldRemove(t.Context(), s, refs[(w+i)%len(refs)], fmt.Sprintf("ctr-%d-%d", w, i)); err != nil {
					t.Error(err)
				}
			}
		})
	}
	workers.Wait()
	for _, ref := range refs {
		if err := s.Remove(t.Context(), ref); err != nil {
			t.Error(err)
		}
	}
	wantEmpty(t, s)
}

// pullHoldRemove is the life of an image and a container. Another worker may
// remove the image in between: then, and only then, Hold may fail.
func pullHoldRemove(ctx context.Context, s *node, ref, holder string) error {
	img, err := s.Pull(ctx, ref, nil)
	if err != nil {
		return err
	}
	spec, err := s.Hold(holder, img.Layers)
	if err != nil && !errdefs.IsNotFound(err) {
		return err
	}
	for _, l := range spec.Layers {
		if _, err := os.Stat(l.Path); err != nil {
			return fmt.Errorf("a held layer is not there: %w", err)
		}
	}
	if err := s.Remove(ctx, ref); err != nil {
		return err
	}
	for _, l := range spec.Layers {
		if _, err := os.Stat(l.Path); err != nil {
			return fmt.Errorf("a held layer went with its image: %w", err)
		}
	}
	return s.Release(holder)
}

// TestReadsNeverWait: Get and List answer while the writer accesses the disk.
func TestReadsNeverWait(t *testing.T) {
	testutil.NeedRoot(t)
	reg := registrytest.New(t)
	s, err := open(t.Context(), pull.Config{Root: t.TempDir(), Unpack: unpack.Layer}, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	reg.PutImage("app", "v1", "", plain(t, "f", "1"))
	img := mustPull(t, s, reg.Host()+"/app:v1")
	release, err := s.LockWriter(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer release()
	if got, err := s.Get(img.ID); err != nil || got != img || len(s.List()) != 1 {
		t.Errorf("%v, %v", got, err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := s.Remove(ctx, img.ID); err == nil {
		t.Error("a second writer did not wait")
	}
}
