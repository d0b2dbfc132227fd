package exporter

import (
	"net/http"
	"slices"
	"strings"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	dto "github.com/prometheus/client_model/go"
)

// groups are the groups of metrics, which metrics.collectors selects, with the prefixes of their
// metrics' names.
var groups = []struct {
	name     string
	prefixes []string
}{
	{"requests", []string{"berth_rpc_"}},
	{"starts", []string{"berth_start_"}},
	{"images", []string{"berth_image"}},
	{"lazy", []string{"berth_incomplete_", "berth_peer_"}},
	{"containers", []string{"berth_container", "berth_pods", "berth_pauses_", "berth_oom_", "berth_launchers"}},
	{"network", []string{"berth_cni_"}},
	{"daemon", []string{
		"berth_build_", "berth_ready", "berth_config_", "berth_watchdog_", "berth_wait", "berth_longest_", "berth_disk_",
	}},
	{"go", []string{"go_"}},
	{"process", []string{"process_"}},
}

// groupOf returns the group of a metric.
func groupOf(metric string) string {
	for _, g := range groups {
		if slices.ContainsFunc(g.prefixes, func(prefix string) bool { return strings.HasPrefix(metric, prefix) }) {
			return g.name
		}
	}
	return ""
}

// SetGroups selects the groups of metrics that are served.
func (e *Exporter) SetGroups(names []string) { e.served.Store(&names) }

// gatherServed gathers the metrics of the selected groups.
func (e *Exporter) gatherServed() ([]*dto.MetricFamily, error) {
	families, err := e.registry.Gather()
	if served := e.served.Load(); served != nil {
		families = slices.DeleteFunc(families, func(f *dto.MetricFamily) bool {
			return !slices.Contains(*served, groupOf(f.GetName()))
		})
	}
	return families, err
}

// AllMetrics is the page of the debug socket with the metrics of all groups.
const AllMetrics = "/metrics?collectors=all"

// metricsPage serves the metrics of the selected groups. If all is true, a client can ask for all
// groups.
func (e *Exporter) metricsPage(all bool) http.Handler {
	options := promhttp.HandlerOpts{
		MaxRequestsInFlight: maxScrapes,
		DisableCompression:  true, // clients are on this node
	}
	served := promhttp.HandlerFor(prometheus.GathererFunc(e.gatherServed), options)
	every := promhttp.HandlerFor(e.registry, options)
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if all && r.URL.Query().Get("collectors") == "all" {
			every.ServeHTTP(w, r)
			return
		}
		served.ServeHTTP(w, r)
	})
}
