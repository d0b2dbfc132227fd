package integration

import (
	"fmt"
	"io"
	"maps"
	"net/http"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/cmd/berthd/exporter"
	"berth/integration/harness"
)

// series are the values of a scrape by name and labels.
type series map[string]float64

// scrape reads the metrics of a daemon from its debug socket.
func scrape(t *testing.T, d *harness.Daemon) series {
	t.Helper()
	return readSeries(t, harness.Get(exporter.Get(t.Context(), d.State, "/metrics"))(t))
}

func readSeries(t *testing.T, resp *http.Response) series {
	t.Helper()
	defer resp.Body.Close()
	body := harness.Get(io.ReadAll(resp.Body))(t)
	harness.Equal(t, "status of the scrape", resp.StatusCode, http.StatusOK)
	all := series{}
	for line := range strings.Lines(string(body)) {
		if strings.HasPrefix(line, "#") {
			continue
		}
		at := strings.LastIndexByte(line, ' ')
		all[line[:at]] = harness.Get(strconv.ParseFloat(strings.TrimSpace(line[at:]), 64))(t)
	}
	return all
}

// grew checks by how much series have grown since an earlier scrape.
func (s series) grew(t *testing.T, before series, want map[string]float64) {
	t.Helper()
	for _, name := range slices.Sorted(maps.Keys(want)) {
		if _, ok := s[name]; !ok {
			t.Errorf("no series %s", name)
		} else if got := s[name] - before[name]; got != want[name] {
			t.Errorf("%s grew by %g, want %g", name, got, want[name])
		}
	}
}

func TestMetricsCountPodsAndFailures(t *testing.T) {
	d := harness.StartDaemon(t)
	before := scrape(t, d)
	pod := d.RunPod(t)
	pod.Run(t)
	restarted := func(c *runtimeapi.ContainerConfig) { c.Metadata.Attempt = 3 }
	limit := harness.Resources(func(r *runtimeapi.LinuxContainerResources) { r.MemoryLimitInBytes = 16 << 20 })
	_, status := pod.RunToEnd(t, restarted, limit, harness.Command("tail", "/dev/zero"))
	harness.Equal(t, "reason", status.Reason, "OOMKilled")
	broken := pod.Create(t, harness.Command("/no/such/program"))
	if err := d.Cri.StartContainer(t.Context(), broken.Id); err == nil {
		t.Error("a program that does not exist was started")
	}
	lost := pod.Run(t)
	harness.Must(t, syscall.Kill(harness.MonitorOf(t, d, lost), syscall.SIGKILL))
	harness.Equal(t, "reason", lost.WaitExited(t).Reason, "ShimLost")

	after := scrape(t, d)
	after.grew(t, before, map[string]float64{
		`berth_rpc_requests_total{code="OK",method="RunPodSandbox"}`:                         1,
		`berth_rpc_duration_seconds_count{method="StartContainer"}`:                          4,
		`berth_start_phase_duration_seconds_count{method="RunPodSandbox",phase="total"}`:     1,
		`berth_start_phase_duration_seconds_count{method="RunPodSandbox",phase="CNI ADD"}`:   1,
		`berth_start_phase_duration_seconds_count{method="RunPodSandbox",phase="pause"}`:     1,
		`berth_start_phase_duration_seconds_count{method="StartContainer",phase="launcher"}`: 3,
		`berth_container_starts_total`:                                                       3,
		`berth_container_restarts_total`:                                                     1,
		`berth_container_exits_total{reason="OOMKilled"}`:                                    1,
		`berth_oom_kills_total`:                                             1,
		`berth_container_exits_total{reason="ShimLost"}`:                    1,
		`berth_container_exits_total{reason="StartError"}`:                  1,
		`berth_cni_calls_total{plugin="bridge",result="ok",verb="ADD"}`:     1,
		`berth_cni_call_duration_seconds_count{plugin="bridge",verb="ADD"}`: 1,
		`berth_pods{state="ready"}`:                                         1,
		`berth_containers{state="running"}`:                                 1,
		`berth_containers{state="exited"}`:                                  3,
		`berth_pauses_lost_total`:                                           0,
	})
	total := after[`berth_start_phase_duration_seconds_sum{method="RunPodSandbox",phase="total"}`]
	if request := after[`berth_rpc_duration_seconds_sum{method="RunPodSandbox"}`]; total <= 0 || total > request {
		t.Errorf("the trace covers %g s of a request of %g s", total, request)
	}
	harness.Equal(t, "runtime ready", after[`berth_ready{condition="runtime"}`], 1)
	harness.Equal(t, "network ready", after[`berth_ready{condition="network"}`], 1)
	for name := range after {
		if strings.Contains(name, pod.Id) || strings.Contains(name, lost.Id) || strings.Contains(name, pod.Config.GetMetadata().GetName()) {
			t.Errorf("series %s names a pod or container", name)
		}
	}
	harness.Must(t, syscall.Kill(pod.PausePID(t), syscall.SIGKILL))
	harness.EventuallyTrue(t, "the lost pause is counted", func() bool { return scrape(t, d)["berth_pauses_lost_total"] == 1 })
}

