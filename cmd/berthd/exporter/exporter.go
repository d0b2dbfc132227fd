// Package exporter exports the daemon's measurements as Prometheus metrics.
//
// # Contract
//
// An Exporter implements the observers of the packages below, which do not import Prometheus. Each
// method of an observer takes less than a microsecond and never blocks. Gauges are read from memory
// during a scrape. Only OOM kills are read from files of cgroups, and free space from the kernel.
//
// No metric has a label for a pod, a container, an image or a namespace. So the number of series
// does not grow with the number of pods. Labels whose values come from users, such as registry
// hosts, have a limited number of values. Further values are counted under the value "other".
package exporter

import (
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"google.golang.org/grpc/codes"

	"berth/image/pull"
	"berth/internal/errdefs"
	"berth/internal/trace"
	"berth/sandbox/state"
)

// Limits of the values of labels.
const (
	maxRegistries = 32
	maxPlugins    = 16
	maxPhases     = 32 // of all operations together; a pod's start has about 20
)

// Buckets of histograms, in seconds.
var (
	requestBuckets = []float64{.0005, .001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30, 120}
	phaseBuckets   = []float64{.0001, .00025, .0005, .001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 5, 30}
	pullBuckets    = []float64{.1, .25, .5, 1, 2.5, 5, 10, 30, 60, 300, 1800}
	cniBuckets     = []float64{.001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 5, 30, 120}
)

// Exporter collects the metrics of a daemon. Use New.
type Exporter struct {
	registry *prometheus.Registry
	served   atomic.Pointer[[]string] // groups; nil: all
	metrics  []Metric                 // for the documentation

	requests        *prometheus.CounterVec
	requestSeconds  *prometheus.HistogramVec
	phaseSeconds    *prometheus.HistogramVec
	pulls           *prometheus.CounterVec
	pullSeconds     *prometheus.HistogramVec
	pullBytes       *prometheus.CounterVec
	pullLayers      *prometheus.CounterVec
	pullSlowed      prometheus.Counter
	readWaits       *prometheus.HistogramVec
	peerBytes       *prometheus.CounterVec
	starts          prometheus.Counter
	restarts        prometheus.Counter
	exits           *prometheus.CounterVec
	pausesLost      prometheus.Counter
	cniCalls        *prometheus.CounterVec
	cniSeconds      *prometheus.HistogramVec
	watchdogChecks  *prometheus.CounterVec
	watchdogSuccess prometheus.Gauge
	reloads         *prometheus.CounterVec

	registries, plugins, phases limited
}

