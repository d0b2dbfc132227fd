package podrun

import (
	"context"
	"errors"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	grpchealth "google.golang.org/grpc/health"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/intstr"

	"berth/cmd/berth/client/fakecri"
	"berth/cmd/berth/podyaml"
)

// runAll runs a manifest of any objects.
func (b *bench) runAll(ctx context.Context, text string) ([]Result, error) {
	b.t.Helper()
	m, err := podyaml.Parse([]byte(text), podyaml.Mode{Detached: b.config.Detach})
	if err != nil {
		b.t.Fatal(err)
	}
	return RunAll(ctx, b.t.Context(), b.client, m, b.config)
}

// count returns how many calls have the prefix.
func (b *bench) count(prefix string) int {
	n := 0
	for _, call := range b.Calls() {
		if strings.HasPrefix(call, prefix) {
			n++
		}
	}
	return n
}

func job(spec, restartPolicy string) string {
	return "apiVersion: batch/v1\nkind: Job\nmetadata: {name: job}\nspec:\n  " + strings.ReplaceAll(spec, "\n", "\n  ") +
		"\n  template: {spec: {restartPolicy: " + restartPolicy + ", containers: [" + container("main") + "]}}\n"
}

func TestJobs(t *testing.T) {
	tests := []struct {
		name, text string
		exits      []int32
		pods       int // number of sandboxes
		attempts   int // number of started containers
		code       int
	}{
		{"completions", job("completions: 3\nparallelism: 2", "Never"), []int32{0}, 3, 3, 0},
		{"failed pods are replaced up to the limit", job("backoffLimit: 2", "Never"), []int32{7}, 3, 3, 7},
		{"no backoff", job("backoffLimit: 0", "Never"), []int32{7}, 1, 1, 7},
		{"restarts count as failures", job("backoffLimit: 2", "OnFailure"), []int32{7, 7, 7, 0}, 1, 3, 7},
		{"restarts within the limit", job("backoffLimit: 2", "OnFailure"), []int32{7, 7, 0}, 1, 3, 0},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			b := newBench(t, &fakecri.Server{Programs: map[string]fakecri.Program{"main": {Exits: test.exits}}})
			_, err := b.runAll(t.Context(), test.text)
			var failed *ContainerFailed
			if errors.As(err, &failed) != (test.code != 0) || (failed != nil && failed.Code != test.code) {
				t.Errorf("error %v, want exit code %d", err, test.code)
			}
			if pods, attempts := b.count("RunPodSandbox"), b.count("StartContainer"); pods != test.pods || attempts != test.attempts {
				t.Errorf("%d pods, %d attempts; want %d, %d", pods, attempts, test.pods, test.attempts)
			}
			if done := strings.Contains(b.reports.String(), "job job is complete"); done != (err == nil) {
				t.Errorf("reports %q", b.reports.String())
			}
			b.checkNothingLeft()
		})
	}
}

func TestJobEndsAtItsDeadline(t *testing.T) {
	b := newBench(t, &fakecri.Server{})
	if _, err := b.runAll(t.Context(), job("activeDeadlineSeconds: 1", "Never")); err == nil || !strings.Contains(err.Error(), "it ran for 1s") {
		t.Errorf("error %v", err)
	}
	b.checkNothingLeft()
}

func TestPodEndsAtItsDeadline(t *testing.T) {
	b := newBench(t, &fakecri.Server{})
	_, err := b.run(t.Context(), t.Context(), "activeDeadlineSeconds: 1\ncontainers: ["+container("main")+"]")
	if err == nil || !strings.Contains(err.Error(), "it ran for 1 s") {
		t.Errorf("error %v", err)
	}
	b.checkNothingLeft()
}

const twoPods = "apiVersion: v1\nkind: Pod\nmetadata: {name: one}\nspec: {restartPolicy: Never, containers: [{name: a, image: '" + image + "'}]}\n---\n" +
	"apiVersion: apps/v1\nkind: Deployment\nmetadata: {name: two}\nspec: {template: {spec: {containers: [{name: b, image: '" + image + "'}]}}}\n"