// OOM kills count while the container continues to run. A new daemon does not count them again.
func TestMetricsCountOOMKillsOfRunningContainers(t *testing.T) {
	d := harness.StartDaemon(t)
	limit := harness.Resources(func(r *runtimeapi.LinuxContainerResources) { r.MemoryLimitInBytes = 16 << 20 })
	c := d.RunPod(t).Run(t, limit, harness.Script("tail /dev/zero; echo survived; exec sleep 100000"))
	c.WaitOutput(t, "survived")
	harness.Equal(t, "kills", scrape(t, d)["berth_oom_kills_total"], 1)
	harness.Equal(t, "kills in a second scrape", scrape(t, d)["berth_oom_kills_total"], 1)
	d.Restart(t)
	harness.Equal(t, "kills after a restart", scrape(t, d)["berth_oom_kills_total"], 0)
	c.Exec(t, "sh", "-c", "tail /dev/zero; true")
	harness.Equal(t, "kills by an exec", scrape(t, d)["berth_oom_kills_total"], 1)
	c.Stop(t, 0)
	harness.Equal(t, "kills after the exit", scrape(t, d)["berth_oom_kills_total"], 1)
}

func TestMetricsCountPulls(t *testing.T) {
	r := harness.NewRegistry(t)
	image, _ := noisyImage(t, "noise", 1<<20)
	name, _ := harness.Push(t, r, "library/metrics:latest", image)
	other, _ := harness.Push(t, r, "library/other:latest", harness.Get(sameLayers(image))(t))
	layers := harness.Get(image.Layers())(t)
	var size float64
	for _, layer := range layers {
		size += float64(harness.Get(layer.Size())(t))
	}
	d := harness.StartDaemon(t)
	before := scrape(t, d)
	d.Pull(t, name)
	d.Pull(t, name)
	d.Pull(t, other)
	if _, err := d.TryPull(t, harness.Repository(name)+":missing", nil); err == nil {
		t.Error("a missing tag was pulled")
	}
	after := scrape(t, d)
	host := fmt.Sprintf("registry=%q", name[:strings.IndexByte(name, '/')])
	after.grew(t, before, map[string]float64{
		`berth_image_pulls_total{` + host + `,result="pulled"}`:           2,
		`berth_image_pulls_total{` + host + `,result="unchanged"}`:        1,
		`berth_image_pulls_total{` + host + `,result="error"}`:            1,
		`berth_image_pull_duration_seconds_count{` + host + `}`:           2,
		`berth_image_pull_bytes_total{` + host + `}`:                      size,
		`berth_image_pull_layers_total{` + host + `,result="downloaded"}`: float64(len(layers)),
		`berth_image_pull_layers_total{` + host + `,result="present"}`:    float64(len(layers)),
		`berth_images`: 2,
	})
	if grown := after["berth_image_store_bytes"] - before["berth_image_store_bytes"]; grown < size {
		t.Errorf("the store grew by %g bytes, less than the %g of its layers", grown, size)
	}
}

