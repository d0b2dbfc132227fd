package integration

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"google.golang.org/grpc/codes"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/integration/fixture"
	"berth/integration/harness"
	"berth/integration/machine"
)

// brokenPull is an image on a registry that breaks off the transfer of its only layer at 60 %.
type brokenPull struct {
	*fixture.Cut
	registry *fixture.Registry
	name, id string
}

const brokenSize = 4 << 20

func newBrokenPull(t *testing.T) *brokenPull {
	t.Helper()
	r := harness.NewRegistry(t)
	layer := harness.PackLayer(t, fixture.Tree{fixture.File("file", 0o644, noise(brokenSize))}, fixture.Gzip)
	b := &brokenPull{registry: r}
	b.name, b.id = harness.Push(t, r, "broken:latest", harness.Get(fixture.ImageOf(v1.Config{}, layer))(t))
	blob := blobOf(t, layer)
	b.Cut = &fixture.Cut{Digest: harness.DigestOf(t, layer), Blob: blob, After: len(blob) * 60 / 100}
	r.Hook(b.Hook)
	return b
}

// waits makes the transfer stop, instead of breaking off, until the client leaves.
func (b *brokenPull) waits() { b.Wait = func(ctx context.Context) { <-ctx.Done() } }

func partialDirOf(d *harness.Daemon) string { return filepath.Join(d.Root, "images/partial/blobs") }

// keptBytes returns the sizes of all partial layers.
func keptBytes(d *harness.Daemon) (bytes int64) {
	for _, name := range machine.ReadDir(partialDirOf(d)) {
		if info, err := os.Stat(filepath.Join(partialDirOf(d), name)); err == nil {
			bytes += info.Size()
		}
	}
	return bytes
}

// arrived waits until the daemon has written what the registry has sent.
func (b *brokenPull) arrived(t *testing.T, d *harness.Daemon) {
	t.Helper()
	harness.EventuallyGot(t, "bytes of the layer", func() (bool, any) { n := keptBytes(d); return n == int64(b.After), n })
}

// fail makes a pull fail. The daemon keeps the bytes.
func (b *brokenPull) fail(t *testing.T, d *harness.Daemon) {
	t.Helper()
	_, err := d.TryPull(t, b.name, nil)
	harness.WantCode(t, err, codes.PermissionDenied)
	b.arrived(t, d)
	d.StateMatches(t)
}

// resumes pulls the image, and fails the test if more than the rest of the layer was moved.
func (b *brokenPull) resumes(t *testing.T, d *harness.Daemon) {
	t.Helper()
	b.Moved()
	b.pulls(t, d)
	if n, rest := b.Moved(), len(b.Blob)-b.After; n != rest {
		t.Errorf("the pull moved %d bytes, want %d of %d", n, rest, len(b.Blob))
	}
}

// pulls pulls the image and compares its content.
func (b *brokenPull) pulls(t *testing.T, d *harness.Daemon) {
	t.Helper()
	b.Lift()
	harness.Equal(t, "image", d.Pull(t, b.name), b.id)
	harness.Equal(t, "kept bytes", keptBytes(d), 0)
	d.StateMatches(t)
	archive := filepath.Join(t.TempDir(), "image.tar")
	runBerth(t, d, "image", "save", "-o", archive, b.name) // restores the tar and checks its digest
	if content := harness.Get(os.ReadFile(archive))(t); !bytes.Contains(content, []byte(noise(brokenSize))) {
		t.Error("the file in the image is wrong")
	}
	harness.Must(t, d.Images.RemoveImage(t.Context(), &runtimeapi.ImageSpec{Image: b.name}))
	harness.NoTraceOf(t, d, b.name)
}

