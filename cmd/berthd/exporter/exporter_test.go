package exporter

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"
	"google.golang.org/grpc/codes"

	"berth/cmd/config"
	"berth/image"
	"berth/image/lazy"
	"berth/image/pull"
	"berth/internal/errdefs"
	"berth/internal/task"
	"berth/internal/trace"
	"berth/sandbox/state"
	"berth/shim"
)

// fakeNode is a node with one image, no pods and no network.
type fakeNode struct{}

func (fakeNode) Pods() []*state.Pod                  { return nil }
func (fakeNode) Containers() []*state.Container      { return nil }
func (fakeNode) Launchers() shim.Counts              { return shim.Counts{Idle: 2, Started: 5, Lost: 1} }
func (fakeNode) OOMKills() uint64                    { return 3 }
func (fakeNode) RuntimeStatus() error                { return nil }
func (fakeNode) NetworkStatus(context.Context) error { return errors.New("no network") }
func (fakeNode) Unreleased() int                     { return 3 }
func (fakeNode) List() []*image.Image                { return make([]*image.Image, 1) }
func (fakeNode) LazyStats() lazy.Stats               { return lazy.Stats{Layers: 1} }
func (fakeNode) Usage(context.Context) (image.Usage, error) {
	return image.Usage{Bytes: 7, Inodes: 3}, nil
}

func newWatching() *Exporter {
	e := New("1.2.3")
	e.Watch(fakeNode{}, fakeNode{}, new(task.Waits), "/")
	return e
}

// hasLines checks that a scrape contains each line.
func hasLines(t *testing.T, e *Exporter, want ...string) {
	t.Helper()
	families, err := e.registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	if len(families) == 0 {
		t.Fatal("no metrics")
	}
	got := scrape(t, e)
	for _, line := range want {
		if !strings.Contains(got, "\n"+line+"\n") {
			name, _, _ := strings.Cut(line, "{")
			var similar []string
			for l := range strings.Lines(got) {
				if strings.HasPrefix(l, name) {
					similar = append(similar, l)
				}
			}
			t.Errorf("the scrape lacks %s; it has %q", line, similar)
		}
	}
}

