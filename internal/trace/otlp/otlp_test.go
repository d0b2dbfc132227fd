package otlp

import (
	"context"
	"crypto/tls"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	common "go.opentelemetry.io/proto/otlp/common/v1"
	tracev1 "go.opentelemetry.io/proto/otlp/trace/v1"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	"berth/internal/testutil"
	"berth/internal/trace"
)

func bytesField(b []byte, field protowire.Number, value []byte) []byte {
	return protowire.AppendBytes(protowire.AppendTag(b, field, protowire.BytesType), value)
}

func varintField(field protowire.Number, value uint64) []byte {
	return protowire.AppendVarint(protowire.AppendTag(nil, field, protowire.VarintType), value)
}

// fakeCollector is a collector that speaks both protocols. It decodes requests as TracesData, which
// has the same encoding as ExportTraceServiceRequest.
type fakeCollector struct {
	answer func(n int) error // to the n-th request, from 1; nil: success
	hang   chan struct{}     // not nil: the collector answers after it is closed

	mu       sync.Mutex
	requests []*tracev1.TracesData
	headers  http.Header // of the last request over HTTP
	partial  []byte      // ExportTracePartialSuccess
}

var traceService = grpc.ServiceDesc{
	ServiceName: "opentelemetry.proto.collector.trace.v1.TraceService", HandlerType: (*any)(nil),
	Methods: []grpc.MethodDesc{{MethodName: "Export", Handler: func(srv any, ctx context.Context, decode func(any) error, _ grpc.UnaryServerInterceptor) (any, error) {
		var body []byte
		if err := decode(&body); err != nil {
			return nil, err
		}
		answer, err := srv.(*fakeCollector).export(ctx, body)
		return &answer, err
	}}},
}

// export returns an ExportTraceServiceResponse.
func (c *fakeCollector) export(ctx context.Context, body []byte) ([]byte, error) {
	req := new(tracev1.TracesData)
	if err := proto.Unmarshal(body, req); err != nil {
		return nil, status.Error(codes.InvalidArgument, err.Error())
	}
	if c.hang != nil {
		select {
		case <-c.hang:
		case <-ctx.Done():
		}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.requests = append(c.requests, req)
	if c.answer != nil {
		if err := c.answer(len(c.requests)); err != nil {
			return nil, err
		}
	}
	if c.partial == nil {
		return nil, nil
	}
	return bytesField(nil, responsePartial, c.partial), nil
}

func (c *fakeCollector) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	body, err := io.ReadAll(r.Body)
	if err != nil || r.URL.Path != "/v1/traces" {
		w.WriteHeader(http.StatusBadRequest)
		return
	}
	c.mu.Lock()
	c.headers = r.Header
	c.mu.Unlock()
	answer, err := c.export(r.Context(), body)
	switch status.Code(err) {
	case codes.OK:
		_, _ = w.Write(answer)
	case codes.Unavailable:
		w.WriteHeader(http.StatusServiceUnavailable)
	default:
		w.WriteHeader(http.StatusBadRequest)
	}
}

func (c *fakeCollector) received() []*tracev1.TracesData {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.requests
}