// New returns an exporter with the metrics of the process. version is berth's version.
func New(version string) *Exporter {
	e := &Exporter{
		registry:   prometheus.NewRegistry(),
		registries: limited{limit: maxRegistries},
		plugins:    limited{limit: maxPlugins},
		phases:     limited{limit: maxPhases},
	}
	e.addRequests()
	e.addImages()
	e.addContainers()
	e.addNode()
	build := e.gaugeVec("berth_build_info", "Always 1. The labels have the versions of berth and of Go.", "version", "go")
	build.WithLabelValues(version, goVersion()).Set(1)
	e.registry.MustRegister(collectors.NewGoCollector(),
		collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	return e
}

func (e *Exporter) addRequests() {
	e.requests = e.counterVec("berth_rpc_requests_total", "Finished CRI requests by method and gRPC code.",
		"method", "code")
	e.requestSeconds = e.histogramVec("berth_rpc_duration_seconds",
		"Duration of CRI requests without streaming ones. Requests that failed are included.", requestBuckets, "method")
	e.phaseSeconds = e.histogramVec("berth_start_phase_duration_seconds",
		"Duration of the steps of successful requests that start pods and containers, as berth trace shows them. "+
			"The phase total is the request.", phaseBuckets, "method", "phase")
}

func (e *Exporter) addImages() {
	e.pulls = e.counterVec("berth_image_pulls_total",
		"Finished image pulls by registry host. The result is pulled, unchanged (the image was present) or error.",
		"registry", "result")
	e.pullSeconds = e.histogramVec("berth_image_pull_duration_seconds",
		"Duration of pulls with the result pulled.", pullBuckets, "registry")
	e.pullBytes = e.counterVec("berth_image_pull_bytes_total", "Bytes of layers received from the network.", "registry")
	e.pullSlowed = e.counter("berth_image_pull_slowed_seconds_total",
		"Time that layers waited because of pull.bandwidth or pull.pressure_limit, over all layers.")
	e.readWaits = e.histogramVec("berth_incomplete_layers_read_wait_seconds",
		"How long reads of incomplete image layers have waited for content.", requestBuckets)
	e.peerBytes = e.counterVec("berth_peer_bytes_total",
		"Bytes of layers exchanged with other nodes. The direction is received or sent.", "direction")
	for _, direction := range []string{"received", "sent"} {
		e.peerBytes.WithLabelValues(direction)
	}
	e.pullLayers = e.counterVec("berth_image_pull_layers_total",
		"Layers of pulled images. The result is downloaded, present (a cache hit), or lazy (downloaded after the pull).", "registry", "result")
}

func (e *Exporter) addContainers() {
	e.starts = e.counter("berth_container_starts_total", "Started containers.")
	e.restarts = e.counter("berth_container_restarts_total",
		"Started containers that replace an earlier container with the same name in the pod.")
	e.exits = e.counterVec("berth_container_exits_total",
		"Exits of containers by reason. OOMKilled: the kernel killed the container for lack of memory. "+
			"ShimLost: the container's shim was killed, so the exit code is unknown. "+
			"StartError: the container's command could not be started. "+
			"WrongFiles: the table of contents of a layer was wrong, or was not proven.", "reason")
	for _, reason := range exitReasons {
		e.exits.WithLabelValues(reason)
	}
	e.pausesLost = e.counter("berth_pauses_lost_total",
		"Ready pods whose pause exited unexpectedly. kubelet replaces such pods.")
}

func (e *Exporter) addNode() {
	e.cniCalls = e.counterVec("berth_cni_calls_total",
		"Runs of CNI plugins. The result is ok, error or timeout.", "plugin", "verb", "result")
	e.cniSeconds = e.histogramVec("berth_cni_call_duration_seconds", "Duration of runs of CNI plugins.", cniBuckets,
		"plugin", "verb")
	e.reloads = e.counterVec("berth_config_reloads_total", "Reloads of the configuration. The result is ok or error.",
		"result")
	e.watchdogChecks = e.counterVec("berth_watchdog_checks_total",
		"Health checks for systemd's watchdog. The result is ok or error. It stays 0 without WatchdogSec.", "result")
	for _, result := range []string{"ok", "error"} {
		e.watchdogChecks.WithLabelValues(result)
		e.reloads.WithLabelValues(result)
	}
	e.watchdogSuccess = e.gauge("berth_watchdog_last_success_timestamp_seconds",
		"Time of the last successful health check. It is 0 without WatchdogSec.")
}

var exitReasons = []string{state.ReasonCompleted, state.ReasonError, state.ReasonOOMKilled, state.ReasonStartError,
	state.ReasonShimLost, state.ReasonWrongFiles, state.ReasonUnknown}

// Answered implements server.Observer.
func (e *Exporter) Answered(method string, streaming bool, code codes.Code, took time.Duration) {
	e.requests.WithLabelValues(method, code.String()).Inc()
	if !streaming { // a stream of events ends with its client
		e.requestSeconds.WithLabelValues(method).Observe(took.Seconds())
	}
}

// Traced implements server.Observer. The phases are the direct parts of the request. Parts with the
// same name are added up.
func (e *Exporter) Traced(method string, spans []trace.Part) {
	var names [trace.MaxSpans]string
	var took [trace.MaxSpans]time.Duration
	n := 0
	for i, span := range spans {
		name := span.Name
		switch {
		case i == 0:
			name = "total"
		case span.Parent != 0 || span.Open:
			continue
		}
		at := 0
		for at < n && names[at] != name {
			at++
		}
		if at == n {
			names[n] = name
			n++
		}
		took[at] += time.Duration(span.Ended - span.Began)
	}
	for i := range n {
		e.phaseSeconds.WithLabelValues(method, e.phases.value(names[i])).Observe(took[i].Seconds())
	}
}

// Received implements pull.Observer.
func (e *Exporter) Received(registry string, bytes int) {
	e.pullBytes.WithLabelValues(e.registries.value(registry)).Add(float64(bytes))
}

// Slowed implements pull.Observer.
func (e *Exporter) Slowed(waited time.Duration) { e.pullSlowed.Add(waited.Seconds()) }

// ReadWaited implements pull.Observer.
func (e *Exporter) ReadWaited(waited time.Duration) {
	e.readWaits.WithLabelValues().Observe(waited.Seconds())
}

// PeerReceived implements peers.Observer.
func (e *Exporter) PeerReceived(bytes int) {
	e.peerBytes.WithLabelValues("received").Add(float64(bytes))
}

// PeerSent implements peers.Observer.
func (e *Exporter) PeerSent(bytes int) { e.peerBytes.WithLabelValues("sent").Add(float64(bytes)) }

// Pulled implements pull.Observer.
func (e *Exporter) Pulled(registry string, result pull.Result) {
	registry = e.registries.value(registry)
	outcome := "pulled"
	switch {
	case result.Err != nil:
		outcome = "error"
	case result.Unchanged:
		outcome = "unchanged"
	default:
		e.pullSeconds.WithLabelValues(registry).Observe(result.Took.Seconds())
	}
	e.pulls.WithLabelValues(registry, outcome).Inc()
	e.pullLayers.WithLabelValues(registry, "present").Add(float64(result.Present))
	e.pullLayers.WithLabelValues(registry, "lazy").Add(float64(result.Lazy))
	e.pullLayers.WithLabelValues(registry, "downloaded").Add(float64(result.Downloaded))
}

// ContainerStarted implements sandbox.Observer.
func (e *Exporter) ContainerStarted(attempt uint32) {
	e.starts.Inc()
	if attempt > 0 {
		e.restarts.Inc()
	}
}

// ContainerExited implements sandbox.Observer.
func (e *Exporter) ContainerExited(reason string) { e.exits.WithLabelValues(reason).Inc() }

// PauseExited implements sandbox.Observer.
func (e *Exporter) PauseExited() { e.pausesLost.Inc() }

// PluginRan reports a run of a CNI plugin, as cni.Config.Ran does.
func (e *Exporter) PluginRan(plugin, verb string, took time.Duration, err error) {
	result := "ok"
	switch {
	case errdefs.Code(err) == codes.DeadlineExceeded:
		result = "timeout"
	case err != nil:
		result = "error"
	}
	plugin = e.plugins.value(plugin)
	e.cniCalls.WithLabelValues(plugin, verb, result).Inc()
	e.cniSeconds.WithLabelValues(plugin, verb).Observe(took.Seconds())
}

// Reloaded reports a reload of the configuration.
func (e *Exporter) Reloaded(err error) { e.reloads.WithLabelValues(resultOf(err)).Inc() }

func resultOf(err error) string {
	if err != nil {
		return "error"
	}
	return "ok"
}

// WatchdogChecked reports a health check for systemd's watchdog.
func (e *Exporter) WatchdogChecked(err error) {
	e.watchdogChecks.WithLabelValues(resultOf(err)).Inc()
	if err == nil {
		e.watchdogSuccess.SetToCurrentTime()
	}
}
