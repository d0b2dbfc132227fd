package alerts

import (
	"encoding/json"
	"flag"
	"fmt"
	"log/slog"
	"net/url"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	monitoring "github.com/prometheus-operator/prometheus-operator/pkg/apis/monitoring/v1"
	"github.com/prometheus/common/model"
	"github.com/prometheus/prometheus/model/labels"
	"github.com/prometheus/prometheus/model/rulefmt"
	"github.com/prometheus/prometheus/promql/parser"
	"github.com/prometheus/prometheus/promql/promqltest"
	"github.com/prometheus/prometheus/rules"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/yaml"
)

const (
	rulesFile     = "../../prometheus/berth-rules.yaml"
	dashboardFile = "../../grafana/berth.json"

	operatorRule    = "../../prometheus/prometheusrule.yaml"
	operatorMonitor = "../../prometheus/podmonitor.yaml"
	runbooks        = "../../../docs/alerts.md"
)

var promQL = parser.NewParser(parser.Options{})

// alertRules returns the rules of rulesFile by name.
func alertRules(t *testing.T) map[string]rulefmt.Rule {
	t.Helper()
	groups, errs := rulefmt.ParseFile(rulesFile, false, model.UTF8Validation, promQL, slog.New(slog.DiscardHandler))
	if len(errs) > 0 {
		t.Fatal(errs)
	}
	all := map[string]rulefmt.Rule{}
	for _, group := range groups.Groups {
		for _, rule := range group.Rules {
			all[rule.Alert] = rule
		}
	}
	return all
}

// firing evaluates a rule every 30 seconds for an hour. It returns when the rule fired first, and
// the summary of the alert; fired is false if it never did.
func firing(t *testing.T, rule rulefmt.Rule, series string) (after time.Duration, summary string, fired bool) {
	t.Helper()
	expr, err := promQL.ParseExpr(rule.Expr)
	if err != nil {
		t.Fatal(err)
	}
	alert := rules.NewAlertingRule(rule.Alert, expr, time.Duration(rule.For), time.Duration(rule.KeepFiringFor),
		labels.FromMap(rule.Labels), labels.FromMap(rule.Annotations), labels.EmptyLabels(), "", true,
		slog.New(slog.DiscardHandler))
	storage := promqltest.LoadedStorage(t, "load 15s\n"+series)
	query := rules.EngineQueryFunc(promqltest.NewTestEngine(t, false, 0, promqltest.DefaultMaxSamplesPerQuery), storage)
	for ; after <= time.Hour; after += 30 * time.Second {
		if _, err := alert.Eval(t.Context(), 0, time.Unix(0, 0).Add(after), query, new(url.URL), 0); err != nil {
			t.Fatal(err)
		}
		alert.SetEvaluationTimestamp(time.Unix(0, 0).Add(after)) // a group of rules does it
		if alert.State() == rules.StateFiring {
			active := alert.ActiveAlerts()[0]
			for _, text := range active.Annotations.Map() {
				if strings.Contains(text, "error expanding") || strings.Contains(text, "<no value>") {
					t.Errorf("annotation: %s", text)
				}
			}
			return after, active.Annotations.Get("summary"), true
		}
	}
	return 0, "", false
}