func TestFailedContainerDoesNotStopOtherPods(t *testing.T) {
	interrupt := errors.New("Ctrl-C")
	ctx, stop := context.WithCancelCause(t.Context())
	b := newBench(t, &fakecri.Server{Programs: map[string]fakecri.Program{
		"a": {Exits: []int32{4}, Output: []string{"stdout hi"}}, "b": {Exits: []int32{0, 0}},
	}, Hook: func(_ context.Context, call string) error {
		if call == "StartContainer b/2" {
			stop(interrupt)
		}
		return nil
	}})
	_, err := b.runAll(ctx, twoPods)
	if err == nil {
		t.Error("no error")
	}
	if !strings.Contains(b.stdout.String(), "[one/a] hi\n") {
		t.Errorf("stdout %q", b.stdout.String())
	}
	b.checkNothingLeft()
}

func TestDetachedPodsAreRemovedAfterFailure(t *testing.T) {
	b := newBench(t, &fakecri.Server{Hook: failAt("RunPodSandbox two", 13, "no luck")})
	b.config.Detach = true
	if _, err := b.runAll(t.Context(), twoPods); err == nil || !strings.Contains(err.Error(), "no luck") {
		t.Errorf("error %v", err)
	}
	b.checkNothingLeft()
}

func TestDownSelectsPods(t *testing.T) {
	for name, want := range map[string][]string{
		"one": {"default/one"}, "two": {"default/two"}, "deployment/two": {"default/two"}, "pod/one": {"default/one"},
		"default/two": {"default/two"}, "job/two": nil, "other/one": nil, "t": nil,
	} {
		t.Run(name, func(t *testing.T) {
			b := newBench(t, &fakecri.Server{})
			b.config.Detach = true
			if _, err := b.runAll(t.Context(), twoPods); err != nil {
				t.Fatal(err)
			}
			names, err := Down(t.Context(), b.client, b.config.Dir, Named(name), 0)
			if err != nil || !slices.Equal(names, want) {
				t.Errorf("removed %q, %v; want %q", names, err, want)
			}
			if _, err := Down(t.Context(), b.client, b.config.Dir, func(*corev1.Pod) bool { return true }, 0); err != nil {
				t.Fatal(err)
			}
			b.checkNothingLeft()
		})
	}
}

func TestClaimsStayUntilRemoved(t *testing.T) {
	b := newBench(t, &fakecri.Server{Programs: map[string]fakecri.Program{"main": {Exits: []int32{0}}}})
	text := "apiVersion: v1\nkind: PersistentVolumeClaim\nmetadata: {name: data}\nspec: {}\n---\n" +
		manifest("restartPolicy: Never\nvolumes: [{name: v, persistentVolumeClaim: {claimName: data}}]\ncontainers: ["+container("main")+"]")
	if _, err := b.runAll(t.Context(), text); err != nil {
		t.Fatal(err)
	}
	if info, err := os.Stat(filepath.Join(b.config.Dir, "claims/default/data")); err != nil || info.Mode().Perm() != 0o777 {
		t.Fatalf("directory of the claim: %v, %v", info, err)
	}
	m, err := podyaml.Parse([]byte(text), podyaml.Mode{})
	if err != nil {
		t.Fatal(err)
	}
	if err := RemoveClaims(b.config.Dir, m); err != nil {
		t.Fatal(err)
	}
	b.checkNothingLeft()
}

// probed returns a container with probes.
func probed(probes string) string {
	return "terminationGracePeriodSeconds: 1\ncontainers: [{name: main, image: '" + image + "', " + probes + "}]"
}

func TestFailedLivenessProbeRestartsContainer(t *testing.T) {
	for _, probe := range []string{"livenessProbe", "startupProbe"} {
		t.Run(probe, func(t *testing.T) {
			ctx, stop := context.WithCancel(t.Context())
			b := newBench(t, &fakecri.Server{ExecCode: 3, Hook: func(_ context.Context, call string) error {
				if call == "StartContainer main/1" {
					stop()
				}
				return nil
			}})
			_, err := b.run(ctx, t.Context(), probed(probe+": {exec: {command: [check]}, periodSeconds: 1, failureThreshold: 2}"))
			if !errors.Is(err, context.Canceled) {
				t.Errorf("error %v", err)
			}
			if n := b.count("ExecSync main/0 check"); n != 2 {
				t.Errorf("%d probes before the restart, want 2", n)
			}
			if want := strings.TrimSuffix(probe, "Probe") + " probe failed 2 times: command exited with code 3"; !strings.Contains(b.reports.String(), want) {
				t.Errorf("reports %q, want %q", b.reports.String(), want)
			}
			b.checkNothingLeft()
		})
	}
}