// The address serves metrics and no profiles. The debug socket serves both, to root only.
func TestMetricsAddress(t *testing.T) {
	address := harness.UnusedAddress(t)
	d := harness.StartDaemon(t, harness.WithConfig(fmt.Sprintf("metrics.address = %q", address)))
	resp := harness.Get(http.Get("http://" + address + "/metrics"))(t)
	if all := readSeries(t, resp); all[`berth_ready{condition="runtime"}`] != 1 {
		t.Errorf("metrics over TCP: %v", all)
	}
	profile := harness.Get(http.Get("http://" + address + "/debug/pprof/heap"))(t)
	profile.Body.Close()
	harness.Equal(t, "status of a profile over TCP", profile.StatusCode, http.StatusNotFound)
	debug := harness.Get(exporter.Get(t.Context(), d.State, "/debug/pprof/goroutine?debug=1"))(t)
	defer debug.Body.Close()
	harness.Equal(t, "status of a profile", debug.StatusCode, http.StatusOK)
	info := harness.Get(os.Stat(d.State + "/" + exporter.DebugSocket))(t)
	harness.Equal(t, "mode of the debug socket", info.Mode().Perm(), 0o600)
	d.Restart(t)
	if all := scrape(t, d); all["berth_container_starts_total"] != 0 {
		t.Errorf("counters after a restart: %v", all)
	}
}

func TestMetricsCountReloads(t *testing.T) {
	d := harness.StartDaemon(t)
	harness.Must(t, d.Cmd.Process.Signal(syscall.SIGHUP))
	harness.EventuallyTrue(t, "the reload is counted", func() bool { return scrape(t, d)[`berth_config_reloads_total{result="ok"}`] == 1 })
	if took := timeOf(func() { scrape(t, d) }); took > time.Second {
		t.Errorf("a scrape took %v", took)
	}
}

func timeOf(do func()) time.Duration {
	began := time.Now()
	do()
	return time.Since(began)
}

// sameLayers returns an image with the layers of another one and a different configuration.
func sameLayers(image v1.Image) (v1.Image, error) {
	config, err := image.ConfigFile()
	if err != nil {
		return nil, err
	}
	changed := config.DeepCopy()
	changed.Config.Env = append(changed.Config.Env, "OTHER=1")
	return mutate.ConfigFile(image, changed)
}

// The alerts and the dashboard use only metrics that a daemon exports.
func TestDashboardAndAlertsUseExportedMetrics(t *testing.T) {
	d := harness.StartDaemon(t)
	name, _ := harness.Push(t, harness.NewRegistry(t), "library/dashboard:latest", harness.BuildImage(t, v1.Config{}))
	d.Pull(t, name)
	d.RunPod(t).Run(t)
	exported := map[string]bool{"up": true} // Prometheus itself has this one
	for s := range scrape(t, d) {
		family, _, _ := strings.Cut(s, "{")
		exported[family] = true
	}
	metric := regexp.MustCompile(`\b(?:berth|process|go)_[a-z0-9_]+`)
	for path, least := range map[string]int{"../contrib/grafana/berth.json": 30, "../contrib/prometheus/berth-rules.yaml": 12} {
		used := map[string]bool{}
		for _, found := range metric.FindAllString(string(harness.Get(os.ReadFile(path))(t)), -1) {
			if found == "berth_start_phase_duration_seconds" { // in a description: the histogram
				found += "_bucket"
			}
			used[found] = true
			if !exported[found] {
				t.Errorf("%s uses %s, which the daemon does not export", path, found)
			}
		}
		if len(used) < least {
			t.Errorf("%s uses %d metrics, want at least %d", path, len(used), least)
		}
	}
}