// healthy are the series of a node without problems. Each has 240 values, one in 15 seconds.
const healthy = `  up{job="berth", instance="a"} 1x240
  process_start_time_seconds{job="berth", instance="a"} 1000x240
  process_open_fds{job="berth", instance="a"} 200x240
  process_max_fds{job="berth", instance="a"} 65536x240
  berth_ready{job="berth", instance="a", condition="runtime"} 1x240
  berth_ready{job="berth", instance="a", condition="network"} 1x240
  berth_rpc_requests_total{instance="a", method="RunPodSandbox", code="OK"} 0+1x240
  berth_rpc_requests_total{instance="a", method="RunPodSandbox", code="Unavailable"} 0x60 1x180
  berth_rpc_requests_total{instance="a", method="PullImage", code="Unknown"} 0+9x240
  berth_rpc_requests_total{instance="a", method="ContainerStatus", code="NotFound"} 0+9x240
  berth_rpc_duration_seconds_bucket{instance="a", method="RunPodSandbox", le="0.1"} 0+1x240
  berth_rpc_duration_seconds_bucket{instance="a", method="RunPodSandbox", le="10"} 0+1x240
  berth_rpc_duration_seconds_bucket{instance="a", method="RunPodSandbox", le="+Inf"} 0+1x240
  berth_waits_past_limit{instance="a"} 0x240
  berth_pods_unreleased{instance="a"} 0x240
  berth_watchdog_checks_total{instance="a", result="ok"} 0+1x240
  berth_watchdog_checks_total{instance="a", result="error"} 0x240
  berth_image_pulls_total{instance="a", registry="docker.io", result="pulled"} 0+1x240
  berth_image_pulls_total{instance="a", registry="docker.io", result="error"} 0x60 3x180
  berth_cni_calls_total{instance="a", plugin="bridge", verb="ADD", result="ok"} 0+1x240
  berth_cni_calls_total{instance="a", plugin="bridge", verb="ADD", result="error"} 0x60 1x180
  berth_container_exits_total{instance="a", reason="ShimLost"} 0x240
  berth_oom_kills_total{instance="a"} 0x60 1x180
  berth_pauses_lost_total{instance="a"} 0x240
  berth_launchers_lost_total{instance="a"} 0x60 1x180
  berth_config_reloads_total{instance="a", result="error"} 0x240
  berth_incomplete_layers_failed_reads_total{instance="a"} 7x240
  berth_disk_size_bytes{instance="a"} 1000x240
  berth_disk_available_bytes{instance="a"} 150x240
  berth_disk_inodes{instance="a"} 0x240
  berth_disk_available_inodes{instance="a"} 0x240
`

// scenarios have the series of a problem for each alert. The problem begins after ten minutes.
var scenarios = map[string]struct {
	series  string
	summary string        // part of it
	within  time.Duration // from the start of the problem to the alert
}{
	"BerthDown":            {`up{job="berth", instance="a"} 1x40 0x200`, "on a serves no metrics", 4 * time.Minute},
	"BerthRestartsOften":   {`process_start_time_seconds{job="berth", instance="a"} 1000x40 1600x8 1700x8 1800x8 1900x180`, "restarted", 15 * time.Minute},
	"BerthRuntimeNotReady": {`berth_ready{instance="a", condition="runtime"} 1x40 0x200`, "cannot start containers", 2 * time.Minute},
	"BerthNetworkNotReady": {`berth_ready{instance="a", condition="network"} 1x40 0x200`, "cannot get a network", 6 * time.Minute},
	"BerthPodsUnreleased":  {`berth_pods_unreleased{instance="a"} 0x40 3x200`, "the network of 3 failed pods", 16 * time.Minute},
	"BerthRequestsFail": {`berth_rpc_requests_total{instance="a", method="StartContainer", code="OK"} 0+1x240
  berth_rpc_requests_total{instance="a", method="StartContainer", code="Internal"} 0x40 0+1x200`, "of the StartContainer requests on a fail", 20 * time.Minute},
	"BerthPodStartSlow": {`berth_rpc_duration_seconds_bucket{instance="a", method="RunPodSandbox", le="1"} 0+1x40 40x200
  berth_rpc_duration_seconds_bucket{instance="a", method="RunPodSandbox", le="10"} 0+1x240
  berth_rpc_duration_seconds_bucket{instance="a", method="RunPodSandbox", le="+Inf"} 0+1x240`, "longer than 9", 35 * time.Minute},
	"BerthWaitPastLimit": {`berth_waits_past_limit{instance="a"} 0x40 2x200`, "2 operations of berth on a", 6 * time.Minute},
	"BerthWatchdogFails": {`berth_watchdog_checks_total{instance="a", result="error"} 0x40 1x200`, "fails its health check", time.Minute},
	"BerthImagePullsFail": {`berth_image_pulls_total{instance="a", registry="docker.io", result="pulled"} 0+1x40 41x200
  berth_image_pulls_total{instance="a", registry="docker.io", result="error"} 0x40 0+1x200`, "from docker.io fail", 30 * time.Minute},
	"BerthCNIFails": {`berth_cni_calls_total{instance="a", plugin="calico", verb="ADD", result="error"} 0x40 0+1x40 40x160
  berth_cni_calls_total{instance="a", plugin="calico", verb="ADD", result="timeout"} 0x240`, "plugin calico on a fails (ADD)", 10 * time.Minute},
	"BerthShimLost":               {`berth_container_exits_total{instance="a", reason="ShimLost"} 0x40 1x200`, "the shim of a container on a", time.Minute},
	"BerthPauseLost":              {`berth_pauses_lost_total{instance="a"} 0x40 1x200`, "lost its pause", time.Minute},
	"BerthLaunchersDie":           {`berth_launchers_lost_total{instance="a"} 0x40 0+1x200`, "launchers of berth on a", 3 * time.Minute},
	"BerthContainersOOMKilled":    {`berth_oom_kills_total{instance="a"} 0x40 0+1x200`, "processes in containers on a were killed", 3 * time.Minute},
	"BerthFewFileDescriptorsLeft": {`process_open_fds{job="berth", instance="a"} 10x40 900x200` + "\n" + `  process_max_fds{job="berth", instance="a"} 1024x240`, "87.89%", 11 * time.Minute},
	"BerthDiskSpaceLow": {`berth_disk_size_bytes{instance="a"} 1000x240
  berth_disk_available_bytes{instance="a"} 500x40 80x200`, "on a has 8% left", 11 * time.Minute},
	"BerthIncompleteImagesFail": {`berth_incomplete_layers_failed_reads_total{instance="a"} 0x40 0+1x200`, "containers on a failed with EIO", time.Minute},
	"BerthReloadFailed":         {`berth_config_reloads_total{instance="a", result="error"} 0x40 1x200`, "refused a new configuration", time.Minute},
}