// A cancelled pull keeps its bytes, no matter who cancels it, and the next pull continues.
func TestCancelledPullResumes(t *testing.T) {
	command := func(args ...string) func(*testing.T, *harness.Daemon, *brokenPull) (cancel func()) {
		return func(t *testing.T, d *harness.Daemon, b *brokenPull) func() {
			cmd := operatorCommand(d, append(args, b.name)...)
			var out bytes.Buffer
			cmd.Stdout, cmd.Stderr = &out, &out
			harness.Must(t, cmd.Start())
			return func() {
				harness.Must(t, cmd.Process.Signal(syscall.SIGINT))
				_ = cmd.Wait() // the exit code follows
				harness.Equal(t, "exit code", cmd.ProcessState.ExitCode(), 130)
				harness.WantText(t, "output", out.String(), "interrupted")
			}
		}
	}
	for name, start := range map[string]func(*testing.T, *harness.Daemon, *brokenPull) (cancel func()){
		"berth image pull": command("image", "pull"),
		"berth pull":       command("pull", "--quiet"),
		"PullImage": func(t *testing.T, d *harness.Daemon, b *brokenPull) func() {
			ctx, cancel := context.WithCancel(t.Context())
			done := harness.Go(func() error {
				_, err := d.Images.PullImage(ctx, &runtimeapi.ImageSpec{Image: b.name}, nil, nil)
				return err
			})
			return func() {
				cancel()
				harness.WantCode(t, <-done, codes.Canceled)
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			b := newBrokenPull(t)
			b.waits()
			d := harness.StartDaemon(t)
			cancel := start(t, d, b)
			b.arrived(t, d)
			cancel()
			harness.Eventually(t, "the pull ends", func() error {
				if pulls := harness.Get(d.Cri.Status(t.Context(), true))(t).Info["pulls"]; pulls != "[]" {
					return fmt.Errorf("pulls: %s", pulls)
				}
				return nil
			})
			d.StateMatches(t)
			b.resumes(t, d)
		})
	}
}

// A daemon that is killed during a pull leaves bytes of any length and content. The next daemon
// uses them if they are right. Otherwise the pull fetches the layer as a whole.
func TestKilledDaemonResumesPull(t *testing.T) {
	for _, tc := range []struct {
		name    string
		damage  func(path string, size int64) error
		resumes bool
	}{
		{"intact", func(string, int64) error { return nil }, true},
		{"truncated", func(path string, size int64) error { return os.Truncate(path, size/2) }, false},
		{"zeros at the end", func(path string, size int64) error {
			if err := os.Truncate(path, size-(1<<20)); err != nil {
				return err
			}
			return os.Truncate(path, size)
		}, false},
		{"other content", func(path string, size int64) error {
			return os.WriteFile(path, bytes.Repeat([]byte("other"), int(size)/5), 0o600)
		}, false},
		{"longer than the layer", func(path string, size int64) error { return os.Truncate(path, 10*size) }, false},
		{"empty", func(path string, _ int64) error { return os.Truncate(path, 0) }, false},
	} {
		t.Run(tc.name, func(t *testing.T) {
			b := newBrokenPull(t)
			b.waits()
			d := harness.StartDaemon(t)
			done := harness.Go(func() error { _, err := d.TryPull(t, b.name, nil); return err })
			b.arrived(t, d)
			d.Kill(t)
			if <-done == nil {
				t.Error("the pull succeeded")
			}
			names := machine.ReadDir(partialDirOf(d))
			harness.Must(t, tc.damage(filepath.Join(partialDirOf(d), names[0]), int64(b.After)))
			d.Start(t)
			d.StateMatches(t)
			if tc.resumes {
				b.resumes(t, d)
			} else {
				b.pulls(t, d)
			}
		})
	}
}

// The daemon deletes partial layers when they expire, while it runs and at its start.
func TestPartialLayersExpire(t *testing.T) {
	const short = `pull.partial_layer_ttl = "1s"`
	gone := func(t *testing.T, d *harness.Daemon) {
		t.Helper()
		harness.EventuallyGot(t, "no partial layers", func() (bool, any) { n := keptBytes(d); return n == 0, n })
		harness.NoTraceOf(t, d, "any")
	}
	t.Run("running", func(t *testing.T) {
		b := newBrokenPull(t)
		d := harness.StartDaemon(t, harness.WithConfig(short))
		_, err := d.TryPull(t, b.name, nil)
		harness.WantCode(t, err, codes.PermissionDenied)
		gone(t, d)
	})
	t.Run("at start", func(t *testing.T) {
		b := newBrokenPull(t)
		const day = `pull.partial_layer_ttl = "24h"`
		d := harness.StartDaemon(t, harness.WithConfig(day))
		b.fail(t, d)
		d.End(t)
		past := time.Now().Add(-25 * time.Hour)
		for _, name := range machine.ReadDir(partialDirOf(d)) {
			harness.Must(t, os.Chtimes(filepath.Join(partialDirOf(d), name), past, past))
		}
		d.Start(t)
		harness.Equal(t, "kept bytes", keptBytes(d), 0)
		harness.NoTraceOf(t, d, b.name)
	})
}

