package stats

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"berth/internal/diskusage"
	"berth/internal/safefs"
	"berth/internal/testutil"
)

// kubelet evicts pods by the published size. A container must not be able to lower it below the
// known use.
func TestSettle(t *testing.T) {
	t.Parallel()
	usage := func(n uint64) diskusage.Usage { return diskusage.Usage{Bytes: n << 10, Inodes: n} }
	for name, c := range map[string]struct {
		walks walks // latest first
		last  uint64
		err   error
		want  uint64
	}{
		"files were removed":                    {walks{usage(1), usage(9), usage(9)}, 9, nil, 1},
		"files may have been moved":             {walks{usage(1), usage(2), usage(9)}, 9, diskusage.ErrChanged, 9},
		"directories change, three walks agree": {walks{usage(1), usage(1), usage(1)}, 9, diskusage.ErrChanged, 1},
		"more, and directories change":          {walks{usage(9), usage(2), usage(1)}, 2, diskusage.ErrChanged, 9},
		"too deep":                              {walks{usage(1), usage(1)}, 1, safefs.ErrTooDeep, 1000},
		"slow":                                  {walks{usage(3), usage(9)}, 9, errSlow, 9},
		"slow, and more than before":            {walks{usage(10), usage(9)}, 9, errSlow, 10},
		"too slow":                              {walks{usage(3), usage(9)}, 9, errWalkTimeout, 1000},
		"interrupted by a moved directory":      {walks{usage(3), usage(9)}, 9, safefs.ErrMoved, 9},
		"the disk fails":                        {walks{usage(3), usage(9)}, 9, io.ErrUnexpectedEOF, 9},
	} {
		t.Run(name, func(t *testing.T) {
			if got := settle(usage(c.last), c.walks, c.err, usage(1000)); got != usage(c.want) {
				t.Errorf("got %+v, want %+v", got, usage(c.want))
			}
		})
	}
}

// The larger of walk and quota is published. Each includes files that the other misses.
func TestQuotaOfLayer(t *testing.T) {
	t.Parallel()
	broken := errors.New("broken")
	for name, c := range map[string]struct {
		known bool
		quota uint64
		err   error
		want  uint64
	}{
		"open files without names": {true, 9, nil, 9},
		"files left the project":   {true, 1, nil, 5},
		"no quotas":                {false, 0, nil, 5},
		"the quota is unreadable":  {false, 0, broken, 5},
	} {
		t.Run(name, func(t *testing.T) {
			counter := NewSampler(SamplerConfig{Quota: func(project uint32) (diskusage.Usage, bool, error) {
				if project != 7 {
					t.Errorf("project %d", project)
				}
				return diskusage.Usage{Bytes: c.quota, Inodes: c.quota}, c.known, c.err
			}})
			count := &Sample{Layer: diskusage.Usage{Bytes: 5, Inodes: 5}}
			if err := counter.addQuota(&Target{Project: 7}, count); !errors.Is(err, c.err) || count.Layer.Bytes != c.want {
				t.Errorf("%v, %+v", err, count.Layer)
			}
		})
	}
}

// A layer whose walk fails keeps its size and is sampled again, although its pod is idle.
func TestFailedWalkKeepsSize(t *testing.T) {
	upper := filepath.Join(t.TempDir(), "upper")
	for i := range 100 {
		testutil.Must(t, os.MkdirAll(fmt.Sprintf("%s/%d%s", upper, i, strings.Repeat("/d", 20)), 0o700))
	}
	c := NewSampler(SamplerConfig{Layers: filepath.Dir(upper), Images: filepath.Dir(upper), Log: slog.New(slog.DiscardHandler)})
	testutil.Must(t, c.Locate())
	root, err := os.Open(upper)
	testutil.Must(t, err)
	counted := func(last *Sample) (*Sample, error) {
		s := &Target{ID: "c", State: &SampleState{}}
		s.State.last.Store(last)
		count := &Sample{usedCPU: "17"}
		return count, c.measureLayer(t.Context(), s, root, count)
	}
	first, err := counted(nil)
	if err != nil || first.Layer.Inodes != 1+100*21 || first.usedCPU == "" {
		t.Fatalf("%+v, %v", first, err)
	}
	testutil.Must(t, errors.Join(root.Close(), os.RemoveAll(upper), os.WriteFile(upper, nil, 0o600)))
	root, err = os.Open(upper) // no longer a directory
	testutil.Must(t, err)
	defer root.Close()
	second, err := counted(first)
	if err != nil || second.Layer != first.Layer || second.usedCPU != "" {
		t.Errorf("%+v, %v, want %+v", second, err, first.Layer)
	}
}