func TestAlertsFire(t *testing.T) {
	t.Parallel()
	const begins = 10 * time.Minute
	for name, rule := range alertRules(t) {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s, ok := scenarios[name]
			if !ok {
				t.Fatal("the alert has no test")
			}
			after, summary, fired := firing(t, rule, "  "+s.series)
			if !fired || after < begins || after > begins+s.within {
				t.Errorf("fired: %t, %v after the start of the problem, want at most %v", fired, after-begins, s.within)
			}
			if !strings.Contains(summary, s.summary) {
				t.Errorf("summary %q, want %q", summary, s.summary)
			}
		})
	}
}

func TestAlertsDoNotFireOnHealthyNode(t *testing.T) {
	t.Parallel()
	for name, rule := range alertRules(t) {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			if after, summary, fired := firing(t, rule, healthy); fired {
				t.Errorf("fired after %v: %s", after, summary)
			}
		})
	}
}

func TestDashboardQueriesAreValid(t *testing.T) {
	t.Parallel()
	text, err := os.ReadFile(dashboardFile)
	if err != nil {
		t.Fatal(err)
	}
	var dashboard struct {
		Panels []struct {
			ID      int
			Type    string
			Title   string
			GridPos struct{ H, W, X, Y int }
			Targets []struct{ Expr string }
		}
	}
	if err := json.Unmarshal(text, &dashboard); err != nil {
		t.Fatal(err)
	}
	variables := strings.NewReplacer("$__rate_interval", "1m", "$instance", ".*")
	ids, queries := map[int]bool{}, 0
	for _, panel := range dashboard.Panels {
		if ids[panel.ID] {
			t.Errorf("two panels have the ID %d", panel.ID)
		}
		ids[panel.ID] = true
		if panel.GridPos.X+panel.GridPos.W > 24 {
			t.Errorf("panel %s exceeds the grid", panel.Title)
		}
		if panel.Type != "row" && len(panel.Targets) == 0 {
			t.Errorf("panel %s has no query", panel.Title)
		}
		for _, target := range panel.Targets {
			queries++
			if _, err := promQL.ParseExpr(variables.Replace(target.Expr)); err != nil {
				t.Errorf("panel %s: %s: %v", panel.Title, target.Expr, err)
			}
		}
	}
	if queries < 20 {
		t.Error(fmt.Errorf("the dashboard has %d queries", queries))
	}
}

// Each alert links to its section of the runbooks, and each section belongs to an alert.
func TestAlertsHaveRunbooks(t *testing.T) {
	t.Parallel()
	page, err := os.ReadFile(runbooks)
	if err != nil {
		t.Fatal(err)
	}
	sections := map[string]bool{}
	for _, part := range strings.Split(string(page), "\n## ")[1:] {
		title, text, _ := strings.Cut(part, "\n")
		sections[strings.ToLower(title)] = len(strings.TrimSpace(text)) > 80
	}
	rules := alertRules(t)
	for name, rule := range rules {
		if link, want := rule.Annotations["runbook_url"], "docs/alerts.md#"+strings.ToLower(name); link != want {
			t.Errorf("%s links to %q, want %s", name, link, want)
		}
		if !sections[strings.ToLower(name)] {
			t.Errorf("%s has no section", name)
		}
	}
	if len(sections) != len(rules) {
		t.Errorf("%d sections for %d alerts", len(sections), len(rules))
	}
}

var update = flag.Bool("update", false, "write prometheusrule.yaml")