// listen serves the collector and returns its address.
func (c *fakeCollector) listen(t *testing.T, protocol string) string {
	if protocol == HTTP {
		s := httptest.NewServer(c)
		t.Cleanup(s.Close)
		return strings.TrimPrefix(s.URL, "http://")
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	testutil.Must(t, err)
	s := grpc.NewServer(grpc.ForceServerCodec(encoded{}))
	s.RegisterService(&traceService, c)
	var serving sync.WaitGroup
	serving.Go(func() { _ = s.Serve(l) })
	t.Cleanup(func() { s.Stop(); serving.Wait() })
	return l.Addr().String()
}

func exporter(t *testing.T, c *fakeCollector, protocol string) *Exporter {
	t.Helper()
	e, err := New(Config{Endpoint: c.listen(t, protocol), Protocol: protocol, Insecure: true, Version: "1.2.3", Host: "node-1", Log: slog.New(slog.DiscardHandler)})
	testutil.Must(t, err)
	return e
}

const kubelets = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"

// record records and exports the trace of a failed start.
func record(e *Exporter, remote string) {
	ctx, tr := trace.Start(context.Background(), "RunPodSandbox", e.Export)
	tr.Remote = trace.ParseRemote(remote)
	tr.Attributes = []trace.Attribute{{Key: "k8s.pod.name", Value: "web\xff"}}
	inner, s := trace.Nest(ctx, "pause")
	trace.Begin(inner, "launcher").End()
	s.End()
	tr.Fail("no such image")
	tr.End()
}

func closed(t *testing.T, e *Exporter) error {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	return e.Close(ctx)
}

func attributes(list []*common.KeyValue) map[string]string {
	all := map[string]string{}
	for _, a := range list {
		all[a.Key] = a.Value.GetStringValue()
	}
	return all
}

func TestExportedSpansReachCollector(t *testing.T) {
	for _, protocol := range []string{GRPC, HTTP} {
		t.Run(strings.ReplaceAll(protocol, "/", "-"), func(t *testing.T) {
			c := &fakeCollector{}
			e := exporter(t, c, protocol)
			before := time.Now()
			record(e, kubelets)
			record(e, "")
			if err := closed(t, e); err != nil { // sends the queue
				t.Fatal(err)
			}
			if got := e.Info(); got.Exported != 6 || got.Dropped != 0 || got.Problem != "" {
				t.Errorf("%+v", got)
			}
			var spans []*tracev1.Span
			for _, req := range c.received() {
				for _, rs := range req.ResourceSpans {
					if a := attributes(rs.Resource.Attributes); a["service.name"] != "berth" || a["service.version"] != "1.2.3" || a["host.name"] != "node-1" || len(a) != 3 {
						t.Errorf("resource %v", a)
					}
					for _, ss := range rs.ScopeSpans {
						if ss.Scope.Name != "berth" || ss.Scope.Version != "1.2.3" {
							t.Errorf("scope %v", ss.Scope)
						}
						spans = append(spans, ss.Spans...)
					}
				}
			}
			if len(spans) != 6 {
				t.Fatalf("%d spans: %v", len(spans), spans)
			}
			for i, s := range spans {
				if len(s.TraceId) != 16 || len(s.SpanId) != 8 || s.StartTimeUnixNano < uint64(before.UnixNano()) || s.EndTimeUnixNano < s.StartTimeUnixNano ||
					s.EndTimeUnixNano > uint64(time.Now().UnixNano()) || string(s.TraceId) != string(spans[i/3*3].TraceId) {
					t.Errorf("span %d: %v", i, s)
				}
			}
			for _, of := range [][]*tracev1.Span{spans[:3], spans[3:]} {
				run, pause, launcher := of[0], of[1], of[2]
				if run.Name != "RunPodSandbox" || run.Kind != tracev1.Span_SPAN_KIND_SERVER || run.Status.GetCode() != tracev1.Status_STATUS_CODE_ERROR ||
					run.Status.Message != "" || attributes(run.Attributes)["k8s.pod.name"] != "web\ufffd" {
					t.Errorf("%v", run)
				}
				if pause.Name != "pause" || pause.Kind != tracev1.Span_SPAN_KIND_INTERNAL || string(pause.ParentSpanId) != string(run.SpanId) || pause.Status != nil {
					t.Errorf("%v", pause)
				}
				if launcher.Name != "launcher" || string(launcher.ParentSpanId) != string(pause.SpanId) {
					t.Errorf("%v", launcher)
				}
			}
			remote := trace.ParseRemote(kubelets)
			if s := spans[0]; string(s.TraceId) != string(remote.TraceID[:]) || string(s.ParentSpanId) != string(remote.SpanID[:]) || s.Flags != 0x301 {
				t.Errorf("the span is not part of kubelet's trace: %v", s)
			}
			if s := spans[3]; len(s.ParentSpanId) != 0 || s.Flags != 0x101 {
				t.Errorf("a trace without a parent: %v", s)
			}
			if protocol == HTTP && (c.headers.Get("Content-Type") != "application/x-protobuf" || c.headers.Get("User-Agent") != "berth/1.2.3") {
				t.Errorf("headers %v", c.headers)
			}
		})
	}
}

func TestSampleFollowsRequestThenRate(t *testing.T) {
	asked, unasked := trace.ParseRemote(kubelets), trace.ParseRemote(strings.TrimSuffix(kubelets, "1")+"0")
	for perMillion, want := range map[int]bool{0: false, 1_000_000: true} {
		e := &Exporter{cfg: Config{PerMillion: perMillion}}
		if !e.Sample(asked) || e.Sample(unasked) || e.Sample(trace.Remote{}) != want {
			t.Errorf("%d per million: %v, %v, %v", perMillion, e.Sample(asked), e.Sample(unasked), e.Sample(trace.Remote{}))
		}
	}
}

func TestTransientFailuresAreRetried(t *testing.T) {
	for _, test := range []struct {
		name, protocol string
		code           codes.Code
		failing, want  int
		lost           uint64
	}{
		{"busy", GRPC, codes.Unavailable, 1, 2, 0},
		{"busy over HTTP", HTTP, codes.Unavailable, 1, 2, 0},
		{"refused", GRPC, codes.PermissionDenied, 9, 1, 1},
	} {
		t.Run(test.name, func(t *testing.T) {
			c := &fakeCollector{answer: func(n int) error {
				if n <= test.failing {
					return status.Error(test.code, "not now")
				}
				return nil
			}}
			e := exporter(t, c, test.protocol)
			record(e, "")
			for e.Info().Exported == 0 && e.Info().Dropped == 0 {
				time.Sleep(time.Millisecond)
			}
			if err := closed(t, e); err != nil {
				t.Error(err)
			}
			if got := e.Info(); len(c.received()) != test.want || got.Dropped != test.lost || (got.Problem != "") != (test.lost > 0) {
				t.Errorf("%d requests, %+v", len(c.received()), got)
			}
		})
	}
}

// Spans that a collector rejects do not count as exported, and must not be sent again.
func TestRejectedSpansAreDropped(t *testing.T) {
	c := &fakeCollector{partial: bytesField(varintField(partialRejected, 2), partialMessage, []byte("too \x1b[31mold"))}
	e := exporter(t, c, GRPC)
	record(e, "")
	if err := closed(t, e); err != nil {
		t.Error(err)
	}
	if got := e.Info(); got.Dropped != 1 || !strings.Contains(got.Problem, `refused 2 spans: "too \x1b[31mold"`) || len(c.received()) != 1 {
		t.Errorf("%+v", got)
	}
	c = &fakeCollector{partial: bytesField(nil, partialMessage, []byte("by the way"))}
	e = exporter(t, c, GRPC)
	record(e, "")
	if err := closed(t, e); err != nil || e.Info().Exported != 3 {
		t.Errorf("%v, %+v", err, e.Info())
	}
}

// Export must not wait for a collector that hangs, and Close no longer than its context.
func TestHangingCollectorDelaysNothing(t *testing.T) {
	c := &fakeCollector{hang: make(chan struct{})}
	defer close(c.hang)
	e := exporter(t, c, GRPC)
	const more = 100
	for range queueLength + 2*batchLength + more {
		record(e, "")
	}
	if got := e.Info(); got.Dropped < more || got.Queued > queueLength {
		t.Errorf("%+v", got)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := e.Close(ctx); err == nil || !strings.Contains(err.Error(), "were not sent") {
		t.Errorf("closed with %v", err)
	}
}

// The exporter must never fall back to plain text.
func TestPlainTextIsNeverUsedWithTLS(t *testing.T) {
	c := &fakeCollector{}
	s := httptest.NewUnstartedServer(c)
	s.TLS, s.EnableHTTP2 = &tls.Config{MinVersion: tls.VersionTLS12}, true
	s.Config.ErrorLog = slog.NewLogLogger(slog.DiscardHandler, slog.LevelError)
	s.StartTLS()
	defer s.Close()
	for _, protocol := range []string{GRPC, HTTP} {
		e, err := New(Config{Endpoint: strings.TrimPrefix(s.URL, "https://"), Protocol: protocol, Log: slog.New(slog.DiscardHandler)})
		testutil.Must(t, err)
		record(e, "")
		if err := closed(t, e); err != nil {
			t.Error(err)
		}
		if got := e.Info(); got.Dropped != 1 || !strings.Contains(got.Problem, "x509: ") || len(c.received()) != 0 {
			t.Errorf("%s: %+v", protocol, got)
		}
	}
}

func FuzzAnswer(f *testing.F) {
	f.Add(bytesField(nil, responsePartial, bytesField(varintField(partialRejected, 3), partialMessage, []byte("m"))))
	f.Add([]byte{0x0a, 0xff})
	f.Fuzz(func(t *testing.T, answer []byte) {
		_ = refusal(answer) // must return
	})
}

// proxy listens at the address that the environment of the tests names as proxy.
var proxy net.Listener

// net/http reads the environment once per process, and never uses a proxy for local addresses.
func TestMain(m *testing.M) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		panic(err)
	}
	proxy = l
	for _, name := range []string{"HTTP_PROXY", "HTTPS_PROXY"} {
		if err := os.Setenv(name, "http://"+l.Addr().String()); err != nil {
			panic(err)
		}
	}
	os.Exit(m.Run())
}

