package server

import (
	"context"
	"errors"
	"sync"
	"testing"

	"google.golang.org/grpc/metadata"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/internal/trace"
	"berth/internal/trace/otlp"
)

// fakeTracing exports operations with a sampled remote parent.
type fakeTracing struct {
	mu  sync.Mutex
	got []*trace.Trace
}

func (f *fakeTracing) Sample(asking trace.Remote) bool { return asking.Sampled }
func (f *fakeTracing) Info() otlp.Info                 { return otlp.Info{Endpoint: "collector:4317"} }

func (f *fakeTracing) Export(t *trace.Trace) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.got = append(f.got, t)
}

func TestTracing(t *testing.T) {
	const header = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
	exports := &fakeTracing{}
	cfg := testConfig
	cfg.Tracing = exports
	recorded := map[string]bool{} // methods with a trace
	pods := &fakePods{hook: func(ctx context.Context, method string) error {
		recorded[method] = trace.Of(ctx) != nil
		if method == "StopPodSandbox" {
			return errors.New("it is stuck")
		}
		return nil
	}}
	h := start(t, cfg, pods, &fakeImages{})
	run := &runtimeapi.RunPodSandboxRequest{Config: &runtimeapi.PodSandboxConfig{
		Metadata: &runtimeapi.PodSandboxMetadata{Name: "web", Namespace: "default", Uid: "u1"}}}
	stop := &runtimeapi.StopPodSandboxRequest{PodSandboxId: "p1"}

	// Without a trace of kubelet only the start is recorded, and nothing is exported.
	if _, err := h.runtime.RunPodSandbox(t.Context(), run); err != nil {
		t.Fatal(err)
	}
	if _, err := h.runtime.StopPodSandbox(t.Context(), stop); err == nil {
		t.Fatal("StopPodSandbox succeeded")
	}
	if !recorded["RunPodSandbox"] || recorded["StopPodSandbox"] || len(exports.got) != 0 {
		t.Errorf("recorded %v, %d exported", recorded, len(exports.got))
	}

	traced := metadata.AppendToOutgoingContext(t.Context(), "traceparent", header)
	if _, err := h.runtime.RunPodSandbox(traced, run); err != nil {
		t.Fatal(err)
	}
	if _, err := h.runtime.StopPodSandbox(traced, stop); err == nil {
		t.Fatal("StopPodSandbox succeeded")
	}
	if len(exports.got) != 2 {
		t.Fatalf("%d exported", len(exports.got))
	}
	said := func(t *trace.Trace, key string) string {
		for _, a := range t.Attributes {
			if a.Key == key {
				return a.Value
			}
		}
		return ""
	}
	started, stopped := exports.got[0], exports.got[1]
	if started.Remote != trace.ParseRemote(header) || said(started, "k8s.pod.name") != "web" || said(started, "k8s.namespace.name") != "default" ||
		said(started, "rpc.service") != "runtime.v1.RuntimeService" || said(started, "rpc.method") != "RunPodSandbox" || said(started, "rpc.grpc.status_code") != "0" {
		t.Errorf("%+v %v", started.Remote, started.Attributes)
	}
	if why, failed := stopped.Failure(); !failed || why != "it is stuck" || said(stopped, "berth.pod.id") != "p1" || said(stopped, "rpc.grpc.status_code") != "2" {
		t.Errorf("%q %v", why, stopped.Attributes)
	}
	if o := stopped.Operation("", 0); len(o.Spans) != 1 || o.Spans[0].Name != "StopPodSandbox" || o.Failure != "it is stuck" {
		t.Errorf("%+v", o)
	}

	// A request with two parents counts as one without a parent.
	if _, err := h.runtime.RunPodSandbox(metadata.AppendToOutgoingContext(traced, "traceparent", header), run); err != nil {
		t.Fatal(err)
	}
	if len(exports.got) != 2 {
		t.Error("exported for two parents")
	}
	if status, err := h.runtime.Status(t.Context(), &runtimeapi.StatusRequest{Verbose: true}); err != nil ||
		status.Info["tracing"] != `{"endpoint":"collector:4317","exportedSpans":0,"droppedTraces":0,"queuedTraces":0}` {
		t.Errorf("%v: %v", status.GetInfo()["tracing"], err)
	}
}