// The operator's rules are those of rulesFile.
func TestPrometheusRule(t *testing.T) {
	t.Parallel()
	source, err := os.ReadFile(rulesFile)
	if err != nil {
		t.Fatal(err)
	}
	_, groups, _ := strings.Cut(string(source), "\ngroups:\n")
	want := `# The alerts of berth-rules.yaml for the Prometheus operator. Written by
# "go test . -run PrometheusRule -update" in contrib/tools/alerts; do not edit.
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: berth
  namespace: monitoring
spec:
  groups:
` + regexp.MustCompile(`(?m)^(.)`).ReplaceAllString(groups, "  $1")
	if *update {
		if err := os.WriteFile(operatorRule, []byte(want), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	got, err := os.ReadFile(operatorRule)
	if err != nil || string(got) != want {
		t.Fatalf("%s is out of date: run go test . -run PrometheusRule -update; %v", operatorRule, err)
	}
	var rule monitoring.PrometheusRule
	if err := yaml.UnmarshalStrict(got, &rule); err != nil {
		t.Fatal(err)
	}
	if len(rule.Spec.Groups) != 1 || len(rule.Spec.Groups[0].Rules) != len(alertRules(t)) {
		t.Errorf("%d groups", len(rule.Spec.Groups))
	}
}

// The PodMonitor selects the proxy's pods and gives their series the job that the alerts expect.
func TestPodMonitor(t *testing.T) {
	t.Parallel()
	text, err := os.ReadFile(operatorMonitor)
	if err != nil {
		t.Fatal(err)
	}
	var monitor monitoring.PodMonitor
	var proxy appsv1.DaemonSet
	var token corev1.Secret
	names := map[string]bool{} // kinds and names of objects
	for _, document := range strings.Split(string(text), "\n---\n") {
		var kind metav1.TypeMeta
		if err := yaml.Unmarshal([]byte(document), &kind); err != nil {
			t.Fatal(err)
		}
		object, known := map[string]metav1.Object{"PodMonitor": &monitor, "DaemonSet": &proxy, "Secret": &token,
			"ServiceAccount": &corev1.ServiceAccount{}, "ClusterRole": &rbacv1.ClusterRole{}, "ClusterRoleBinding": &rbacv1.ClusterRoleBinding{}}[kind.Kind]
		if !known {
			t.Fatalf("unexpected object: %s", document)
		}
		if err := yaml.UnmarshalStrict([]byte(document), object); err != nil {
			t.Errorf("%s: %v", kind.Kind, err)
		}
		names[kind.Kind+" "+object.GetName()] = true
		if b, ok := object.(*rbacv1.ClusterRoleBinding); ok && (!names["ClusterRole "+b.RoleRef.Name] || !names["ServiceAccount "+b.Subjects[0].Name]) {
			t.Errorf("%s binds objects that do not exist", b.Name)
		}
	}
	pod := proxy.Spec.Template
	for key, value := range monitor.Spec.Selector.MatchLabels {
		if pod.Labels[key] != value || proxy.Spec.Selector.MatchLabels[key] != value {
			t.Errorf("the proxy's pods lack the label %s=%s", key, value)
		}
	}
	if len(monitor.Spec.PodMetricsEndpoints) != 1 || len(pod.Spec.Containers) != 1 {
		t.Fatal("want one endpoint of one container")
	}
	endpoint, container := monitor.Spec.PodMetricsEndpoints[0], pod.Spec.Containers[0]
	if endpoint.Port == nil || container.Ports[0].Name != *endpoint.Port {
		t.Errorf("port %v is not that of the proxy", endpoint.Port)
	}
	if !pod.Spec.HostNetwork || !names["ServiceAccount "+pod.Spec.ServiceAccountName] {
		t.Errorf("the proxy: %+v", pod.Spec)
	}
	if a := endpoint.Authorization; a == nil || a.Credentials.Name != token.Name || !names["ServiceAccount "+token.Annotations[corev1.ServiceAccountNameKey]] {
		t.Errorf("the endpoint's credentials: %+v", a)
	}
	if !slices.ContainsFunc(container.Args, func(arg string) bool { return arg == "--upstream=http://127.0.0.1:9464/" }) {
		t.Errorf("the proxy's arguments: %v", container.Args)
	}
	if !slices.ContainsFunc(endpoint.RelabelConfigs, func(r monitoring.RelabelConfig) bool {
		return r.TargetLabel == "job" && r.Replacement != nil && *r.Replacement == "berth"
	}) {
		t.Error("the series do not get the job berth")
	}
}
