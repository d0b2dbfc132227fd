package cni

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc/codes"

	"berth/internal/errdefs"
	"berth/internal/netns"
	"berth/internal/testutil"
)

func (b *bed) ready(want bool) {
	b.t.Helper()
	testutil.Eventually(b.t, "readiness", func() bool { return (b.n.Status(context.Background()) == nil) == want })
}

// reload makes the owner reload and waits for it.
func (b *bed) reload() {
	b.t.Helper()
	at := b.n.Info().At
	b.n.askRefresh()
	testutil.Eventually(b.t, "a reload", func() bool { return b.n.Info().At.After(at) })
}

func TestStatusVerb(t *testing.T) {
	b := newBed(t)
	b.plugin("a", `[ -e $record/up ] || { echo '{"code":50,"msg":"no agent"}'; exit 1; }; exit 0`)
	b.writeConf("1.conflist", conflist("1.1.0", "n", "a"))
	n := b.start()
	testutil.Eventually(t, "the plugin's error", func() bool {
		err := n.Status(context.Background())
		return errdefs.Code(err) == codes.Unavailable && strings.Contains(err.Error(), "no agent")
	})
	if _, err := n.Plan(); err != nil {
		t.Errorf("plan: %v; STATUS does not prevent other requests (spec)", err)
	}
	testutil.Must(t, os.WriteFile(b.record+"/up", nil, 0o644))
	n.askRefresh()
	b.ready(true)
	if s := b.saw("a.STATUS.stdin"); !strings.Contains(s, `"name":"n"`) || !strings.Contains(s, `"cniVersion":"1.1.0"`) {
		t.Errorf("STATUS saw %s", s)
	}
}

func TestAskStatus(t *testing.T) {
	for _, test := range []struct {
		name, version, script string
		patience              time.Duration
		code                  codes.Code
		says                  string
	}{
		{"1.1, ready", "1.1.0", `exit 0`, time.Minute, codes.OK, ""},
		{"1.1, failing", "1.1.0", `echo '{"code":50,"msg":"no agent"}'; exit 1`, time.Minute, codes.Unavailable, "no agent"},
		{"1.1, hanging", "1.1.0", `exec sleep 1000`, 3 * time.Second, codes.Unavailable, "STATUS"},
		{"1.0, never asked", "1.0.0", `exit 1`, time.Minute, codes.OK, ""},
	} {
		t.Run(test.name, func(t *testing.T) {
			b := newBed(t)
			b.plugin("a", test.script)
			b.writeConf("1.conflist", conflist(test.version, "n", "a"))
			n := b.start()
			ctx, cancel := context.WithTimeout(t.Context(), test.patience)
			defer cancel()
			err := n.AskStatus(ctx)
			if errdefs.Code(err) != test.code || err != nil && (!strings.Contains(err.Error(), test.says) || strings.Contains(err.Error(), "waiting")) {
				t.Errorf("got %v", err)
			}
		})
	}
	empty := newBed(t).start()
	if err := empty.AskStatus(t.Context()); errdefs.Code(err) != codes.FailedPrecondition {
		t.Errorf("without a configuration: %v", err)
	}
}

func TestStatusIsRetriedBeforeNotReady(t *testing.T) {
	b := newBed(t)
	b.plugin("a", `[ ! -e $record/once ] || { rm $record/once; echo '{"code":50,"msg":"for once"}'; exit 1; }
[ ! -e $record/down ] || { echo '{"code":50,"msg":"for good"}'; exit 1; }`)
	b.writeConf("1.conflist", conflist("1.1.0", "n", "a"))
	n := b.start()
	b.ready(true)
	testutil.Must(t, os.WriteFile(b.record+"/once", nil, 0o600))
	asked := len(b.calls())
	n.askRefresh()
	testutil.Eventually(t, "STATUS is asked twice", func() bool { return len(b.calls()) >= asked+2 })
	testutil.Must(t, n.Status(context.Background()))
	testutil.Must(t, os.WriteFile(b.record+"/down", nil, 0o600))
	n.askRefresh()
	b.ready(false)
}

func TestStatusVerbUnknown(t *testing.T) {
	b := newBed(t)
	b.plugin("a", `[ $CNI_COMMAND = STATUS ] && { echo '{"code":4,"msg":"unknown CNI_COMMAND: STATUS"}'; exit 1; }; exit 0`)
	b.plugin("b", okResult)
	b.writeConf("1.conflist", conflist("1.1.0", "n", "a", "b"))
	b.start()
	b.ready(true)
	if want := []string{"a STATUS ", "b STATUS "}; !slices.Equal(b.calls()[:2], want) { // another round may have started
		t.Errorf("calls %q, want %q", b.calls(), want)
	}
}

