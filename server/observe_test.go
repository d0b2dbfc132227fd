package server

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/internal/errdefs"
	"berth/internal/testutil"
	"berth/internal/trace"
)

// observations are what an observer got.
type observations struct {
	mu  sync.Mutex // guards got
	got []string
}

func (o *observations) Answered(method string, streaming bool, code codes.Code, _ time.Duration) {
	o.add(fmt.Sprintf("%s streaming=%t %v", method, streaming, code))
}

func (o *observations) Traced(method string, spans []trace.Part) {
	var names []string
	for _, s := range spans {
		names = append(names, s.Name)
	}
	o.add(fmt.Sprintf("%s spans %s", method, strings.Join(names, " ")))
}

func (o *observations) add(text string) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.got = append(o.got, text)
}

func TestObserverGetsEachRequest(t *testing.T) {
	var failure error
	pods := &fakePods{hook: func(ctx context.Context, _ string) error {
		trace.Begin(ctx, "step").End()
		return failure
	}}
	seen := new(observations)
	cfg := testConfig
	cfg.Observer = seen
	h := start(t, cfg, pods, &fakeImages{})
	run := &runtimeapi.RunPodSandboxRequest{Config: &runtimeapi.PodSandboxConfig{
		Metadata: &runtimeapi.PodSandboxMetadata{Name: "web", Namespace: "default", Uid: "u1"}}}
	_, err := h.runtime.RunPodSandbox(t.Context(), run)
	testutil.Must(t, err)
	failure = errdefs.Unavailable("no network")
	if _, err := h.runtime.RunPodSandbox(t.Context(), run); err == nil {
		t.Error("the second request succeeded")
	}
	testutil.Must(t, h.stop())
	seen.mu.Lock()
	defer seen.mu.Unlock()
	want := "RunPodSandbox spans RunPodSandbox step; RunPodSandbox streaming=false OK; RunPodSandbox streaming=false Unavailable"
	if got := strings.Join(seen.got, "; "); got != want {
		t.Errorf("got  %s\nwant %s", got, want)
	}
}
