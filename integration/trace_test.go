package integration

import (
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	common "go.opentelemetry.io/proto/otlp/common/v1"
	tracev1 "go.opentelemetry.io/proto/otlp/trace/v1"
	"google.golang.org/grpc/metadata"
	"google.golang.org/protobuf/proto"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/integration/harness"
	"berth/internal/trace"
)

// Spans cover at least this share of a request's time, except for the time in which goroutines wake
// each other. A CreateContainer may take less than a millisecond.
const (
	coveredPercent = 95
	handOver       = int64(150 * time.Microsecond)
)

func TestTrace(t *testing.T) {
	d := harness.StartDaemon(t)
	var operations []trace.Operation
	var id string
	done := map[string]bool{} // operations with covering spans
	// On a machine busy with other tests, a runnable goroutine may wait for a CPU between two
	// spans.
	harness.Eventually(t, "spans cover each operation", func() error {
		pod := d.RunPod(t)
		pod.Run(t)
		id, operations = pod.Id, nil
		harness.Must(t, json.Unmarshal([]byte(runBerth(t, d, "trace", id, "--output", "json")), &operations))
		var uncovered error
		for _, o := range operations {
			name, took := o.Spans[0].Name, o.Spans[0].Took
			done[name] = done[name] || covered(o)*100 >= took*coveredPercent || covered(o) >= took-handOver
			if !done[name] {
				uncovered = fmt.Errorf("spans cover only %[3]d of the %[1]d µs of %[2]s: %+[4]v", took/1000, name, covered(o)/1000, o.Spans)
			}
		}
		return uncovered
	})
	harness.Equal(t, "operations", strings.Join(spanNames(operations, 0), " "), "RunPodSandbox CreateContainer StartContainer")
	for _, o := range operations {
		checkNesting(t, o)
	}
	for what, want := range map[string]string{"CNI ADD": "bridge", "pause": "launcher", "launcher": "libcontainer start"} {
		if !slices.Contains(within(operations, what), want) {
			t.Errorf("%q is not among the parts of %q: %q", want, what, within(operations, what))
		}
	}
	if text := runBerth(t, d, "trace", id); !strings.Contains(text, "libcontainer create") || !strings.Contains(text, "█") {
		t.Errorf("berth trace printed:\n%s", text)
	}
}

func operationsOf(t *testing.T, d *harness.Daemon, pod string) (operations []trace.Operation) {
	t.Helper()
	harness.Must(t, json.Unmarshal([]byte(runBerth(t, d, "trace", pod, "--output", "json")), &operations))
	return operations
}

// The trace has the pulls for the pod and the restarts of containers, and is kept after the pod was
// removed. The next daemon records what it executes for the pod.
func TestTraceIsKept(t *testing.T) {
	d := harness.StartDaemon(t)
	pod := d.RunPod(t)
	image := &runtimeapi.ImageSpec{Image: harness.BaseImage}
	pull := func() { harness.Get(d.Images.PullImage(t.Context(), image, nil, pod.Config))(t) }
	harness.Must(t, d.Images.RemoveImage(t.Context(), image))
	pull()
	c := pod.Run(t)
	want := "RunPodSandbox PullImage CreateContainer StartContainer"
	operations := operationsOf(t, d, pod.Id)
	harness.Equal(t, "operations", strings.Join(spanNames(operations, 0), " "), want)
	harness.Equal(t, "pulled image", operations[1].Image, harness.BaseImage)
	if parts := spanNames(operations[1:2], 1); !slices.Contains(parts, "resolve") || !slices.ContainsFunc(parts, isLayer) {
		t.Errorf("parts of the pull: %q", parts)
	}
	if parts := spanNames(operations[1:2], 2); !slices.Contains(parts, "download") || !slices.Contains(parts, "unpack") {
		t.Errorf("parts of a layer: %q", parts)
	}
	checkNesting(t, operations[1])

	pull() // as kubelet does for imagePullPolicy Always: the image is unchanged
	c.Stop(t, 0)
	restarted := pod.ContainerConfig()
	restarted.Metadata.Name, restarted.Metadata.Attempt, restarted.LogPath = c.Config.Metadata.Name, 1, ""
	id := harness.Get(d.Cri.CreateContainer(t.Context(), pod.Id, restarted, pod.Config))(t)
	d.Objects = append(d.Objects, id)
	harness.Must(t, d.Cri.StartContainer(t.Context(), id))
	other := d.RunPod(t)
	pod.Remove(t)
	operations = operationsOf(t, d, pod.Config.Metadata.Name)
	harness.Equal(t, "operations after a removal", strings.Join(spanNames(operations, 0), " "), want)
	harness.Equal(t, "attempt", operations[3].Attempt, 1)
	if text := runBerth(t, d, "trace", "--slowest=1"); !strings.Contains(text, pod.Id[:12]) {
		t.Errorf("berth trace --slowest printed:\n%s", text)
	}
	d.Restart(t)
	harness.Equal(t, "starts after a restart of the daemon", strings.TrimSpace(runBerth(t, d, "trace", "-o", "json")), "[]")
	other.Run(t)
	harness.Equal(t, "operations after the restart", strings.Join(spanNames(operationsOf(t, d, other.Id), 0), " "), "CreateContainer StartContainer")
}