func scrape(t *testing.T, e *Exporter) string {
	t.Helper()
	dir := t.TempDir()
	s, err := e.Listen(dir, "", slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	return get(t, dir, "/metrics")
}

func get(t *testing.T, state, page string) string {
	t.Helper()
	resp, err := Get(t.Context(), state, page)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil || resp.StatusCode != http.StatusOK {
		t.Fatalf("GET %s: %s, %v: %.500s", page, resp.Status, err, body)
	}
	return string(body)
}

func TestNamesAndHelpFollowConventions(t *testing.T) {
	t.Parallel()
	e := newWatching()
	e.Answered("RunPodSandbox", false, codes.OK, time.Millisecond)
	problems, err := testutil.GatherAndLint(e.registry)
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range problems {
		if strings.HasPrefix(p.Metric, "berth_") {
			t.Errorf("%s: %s", p.Metric, p.Text)
		}
	}
}

func TestEventsAreCounted(t *testing.T) {
	t.Parallel()
	e := newWatching()
	e.Answered("RunPodSandbox", false, codes.OK, 3*time.Millisecond)
	e.Answered("GetContainerEvents", true, codes.Canceled, time.Hour)
	e.Pulled("docker.io", pull.Result{Took: time.Second, Present: 2, Downloaded: 3})
	e.Pulled("docker.io", pull.Result{Unchanged: true})
	e.Pulled("", pull.Result{Err: errors.New("invalid reference")})
	e.Received("docker.io", 1000)
	e.Slowed(1500 * time.Millisecond)
	e.ReadWaited(70 * time.Millisecond)
	e.PeerReceived(70)
	e.ContainerStarted(0)
	e.ContainerStarted(1)
	e.ContainerExited(state.ReasonOOMKilled)
	e.PauseExited()
	e.PluginRan("bridge", "ADD", time.Second, nil)
	e.PluginRan("bridge", "ADD", time.Second, errdefs.Internal("no address"))
	e.PluginRan("bridge", "DEL", time.Second, errdefs.New(codes.DeadlineExceeded, "too late"))
	e.WatchdogChecked(nil)
	e.WatchdogChecked(errors.New("no answer"))
	hasLines(t, e,
		`berth_rpc_requests_total{code="OK",method="RunPodSandbox"} 1`,
		`berth_rpc_requests_total{code="Canceled",method="GetContainerEvents"} 1`,
		`berth_rpc_duration_seconds_count{method="RunPodSandbox"} 1`,
		`berth_image_pulls_total{registry="docker.io",result="pulled"} 1`,
		`berth_image_pulls_total{registry="docker.io",result="unchanged"} 1`,
		`berth_image_pulls_total{registry="other",result="error"} 1`,
		`berth_image_pull_duration_seconds_count{registry="docker.io"} 1`,
		`berth_image_pull_bytes_total{registry="docker.io"} 1000`,
		`berth_image_pull_slowed_seconds_total 1.5`,
		`berth_incomplete_layers_read_wait_seconds_bucket{le="0.1"} 1`,
		`berth_incomplete_layers_read_wait_seconds_count 1`,
		`berth_peer_bytes_total{direction="received"} 70`,
		`berth_peer_bytes_total{direction="sent"} 0`,
		`berth_image_pull_layers_total{registry="docker.io",result="present"} 2`,
		`berth_image_pull_layers_total{registry="docker.io",result="downloaded"} 3`,
		`berth_container_starts_total 2`,
		`berth_container_restarts_total 1`,
		`berth_container_exits_total{reason="OOMKilled"} 1`,
		`berth_container_exits_total{reason="ShimLost"} 0`,
		`berth_pauses_lost_total 1`,
		`berth_cni_calls_total{plugin="bridge",result="ok",verb="ADD"} 1`,
		`berth_cni_calls_total{plugin="bridge",result="error",verb="ADD"} 1`,
		`berth_cni_calls_total{plugin="bridge",result="timeout",verb="DEL"} 1`,
		`berth_watchdog_checks_total{result="error"} 1`,
		`berth_launchers{state="idle"} 2`,
		`berth_launchers_started_total 5`,
		`berth_launchers_lost_total 1`,
		`berth_image_store_bytes 7`,
		`berth_images 1`,
		`berth_ready{condition="runtime"} 1`,
		`berth_ready{condition="network"} 0`,
		`berth_pods{state="ready"} 0`,
		`berth_waits 0`,
	)
	if text := scrape(t, e); strings.Contains(text, `berth_rpc_duration_seconds_count{method="GetContainerEvents"}`) {
		t.Error("the duration of a stream is counted")
	}
}

func TestPhasesOfTraceAreAddedUp(t *testing.T) {
	t.Parallel()
	e := newWatching()
	const ms = int64(time.Millisecond)
	e.Traced("RunPodSandbox", []trace.Part{
		{Name: "RunPodSandbox", Parent: -1, Ended: 10 * ms},
		{Name: "record", Began: 0, Ended: ms},
		{Name: "pause", Began: ms, Ended: 5 * ms},
		{Name: "launcher", Parent: 2, Began: ms, Ended: 5 * ms},
		{Name: "record", Began: 5 * ms, Ended: 7 * ms},
		{Name: "network", Began: 5 * ms, Ended: 7 * ms, Open: true},
	})
	hasLines(t, e,
		`berth_start_phase_duration_seconds_sum{method="RunPodSandbox",phase="total"} 0.01`,
		`berth_start_phase_duration_seconds_sum{method="RunPodSandbox",phase="record"} 0.003`,
		`berth_start_phase_duration_seconds_count{method="RunPodSandbox",phase="record"} 1`,
		`berth_start_phase_duration_seconds_sum{method="RunPodSandbox",phase="pause"} 0.004`,
	)
	text := scrape(t, e)
	for _, phase := range []string{"launcher", "network"} {
		if strings.Contains(text, `phase="`+phase+`"`) {
			t.Errorf("phase %s is exported", phase)
		}
	}
}

func TestLabelsHaveLimitedNumberOfValues(t *testing.T) {
	t.Parallel()
	e := newWatching()
	for i := range 3 * maxRegistries {
		e.Received(fmt.Sprintf("registry-%d.example", i), 1)
	}
	e.Received("\xff", 1)
	e.Received(strings.Repeat("x", 10_000), 1)
	if n := testutil.CollectAndCount(e.pullBytes); n != maxRegistries+1 {
		t.Errorf("%d series", n)
	}
	hasLines(t, e, fmt.Sprintf(`berth_image_pull_bytes_total{registry="other"} %d`, 2*maxRegistries+2))
}

func TestOnlyDebugSocketServesProfiles(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	s, err := newWatching().Listen(dir, "127.0.0.1:0", slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	if stacks := get(t, dir, "/debug/pprof/goroutine?debug=2"); !strings.Contains(stacks, "TestOnlyDebugSocketServesProfiles") {
		t.Errorf("goroutines: %.200s", stacks)
	}
	get(t, dir, "/debug/pprof/heap")
	if info, err := os.Stat(dir + "/" + DebugSocket); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("mode of the debug socket: %v, %v", info, err)
	}
	for page, want := range map[string]int{"/metrics": http.StatusOK, "/debug/pprof/": http.StatusNotFound, "/": http.StatusNotFound} {
		resp, err := http.Get("http://" + s.public.socket.Addr().String() + page)
		if err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
		if resp.StatusCode != want {
			t.Errorf("GET %s: %s, want %d", page, resp.Status, want)
		}
	}
	if err := s.Close(); err != nil {
		t.Error(err)
	}
	if _, err := os.Stat(dir + "/" + DebugSocket); !os.IsNotExist(err) {
		t.Errorf("the debug socket remains: %v", err)
	}
}

func TestListenFailsForUsedAddress(t *testing.T) {
	t.Parallel()
	log := slog.New(slog.DiscardHandler)
	first, err := newWatching().Listen(t.TempDir(), "127.0.0.1:0", log)
	if err != nil {
		t.Fatal(err)
	}
	defer first.Close()
	if _, err := New("").Listen(t.TempDir(), first.public.socket.Addr().String(), log); err == nil || !strings.Contains(err.Error(), "metrics.address") {
		t.Errorf("a second server: %v", err)
	}
}

// A new address replaces the present one. An address that cannot be opened changes nothing.
func TestAddressChanges(t *testing.T) {
	t.Parallel()
	log := slog.New(slog.DiscardHandler)
	other, err := newWatching().Listen(t.TempDir(), "127.0.0.1:0", log)
	if err != nil {
		t.Fatal(err)
	}
	defer other.Close()
	dir := t.TempDir()
	s, err := newWatching().Listen(dir, "", log)
	if err != nil {
		t.Fatal(err)
	}
	serves := func(address string, want bool) {
		t.Helper()
		conn, err := net.Dial("tcp", address)
		if (err == nil) != want {
			t.Errorf("connect to %s: %v, want success: %v", address, err, want)
		}
		if err == nil {
			conn.Close()
		}
	}
	move := func(address string) {
		t.Helper()
		apply, err := s.Prepare(address)
		if err != nil {
			t.Fatal(err)
		}
		apply()
	}
	move("127.0.0.1:0")
	first := s.public.socket.Addr().String()
	serves(first, true)
	if _, err := s.Prepare(other.public.socket.Addr().String()); err == nil || !strings.Contains(err.Error(), "metrics.address") {
		t.Errorf("a used address: %v", err)
	}
	serves(first, true)
	move("127.0.0.1:0") // unchanged
	serves(first, true)
	socket := filepath.Join(dir, "metrics.sock")
	move("unix://" + socket)
	serves(first, false)
	if _, err := os.Stat(socket); err != nil {
		t.Error(err)
	}
	move("")
	if _, err := os.Stat(socket); !os.IsNotExist(err) || s.public != nil {
		t.Errorf("the socket remains: %v", err)
	}
	get(t, dir, "/metrics")
	if err := s.Close(); err != nil {
		t.Error(err)
	}
}

// Clients that send nothing block the address for a while, but not the debug socket.
func TestIdleClientsDoNotBlockDebugSocket(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	s, err := newWatching().Listen(dir, "127.0.0.1:0", slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	for range 2 * maxConnections {
		conn, err := net.Dial("tcp", s.public.socket.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
	}
	client := http.Client{Timeout: 100 * time.Millisecond}
	if resp, err := client.Get("http://" + s.public.socket.Addr().String() + "/metrics"); err == nil {
		resp.Body.Close()
		t.Error("the number of connections has no limit")
	}
	get(t, dir, "/metrics")
}

// Each metric belongs to one group, and the option has the same groups.
func TestGroupsHaveAllMetrics(t *testing.T) {
	t.Parallel()
	e := newWatching()
	families, err := e.registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, g := range groups {
		names = append(names, g.name)
	}
	if all := config.Default().MetricsCollectors; !slices.Equal(all, names) {
		t.Errorf("metrics.collectors is %v by default, want %v", all, names)
	}
	for _, f := range families {
		matches := 0
		for _, g := range groups {
			for _, prefix := range g.prefixes {
				if strings.HasPrefix(f.GetName(), prefix) {
					matches++
				}
			}
		}
		if matches != 1 {
			t.Errorf("%s is in %d groups", f.GetName(), matches)
		}
	}
}

// Only the selected groups are served. The debug socket serves all if it is asked to.
func TestServedGroups(t *testing.T) {
	t.Parallel()
	e := newWatching()
	e.Answered("RunPodSandbox", false, codes.OK, time.Second)
	e.SetGroups([]string{"containers", "go"})
	page := func(h http.Handler, path string) map[string]bool {
		answer := httptest.NewRecorder()
		h.ServeHTTP(answer, httptest.NewRequestWithContext(t.Context(), http.MethodGet, path, nil))
		found := map[string]bool{}
		for _, line := range strings.Split(answer.Body.String(), "\n") {
			if name, _, _ := strings.Cut(line, "{"); line != "" && line[0] != '#' {
				found[groupOf(strings.Fields(name)[0])] = true
			}
		}
		return found
	}
	for _, h := range []http.Handler{e.metricsHandler(), e.debugHandler()} {
		if got := page(h, "/metrics"); !maps.Equal(got, map[string]bool{"containers": true, "go": true}) {
			t.Errorf("served: %v", got)
		}
	}
	if got := page(e.metricsHandler(), AllMetrics); len(got) != 2 {
		t.Errorf("everyone can ask for %v", got)
	}
	if got := page(e.debugHandler(), AllMetrics); !got["requests"] || !got["process"] || !got["daemon"] {
		t.Errorf("all groups of the debug socket: %v", got)
	}
}