// The skeleton answers for verbs that a plugin does not implement.
func TestSkeletonPlugin(t *testing.T) {
	testutil.NeedRoot(t)
	b := newBed(t)
	self, err := os.Executable()
	testutil.Must(t, err)
	testutil.Must(t, os.Symlink(self, b.bin+"/"+skelPlugin))
	b.writeConf("1.conflist", conflist("1.1.0", "n", skelPlugin))
	n := b.start()
	b.ready(true)
	ctx, pod := context.Background(), testPod("p1")
	pod.NetNS = t.TempDir() + "/ns" // the skeleton refuses the namespace of its process
	testutil.Must(t, netns.New(pod.NetNS))
	defer func() { testutil.Must(t, netns.Remove(pod.NetNS)) }()
	att := b.add(pod)
	testutil.Must(t, n.GC(ctx, []Pod{pod}))
	testutil.Must(t, n.Del(ctx, att, pod))
	list := n.view.Load().net.list
	if err := n.runVerb(ctx, list, list.Plugins[0], "NONSENSE", nil); !errors.Is(err, errVerbUnknown) {
		t.Errorf("unknown verb: %v", err)
	}
}

func TestStatusVerbOnlyFrom11(t *testing.T) {
	b := newBed(t)
	b.plugin("a", `exit 1`)
	b.writeConf("1.conflist", conflist("1.0.0", "n", "a"))
	n := b.start()
	testutil.Must(t, n.Status(context.Background()))
	b.reload()
	if b.calls() != nil {
		t.Errorf("calls %q", b.calls())
	}
}

// A hung STATUS blocks neither Status, nor a change of the configuration, nor Close. It is killed
// once its result is obsolete.
func TestHungStatusBlocksNothing(t *testing.T) {
	b := newBed(t)
	b.plugin("a", `sleep 1000 & echo $! >$record/child; wait`)
	b.plugin("b", okResult)
	b.writeConf("1.conflist", conflist("1.1.0", "n", "a"))
	n := b.start()
	first := b.readPID("child")
	if err := n.Status(context.Background()); errdefs.Code(err) != codes.Unavailable || !strings.Contains(err.Error(), "STATUS still runs") {
		t.Errorf("status: %v", err)
	}
	b.writeConf("1.conflist", conflist("1.1.0", "n", "b"))
	b.ready(true)
	testutil.Eventually(t, "the old probe is killed", func() bool { return isGone(first) })

	testutil.Must(t, os.Remove(b.record+"/child"))
	b.writeConf("1.conflist", conflist("1.1.0", "n", "a"))
	second := b.readPID("child")
	b.ready(false)
	n.Close()
	testutil.Eventually(t, "the probe ends with Close", func() bool { return isGone(second) })
}

// The configuration changes to one without STATUS while STATUS of the old one runs.
func TestStaleStatusIsIgnored(t *testing.T) {
	b := newBed(t)
	b.plugin("a", `echo $$ >$record/probing; exec sleep 1000`)
	b.plugin("b", okResult)
	b.writeConf("1.conflist", conflist("1.1.0", "n", "a"))
	n := b.start()
	pid := b.readPID("probing")
	b.writeConf("1.conflist", conflist("1.0.0", "old", "b"))
	b.network("old")
	testutil.Eventually(t, "the old probe is killed", func() bool { return isGone(pid) })
	b.reload()
	testutil.Must(t, n.Status(context.Background()))
}

func TestStatusReloadsOldView(t *testing.T) {
	b := newBed(t)
	b.plugin("a", okResult)
	b.writeConf("1.conflist", conflist("1.0.0", "n", "a"))
	n := b.start()
	fresh := *n.view.Load()
	fresh.at = time.Now().Add(time.Hour)
	n.view.Store(&fresh)
	testutil.Must(t, n.Status(context.Background()))
	if len(n.refresh) != 0 {
		t.Error("a fresh view was reloaded")
	}
	old := *n.view.Load()
	old.at = time.Now().Add(-maxViewAge)
	n.view.Store(&old)
	testutil.Must(t, n.Status(context.Background()))
	testutil.Eventually(t, "a reload", func() bool { return n.Info().At.After(old.at) })
}

func TestCloseLeavesNothing(t *testing.T) {
	b := newBed(t)
	b.plugin("a", okResult)
	b.writeConf("1.conflist", conflist("1.1.0", "n", "a"))
	b.start()
	b.ready(true)
	goroutines, fds := runtime.NumGoroutine(), openFiles(t)
	for range 10 {
		n, err := New(Config{ConfDir: b.conf, BinDirs: []string{b.bin}, CacheDir: b.cache}, testutil.Logger(t))
		testutil.Must(t, err)
		_, err = n.Add(context.Background(), b.plan(), testPod("p1"))
		testutil.Must(t, err)
		n.Close()
	}
	testutil.Eventually(t, "as before", func() bool { return runtime.NumGoroutine() <= goroutines && openFiles(t) <= fds })
}