func isLayer(span string) bool { return strings.HasPrefix(span, "layer ") }

// The trace of a failed start contains the reason and shows the slow steps.
func TestTraceOfFailedStartHasReason(t *testing.T) {
	d := harness.StartDaemon(t)
	pod := d.RunPod(t)
	c := pod.Create(t, harness.Command("/no/such/program"))
	if err := d.Cri.StartContainer(t.Context(), c.Id); err == nil {
		t.Fatal("the container was started")
	}
	var operations []trace.Operation
	harness.Must(t, json.Unmarshal([]byte(runBerth(t, d, "trace", pod.Id, "-o", "json")), &operations))
	last := operations[len(operations)-1]
	if last.Spans[0].Name != "StartContainer" || !strings.Contains(last.Failure, "/no/such/program") {
		t.Errorf("%+v", last)
	}
}

// covered returns the time of an operation that its parts cover, in nanoseconds.
func covered(o trace.Operation) (sum int64) {
	var until int64
	for _, s := range o.Spans { // parts are sorted by their beginnings
		if s.Depth != 1 {
			continue
		}
		from := max(s.From, until)
		until = max(until, s.From+s.Took)
		sum += max(until-from, 0)
	}
	return sum
}

// checkNesting fails if a span is outside its parent.
func checkNesting(t *testing.T, o trace.Operation) {
	t.Helper()
	var around []trace.Shown
	for i, s := range o.Spans {
		if s.Depth > len(around) || (s.Depth == 0) != (i == 0) {
			t.Fatalf("span %d has depth %d: %+v", i, s.Depth, o.Spans)
		}
		around = around[:s.Depth]
		if s.Depth > 0 {
			if outer := around[s.Depth-1]; s.From < outer.From || s.From+s.Took > outer.From+outer.Took {
				t.Errorf("%+v is not inside %+v", s, outer)
			}
		}
		if s.Open || s.Took < 0 {
			t.Errorf("span %+v", s)
		}
		around = append(around, s)
	}
}

func spanNames(operations []trace.Operation, depth int) (names []string) {
	for _, o := range operations {
		for _, s := range o.Spans {
			if s.Depth == depth {
				names = append(names, s.Name)
			}
		}
	}
	return names
}

// within returns the names of the direct parts of spans with that name.
func within(operations []trace.Operation, name string) (names []string) {
	for _, o := range operations {
		depth := -1
		for _, s := range o.Spans {
			switch {
			case s.Name == name:
				depth = s.Depth
			case s.Depth <= depth:
				depth = -1
			case depth >= 0 && s.Depth == depth+1:
				names = append(names, s.Name)
			}
		}
	}
	return names
}

// collector is an OpenTelemetry collector that records the spans it receives.
type collector struct {
	mu    sync.Mutex
	spans map[string][]*tracev1.Span // by name
	node  map[string]string          // attributes of the resource
}