func TestReadyPodIsReported(t *testing.T) {
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path != "/ok" || r.Host != "probe.test" {
			w.WriteHeader(http.StatusTeapot)
		}
	}))
	defer server.Close()
	_, port, err := net.SplitHostPort(server.Listener.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	for path, want := range map[string]string{"/ok": "pod web is ready", "/bad": ""} {
		t.Run(path, func(t *testing.T) {
			ctx, stop := context.WithTimeout(t.Context(), 3*time.Second)
			defer stop()
			b := newBench(t, &fakecri.Server{})
			report := b.config.Report
			b.config.Report = func(format string, args ...any) {
				report(format, args...)
				if strings.HasPrefix(format, "pod %s is ready") {
					stop()
				}
			}
			_, _ = b.run(ctx, t.Context(), "hostNetwork: true\n"+probed("readinessProbe: {periodSeconds: 1, httpGet: {path: "+path+", port: "+port+
				", httpHeaders: [{name: Host, value: probe.test}]}}"))
			if got := b.reports.String(); strings.Contains(got, "pod web is ready") != (want != "") {
				t.Errorf("reports %q", got)
			}
			b.checkNothingLeft()
		})
	}
}

func TestSidecarStartsBeforeNextContainer(t *testing.T) {
	b := newBench(t, &fakecri.Server{Programs: map[string]fakecri.Program{"main": {Exits: []int32{0}}}})
	_, err := b.run(t.Context(), t.Context(), "restartPolicy: Never\nterminationGracePeriodSeconds: 0\ninitContainers: [{name: side, image: '"+image+
		"', restartPolicy: Always, startupProbe: {exec: {command: [check]}}}]\ncontainers: ["+container("main")+"]")
	if err != nil {
		t.Fatal(err)
	}
	calls := b.Calls()
	if probe, main := slices.Index(calls, "ExecSync side/0 check"), slices.Index(calls, "CreateContainer main/0"); probe < 0 || probe > main {
		t.Errorf("main was created before its sidecar had started: %q", calls)
	}
}

func TestProbesOfPorts(t *testing.T) {
	t.Parallel()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	server := grpc.NewServer()
	status := grpchealth.NewServer()
	status.SetServingStatus("broken", healthpb.HealthCheckResponse_NOT_SERVING)
	healthpb.RegisterHealthServer(server, status)
	go func() { _ = server.Serve(listener) }() // returns at Stop
	defer server.Stop()
	port := listener.Addr().(*net.TCPAddr).Port
	broken := "broken"
	r := &podRun{plan: &podyaml.Plan{Pod: &corev1.Pod{Spec: corev1.PodSpec{HostNetwork: true}}}}
	for name, test := range map[string]struct {
		handler corev1.ProbeHandler
		want    string
	}{
		"tcp":         {corev1.ProbeHandler{TCPSocket: &corev1.TCPSocketAction{Port: intstr.FromInt(port)}}, ""},
		"tcp refused": {corev1.ProbeHandler{TCPSocket: &corev1.TCPSocketAction{Port: intstr.FromInt(1)}}, "refused"},
		"tcp no name": {corev1.ProbeHandler{TCPSocket: &corev1.TCPSocketAction{Port: intstr.FromString("x")}}, "no port"},
		"grpc":        {corev1.ProbeHandler{GRPC: &corev1.GRPCAction{Port: int32(port)}}, ""},
		"grpc broken": {corev1.ProbeHandler{GRPC: &corev1.GRPCAction{Port: int32(port), Service: &broken}}, "NOT_SERVING"},
		"no http":     {corev1.ProbeHandler{HTTPGet: &corev1.HTTPGetAction{Port: intstr.FromInt(port)}}, `Get "http:`},
	} {
		t.Run(name, func(t *testing.T) {
			a := &attempt{container: podyaml.Container{Container: &corev1.Container{Name: "main"}}}
			err := r.probeOnce(t.Context(), a, &corev1.Probe{ProbeHandler: test.handler, TimeoutSeconds: 5})
			if (err == nil) != (test.want == "") || err != nil && !strings.Contains(err.Error(), test.want) {
				t.Errorf("port %s: %v, want %q", strconv.Itoa(port), err, test.want)
			}
		})
	}
}