func openFiles(t *testing.T) int {
	t.Helper()
	entries, err := os.ReadDir("/proc/self/fd")
	testutil.Must(t, err)
	return len(entries)
}

func TestConfigValidation(t *testing.T) {
	good := Config{ConfDir: "/c", BinDirs: []string{"/b"}, CacheDir: "/x"}
	for name, spoil := range map[string]func(*Config){
		"relative conf dir": func(c *Config) { c.ConfDir = "c" },
		"no cache dir":      func(c *Config) { c.CacheDir = "" }, // libcni would use its default
		"no bin dirs":       func(c *Config) { c.BinDirs = nil },
		"relative bin dir":  func(c *Config) { c.BinDirs = []string{"/b", "d"} },
		"bin dir with :":    func(c *Config) { c.BinDirs = []string{"/b:/d"} },
	} {
		t.Run(name, func(t *testing.T) {
			cfg := good
			spoil(&cfg)
			if n, err := New(cfg, testutil.Logger(t)); errdefs.Code(err) != codes.InvalidArgument {
				t.Errorf("%s: %v", name, err)
				if err == nil {
					n.Close()
				}
			}
		})
	}
}

// Status knows at once which plugins are installed, however fresh the last answer is, and the log
// has the return.
func TestStatusAfterPluginsChanged(t *testing.T) {
	b := newBed(t)
	b.plugin("a", okResult)
	b.writeConf("1.conflist", conflist("1.0.0", "n", "a"))
	n, log := b.startLogged()
	testutil.Must(t, n.Status(t.Context()))
	for range 2 {
		testutil.Must(t, os.Rename(b.bin+"/a", b.bin+"/a.away"))
		if err := n.Status(t.Context()); err == nil || !strings.Contains(err.Error(), `plugin "a" is not installed`) {
			t.Errorf("without the plugin: %v", err)
		}
		testutil.Must(t, os.Rename(b.bin+"/a.away", b.bin+"/a"))
		testutil.Must(t, n.Status(t.Context()))
	}
	if got := strings.Count(log(), "CNI network ready"); got != 2 {
		t.Errorf("%d messages about the return in:\n%s", got, log())
	}
}

// A plugin that is too old for the configuration makes the network not ready, until the plugin or
// the configuration is replaced.
func TestStatusOfOldPlugin(t *testing.T) {
	b := newBed(t)
	b.plugin("new", okResult)
	b.plugin("old", okResult)
	b.write(b.record+"/new.versions", `{"cniVersion":"1.1.0","supportedVersions":["0.4.0","1.0.0","1.1.0"]}`)
	b.write(b.record+"/old.versions", `{"cniVersion":"1.0.0","supportedVersions":["0.3.1","0.4.0"]}`)
	b.writeConf("1.conflist", conflist("1.0.0", "n", "new", "old"))
	n := b.start()
	b.ready(false)
	err := n.Status(t.Context())
	for _, part := range []string{`plugin "old"`, "supports the CNI versions 0.3.1, 0.4.0", `cniVersion "1.0.0"`, "install a newer plugin"} {
		if err == nil || !strings.Contains(err.Error(), part) {
			t.Errorf("%v, want %q", err, part)
		}
	}
	if err := n.AskStatus(t.Context()); err == nil || !strings.Contains(err.Error(), "install a newer plugin") {
		t.Errorf("AskStatus: %v", err)
	}
	b.write(b.record+"/old.versions", `{"cniVersion":"1.0.0","supportedVersions":["0.3.1","0.4.0","1.0.0"]}`)
	b.plugin("old", okResult+"\n# replaced")
	b.ready(true)
	b.writeConf("1.conflist", conflist("1.1.0", "n", "new", "old"))
	b.ready(false)
	b.writeConf("1.conflist", conflist("0.4.0", "n", "new", "old"))
	b.ready(true)
}

// startLogged is start. log returns what was logged.
func (b *bed) startLogged() (n *Network, log func() string) {
	b.t.Helper()
	var text safeText
	n, err := New(Config{ConfDir: b.conf, BinDirs: []string{b.bin}, CacheDir: b.cache, RunDir: b.runs}, slog.New(slog.NewTextHandler(&text, nil)))
	testutil.Must(b.t, err)
	b.t.Cleanup(n.Close)
	b.n = n
	return n, text.String
}

// safeText is a text that goroutines write. The lock guards text.
type safeText struct {
	mu   sync.Mutex
	text strings.Builder
}

func (s *safeText) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.text.Write(p)
}

func (s *safeText) String() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.text.String()
}

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
