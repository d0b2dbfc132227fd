package cni

import (
	"bytes"
	"context"
	"errors"
	"io"
	"log/slog"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc/codes"

	"berth/internal/errdefs"
	"berth/internal/testutil"
)

// builtInList is a network of the plugin built-in.
const builtInList = `{"cniVersion":"1.1.0","name":"pods","plugins":[{"type":"built-in","subnets":["10.99.0.0/24"],"capabilities":{"ipRanges":true}}]}`

// Ranges may change while STATUS runs.
func TestStatusGetsRanges(t *testing.T) {
	b := newBed(t)
	b.plugin("built-in", `[ -e $record/go ] || { touch $record/asked; while [ ! -e $record/go ]; do sleep 0.01; done; }
grep -q 10.1.2.0/24 $record/built-in.STATUS.stdin || { echo '{"code":50,"msg":"the subnet overlaps"}'; exit 1; }`)
	b.writeConf("1.conflist", builtInList)
	n := b.start()
	testutil.Eventually(t, "STATUS is asked", func() bool { _, err := os.Stat(b.record + "/asked"); return err == nil })
	ranges, err := ParsePodCIDRs("10.1.2.0/24")
	testutil.Must(t, err)
	n.SetIPRanges(ranges)
	testutil.Must(t, os.WriteFile(b.record+"/go", nil, 0o600))
	b.ready(true)
	if seen := b.saw("built-in.STATUS.stdin"); !strings.Contains(seen, `"runtimeConfig":{"ipRanges":[[{"subnet":"10.1.2.0/24"}]]}`) {
		t.Errorf("STATUS saw %s", seen)
	}
	testutil.Must(t, n.AskStatus(t.Context()))
	n.SetIPRanges(nil)
	testutil.Eventually(t, "the plugin's error", func() bool {
		err := n.Status(context.Background())
		return errdefs.Code(err) == codes.Unavailable && strings.Contains(err.Error(), "the subnet overlaps")
	})
}

// fakeReader finds the obstacles that a test sets.
type fakeReader struct {
	PluginReader
	lock  sync.Mutex // guards found
	found func(conf []byte) ([]Obstacle, error)
}

func (r *fakeReader) set(found func([]byte) ([]Obstacle, error)) {
	r.lock.Lock()
	defer r.lock.Unlock()
	r.found = found
}

func (r *fakeReader) Obstacles(conf []byte) ([]Obstacle, error) {
	r.lock.Lock()
	defer r.lock.Unlock()
	return r.found(conf)
}

func none([]byte) ([]Obstacle, error) { return nil, nil }

func firewall([]byte) ([]Obstacle, error) {
	return []Obstacle{{Problem: "chain FORWARD drops", Fix: "accept"}}, nil
}

func failing([]byte) ([]Obstacle, error) { return nil, errors.New("no firewall to read") }

// newBuiltInBed starts a ready network of a built-in plugin whose obstacles come from reader.
func newBuiltInBed(t *testing.T, reader *fakeReader) (*bed, *testutil.Buffer) {
	t.Helper()
	log := &testutil.Buffer{}
	plugin := func(context.Context, []byte, []string) ([]byte, error) { return nil, nil }
	n, err := New(Config{ConfDir: "/nowhere", BinDirs: []string{"/nowhere"}, CacheDir: t.TempDir(), List: []byte(builtInList),
		BuiltIn: map[string]BuiltIn{"built-in": plugin}, Readers: Readers{Plugins: map[string]PluginReader{"built-in": reader}}},
		slog.New(slog.NewTextHandler(io.MultiWriter(log, testutil.NewLogWriter(t)), nil)))
	testutil.Must(t, err)
	t.Cleanup(n.Close)
	b := &bed{t: t, n: n}
	b.ready(true)
	testutil.Eventually(t, "a search", func() bool { return !n.view.Load().obstaclesAt.IsZero() })
	return b, log
}

// findObstacles triggers a search and waits until it has ended.
func (b *bed) findObstacles() {
	b.t.Helper()
	begin := time.Now()
	testutil.Eventually(b.t, "another search", func() bool {
		now := b.n.view.Load()
		if now.obstaclesAt.After(begin) {
			return true
		}
		if time.Since(now.obstaclesAt) < maxObstaclesAge { // the owner may store another view at the same time
			old := *now
			old.obstaclesAt = old.obstaclesAt.Add(-2 * maxObstaclesAge)
			b.n.view.CompareAndSwap(now, &old)
			b.n.askRefresh()
		}
		return false
	})
}

func TestObstaclesAreLoggedOnce(t *testing.T) {
	t.Parallel()
	reader := &fakeReader{found: firewall}
	b, log := newBuiltInBed(t, reader)
	if all := b.n.Info().Obstacles; len(all) != 1 || all[0] != "chain FORWARD drops: accept" {
		t.Errorf("obstacles are %q", all)
	}
	b.findObstacles()
	if n := strings.Count(log.String(), "chain FORWARD drops"); n != 1 {
		t.Errorf("%d warnings", n)
	}
	reader.set(none)
	b.findObstacles()
	if all := b.n.Info().Obstacles; len(all) != 0 || strings.Count(log.String(), "chain FORWARD drops") != 1 || strings.Count(log.String(), "the obstacles no longer exist") != 1 {
		t.Errorf("after the obstacle is gone: obstacles %q, log %s", all, log.String())
	}
}

// The network stays ready, and STATUS does not repeat the search.
func TestFailedObstacleSearchIsLoggedOnce(t *testing.T) {
	t.Parallel()
	reader := &fakeReader{found: failing}
	b, log := newBuiltInBed(t, reader)
	const warning = "no firewall to read"
	if n := strings.Count(log.String(), warning); n != 1 {
		t.Errorf("%d warnings", n)
	}
	at := b.n.view.Load().obstaclesAt
	for range 3 {
		before := b.n.view.Load().at
		b.n.askRefresh()
		testutil.Eventually(t, "a refresh", func() bool { return b.n.view.Load().at.After(before) })
	}
	if again := b.n.view.Load().obstaclesAt; again != at {
		t.Error("STATUS repeats the search")
	}
	b.findObstacles()
	if n := strings.Count(log.String(), warning); n != 1 {
		t.Errorf("%d warnings", n)
	}
	reader.set(none)
	b.findObstacles()
	reader.set(failing)
	b.findObstacles()
	testutil.Eventually(t, "a warning after a success", func() bool { return strings.Count(log.String(), warning) == 2 })
	testutil.Must(t, b.n.Status(context.Background()))
}

func TestObstaclesDependOnRanges(t *testing.T) {
	t.Parallel()
	reader := &fakeReader{found: func(conf []byte) ([]Obstacle, error) {
		if bytes.Contains(conf, []byte("10.1.2.0/24")) {
			return nil, nil
		}
		return firewall(conf)
	}}
	b, _ := newBuiltInBed(t, reader)
	for _, c := range []struct {
		cidr      string
		obstacles int
	}{{"", 1}, {"10.1.2.0/24", 0}, {"10.1.3.0/24", 1}} {
		ranges, err := ParsePodCIDRs(c.cidr)
		testutil.Must(t, err)
		b.n.SetIPRanges(ranges)
		testutil.Eventually(t, "obstacles of pods of "+c.cidr, func() bool { return len(b.n.Info().Obstacles) == c.obstacles })
		if found, err := b.n.Obstacles(); err != nil || len(found) != c.obstacles {
			t.Errorf("with the pod CIDR %q: %v, %v", c.cidr, found, err)
		}
	}
}