// Anonymous volumes count like the writable layer.
func TestVolumesCount(t *testing.T) {
	layers := t.TempDir()
	testutil.Must(t, errors.Join(os.MkdirAll(layers+"/a/upper", 0o700), os.MkdirAll(layers+"/a/volumes/0", 0o700),
		os.WriteFile(layers+"/a/volumes/0/file", make([]byte, 1<<20), 0o600)))
	c := NewSampler(SamplerConfig{Layers: layers, Images: layers, Log: slog.New(slog.DiscardHandler)})
	testutil.Must(t, c.Locate())
	upper, err := os.Open(layers + "/a/upper")
	testutil.Must(t, err)
	defer upper.Close()
	var count Sample
	testutil.Must(t, c.measureLayer(t.Context(), &Target{ID: "a", State: &SampleState{}}, upper, &count))
	if count.Layer.Inodes != 4 || count.Layer.Bytes < 1<<20 {
		t.Errorf("got %+v", count.Layer)
	}
}

// A slow layer is handed to the goroutine for slow layers, even when its container has ended. That
// goroutine completes the walk, or publishes everything that is used of the filesystem.
func TestSlowLayer(t *testing.T) {
	for name, c := range map[string]struct {
		longest time.Duration
		whole   bool
	}{
		"counted beside the others": {time.Hour, true},
		"too slow":                  {1, false},
	} {
		t.Run(name, func(t *testing.T) {
			layers := t.TempDir()
			testutil.Must(t, errors.Join(os.MkdirAll(layers+"/a/upper/b/c", 0o700), os.WriteFile(layers+"/a/upper/b/file", make([]byte, 1<<20), 0o600)))
			var sample SampleState
			counter := NewSampler(SamplerConfig{Layers: layers, Images: layers, Log: slog.New(slog.DiscardHandler),
				Begin: func(string, string) func() { return func() {} }, Targets: func(yield func(Target) bool) {
					yield(Target{ID: "a", State: &sample, FinishedAt: time.Now().Add(-time.Hour)})
				}})
			counter.quick, counter.longest = 1, c.longest
			testutil.Must(t, counter.Locate())
			first, _ := counter.next(false)
			counter.sampleNext(t.Context(), first)
			if again, _ := counter.next(false); again != nil || !sample.last.Load().partial {
				t.Fatalf("%+v, next %v", sample.last.Load(), again)
			}
			second, _ := counter.next(true)
			counter.sampleNext(t.Context(), second)
			got := sample.last.Load()
			if c.whole && (got.Layer.Inodes != 4 || got.Layer.Bytes < 1<<20) || !c.whole && got.Layer != counter.filesystem.Load().occupied {
				t.Errorf("got %+v", got)
			}
			if again, _ := counter.next(true); again != nil {
				t.Error("the layer was walked again")
			}
		})
	}
}

// Other layers are sampled while a slow layer is walked.
func TestSlowLayerDelaysNoOther(t *testing.T) {
	layers := t.TempDir()
	states := map[string]*SampleState{"slow": {}, "other": {}}
	states["slow"].slow.Store(true)
	ctx, cancel := context.WithCancel(t.Context())
	begun, ended := make(chan struct{}), make(chan struct{})
	counter := NewSampler(SamplerConfig{Layers: layers, Images: layers, Log: slog.New(slog.DiscardHandler), Begin: func(_, object string) func() {
		switch object {
		case "container slow":
			close(begun)
			<-ctx.Done()
		case "container other":
			<-begun
			cancel()
		}
		return func() {}
	}, Targets: func(yield func(Target) bool) {
		for id, sample := range states {
			if !yield(Target{ID: id, State: sample}) {
				return
			}
		}
	}})
	testutil.Must(t, counter.Locate())
	go func() {
		defer close(ended)
		counter.Run(ctx)
	}()
	<-ended // each walk waits for the other
}