// Traces contain names of pods, so they must not pass through a proxy.
func TestProxiesAreNotUsed(t *testing.T) {
	asked := make(chan struct{}, 1)
	var accepting sync.WaitGroup
	accepting.Go(func() {
		for {
			conn, err := proxy.Accept()
			if err != nil {
				return
			}
			conn.Close()
			select {
			case asked <- struct{}{}:
			default:
			}
		}
	})
	for _, protocol := range []string{GRPC, HTTP} {
		send, err := newSender(Config{Endpoint: "192.0.2.1:4317", Protocol: protocol, Insecure: true}) // TEST-NET-1, unassigned
		testutil.Must(t, err)
		ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
		if err := send.export(ctx, nil); err == nil {
			t.Errorf("%s: export without a collector succeeded", protocol)
		}
		cancel()
		if err := send.close(); err != nil {
			t.Error(err)
		}
	}
	proxy.Close()
	accepting.Wait()
	if len(asked) > 0 {
		t.Error("a proxy was asked")
	}
}

// A pod may keep a trace for a long time, so a dropped trace must lose its attributes.
func TestQueueIsFull(t *testing.T) {
	e := &Exporter{queue: make(chan *trace.Trace)}
	full := &trace.Trace{Attributes: []trace.Attribute{{Key: "k", Value: "v"}}}
	e.Export(full)
	if e.Info().Dropped != 1 || full.Attributes != nil {
		t.Errorf("%+v, %v", e.Info(), full.Attributes)
	}
}