func (c *collector) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	body, err := io.ReadAll(r.Body)
	var data tracev1.TracesData // an ExportTraceServiceRequest has the same fields
	if err != nil || proto.Unmarshal(body, &data) != nil {
		w.WriteHeader(http.StatusBadRequest)
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, rs := range data.ResourceSpans {
		c.node = attributesOf(rs.Resource.Attributes)
		for _, ss := range rs.ScopeSpans {
			for _, s := range ss.Spans {
				c.spans[s.Name] = append(c.spans[s.Name], s)
			}
		}
	}
}

func attributesOf(list []*common.KeyValue) map[string]string {
	all := map[string]string{}
	for _, a := range list {
		all[a.Key] = a.Value.GetStringValue()
	}
	return all
}

// tracingTo configures a daemon to export to a collector with this handler.
func tracingTo(handler http.Handler, t *testing.T) harness.DaemonOption {
	server := httptest.NewServer(handler)
	t.Cleanup(server.Close)
	return harness.WithConfig(`tracing.endpoint = "`+strings.TrimPrefix(server.URL, "http://")+`"`, `tracing.protocol = "http/protobuf"`, `tracing.insecure = true`)
}

// berth continues kubelet's trace (KEP-2831), down to the launchers' steps. Calls without a trace
// are not exported.
func TestTracesAreExported(t *testing.T) {
	c := &collector{spans: map[string][]*tracev1.Span{}}
	d := harness.StartDaemon(t, tracingTo(c, t))
	const id, parent = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
	traced := metadata.AppendToOutgoingContext(t.Context(), "traceparent", "00-"+id+"-"+parent+"-01")
	config := d.PodConfig(t)
	pod := harness.Get(d.Cri.RunPodSandbox(traced, config, ""))(t)
	d.Objects = append(d.Objects, pod)
	harness.Must(t, d.Cri.StopPodSandbox(t.Context(), pod))
	harness.Must(t, d.Cri.RemovePodSandbox(traced, pod))
	d.Restart(t) // the stopping daemon sends the rest
	c.mu.Lock()
	defer c.mu.Unlock()
	run, removed, launched := c.spans["RunPodSandbox"], c.spans["RemovePodSandbox"], c.spans["execute"]
	if len(run) != 1 || len(removed) != 1 || len(launched) != 1 || len(c.spans["StopPodSandbox"]) != 0 {
		t.Fatalf("spans: %v", c.spans)
	}
	for _, s := range []*tracev1.Span{run[0], removed[0], launched[0]} {
		harness.Equal(t, "trace of "+s.Name, hex.EncodeToString(s.TraceId), id)
	}
	harness.Equal(t, "parent", hex.EncodeToString(run[0].ParentSpanId), parent)
	harness.Equal(t, "pod", attributesOf(run[0].Attributes)["k8s.pod.name"], config.Metadata.Name)
	harness.Equal(t, "pod's ID", attributesOf(run[0].Attributes)["berth.pod.id"], pod)
	harness.Equal(t, "service", c.node["service.name"], "berth")
}

// A collector that does not answer delays no pod. It delays the daemon's exit only by the time
// limit for the remaining traces.
func TestHangingTraceCollector(t *testing.T) {
	hang, asked := make(chan struct{}), make(chan struct{}, 1)
	d := harness.StartDaemon(t, tracingTo(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {
		select {
		case asked <- struct{}{}:
		default:
		}
		<-hang
	}), t))
	t.Cleanup(func() { close(hang) })
	// The call has a trace because a sampling rate would also export the leak check's calls, which
	// would keep a connection open.
	traced := metadata.AppendToOutgoingContext(t.Context(), "traceparent", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")
	live := func() {
		pod := harness.Get(d.Cri.RunPodSandbox(traced, d.PodConfig(t), ""))(t)
		d.Objects = append(d.Objects, pod)
		harness.Must(t, d.Cri.StopPodSandbox(traced, pod))
		harness.Must(t, d.Cri.RemovePodSandbox(traced, pod))
	}
	live()
	select {
	case <-asked:
	case <-time.After(time.Minute):
		t.Fatal("the collector received no request")
	}
	live()
	d.Restart(t)
}