// berth check --state reports files that are not partial layers, and those that should have been
// deleted.
func TestStateCheckKnowsPartialLayers(t *testing.T) {
	b := newBrokenPull(t)
	d := harness.StartDaemon(t)
	b.fail(t, d)
	kept := filepath.Join(partialDirOf(d), machine.ReadDir(partialDirOf(d))[0])
	orphan := filepath.Join(partialDirOf(d), "orphan")
	harness.Must(t, os.WriteFile(orphan, nil, 0o600))
	past := time.Now().Add(-25 * time.Hour)
	harness.Must(t, os.Chtimes(kept, past, past))
	var found []string
	for _, diff := range d.StateCheck(t) {
		found = append(found, diff.Text())
	}
	harness.Equal(t, "differences", strings.Join(found, "\n"), "layers: "+kept+
		": expected a file that is at most 24h0m0s old (pull.partial_layer_ttl), found an older one\nlayers: "+orphan+": not a berth file")
	harness.Must(t, os.Remove(orphan))
	d.Restart(t)
	harness.NoTraceOf(t, d, b.name)
}

// The commands for images count partial layers, and prune removes them. So does the removal of an
// image, as by kubelet's garbage collection.
func TestPartialLayerCommands(t *testing.T) {
	b := newBrokenPull(t)
	d := harness.StartDaemon(t)
	d.Pull(t, harness.BaseImage)
	usedBefore := imageBytes(t, d)
	b.fail(t, d)
	if used := imageBytes(t, d) - usedBefore; used != uint64(b.After) {
		t.Errorf("ImageFsInfo has %d more bytes, want %d", used, b.After)
	}
	var usage struct {
		Total   uint64
		Images  []struct{ Unique, Shared uint64 }
		Partial struct {
			Unfinished, Finished int
			Bytes                uint64
		}
	}
	harness.Must(t, json.Unmarshal([]byte(runBerth(t, d, "image", "du", "-o", "json")), &usage))
	if p := usage.Partial; p.Unfinished != 1 || p.Finished != 0 || p.Bytes != uint64(b.After) ||
		usage.Total != usage.Images[0].Unique+usage.Images[0].Shared+p.Bytes {
		t.Errorf("disk usage: %+v", usage)
	}
	harness.WantText(t, "disk usage", runBerth(t, d, "image", "du"), "partial layers (1)")
	harness.WantText(t, "prune --dry-run", runBerth(t, d, "image", "prune", "--dry-run"), "1 partial layers would be removed")
	harness.Equal(t, "kept bytes", keptBytes(d), int64(b.After))
	harness.WantText(t, "prune", runBerth(t, d, "image", "prune"), "1 partial layers removed")
	harness.Equal(t, "kept bytes", keptBytes(d), 0)
	harness.WantNoText(t, "disk usage", runBerth(t, d, "image", "du"), "partial")
	b.Lower()
	b.fail(t, d)
	harness.Must(t, d.Images.RemoveImage(t.Context(), &runtimeapi.ImageSpec{Image: harness.BaseImage}))
	harness.Equal(t, "kept bytes", keptBytes(d), 0)
}

// imageBytes returns the disk usage that kubelet sees.
func imageBytes(t *testing.T, d *harness.Daemon) uint64 {
	t.Helper()
	info := harness.Get(d.Images.ImageFsInfo(t.Context()))(t)
	return info.GetImageFilesystems()[0].GetUsedBytes().GetValue()
}
