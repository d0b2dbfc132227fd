// Package otlp sends traces to an OpenTelemetry collector over gRPC or HTTP.
//
// # Contract
//
// Export never waits. It puts a trace into a queue of queueLength, or drops and counts it if the
// queue is full. One goroutine collects the traces of a second, sends them, and retries for a while
// if the collector allows it. It drops and counts traces that it cannot deliver. Close sends the
// rest of the queue, until its context ends.
//
// The package uses OTLP's generated message types but not OpenTelemetry's SDK. The SDK (1.47, with
// otlptracegrpc) makes a bare gRPC server 5 MB larger and costs 2.2 MB of PSS even if nothing is
// exported.
package otlp

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"

	"berth/internal/lograte"
	"berth/internal/task"
	"berth/internal/trace"

	resource "go.opentelemetry.io/proto/otlp/resource/v1"
)

// Protocols of a collector.
const (
	GRPC = "grpc"
	HTTP = "http/protobuf"
)

// Config selects the exported traces and their collector.
type Config struct {
	Endpoint   string // host and port of the collector
	Protocol   string // GRPC or HTTP
	Insecure   bool   // without TLS
	PerMillion int    // sampling rate of operations whose request carries no trace
	Version    string // version of berth
	Host       string // name of the node; empty: not sent
	Log        *slog.Logger
}

const (
	queueLength = 512 // traces, some hundred KB
	batchLength = 128
	gatherTime  = time.Second
	sendTimeout = 10 * time.Second // limit of one attempt
	tries       = 5
	firstPause  = time.Second // doubled after each attempt
)

// Exporter exports traces. It is safe for concurrent use.
type Exporter struct {
	cfg      Config
	resource *resource.Resource
	send     sender
	queue    chan *trace.Trace
	stopping chan struct{}
	stop     sync.Once
	ctx      context.Context // ends when Close stops waiting
	giveUp   context.CancelFunc
	owner    sync.WaitGroup
	failures lograte.Limiter // warnings

	exported, dropped atomic.Uint64 // number of exported spans and of dropped traces
	problem           atomic.Pointer[string]
}

// New starts an exporter. It connects when it sends the first trace.
func New(cfg Config) (*Exporter, error) {
	e := &Exporter{
		cfg:      cfg,
		resource: describeSender(cfg),
		queue:    make(chan *trace.Trace, queueLength),
		stopping: make(chan struct{}),
	}
	var err error
	if e.send, err = newSender(cfg); err != nil {
		return nil, fmt.Errorf("export traces to %s: %w", cfg.Endpoint, err)
	}
	e.ctx, e.giveUp = context.WithCancel(context.Background())
	e.owner.Go(e.run)
	return e, nil
}

// Sample reports whether to export an operation. The trace that the request carries decides.
// If there is no such decision, the sampling rate decides.
func (e *Exporter) Sample(asking trace.Remote) bool {
	if asking.Valid() {
		return asking.Sampled
	}
	return e.cfg.PerMillion > 0 && rand.IntN(1_000_000) < e.cfg.PerMillion
}

// Export takes ownership of a complete trace.
func (e *Exporter) Export(t *trace.Trace) {
	select {
	case e.queue <- t:
	default:
		e.dropped.Add(1)
		t.Attributes = nil // frees memory, because a pod may keep the trace
	}
}

// Info is the state of an Exporter, for operators.
type Info struct {
	Endpoint string `json:"endpoint"`
	Exported uint64 `json:"exportedSpans"`
	Dropped  uint64 `json:"droppedTraces"`
	Queued   int    `json:"queuedTraces"`
	Problem  string `json:"problem,omitempty"` // error of the last attempt, or empty
}

// Info returns the current state.
func (e *Exporter) Info() Info {
	info := Info{Endpoint: e.cfg.Endpoint, Exported: e.exported.Load(), Dropped: e.dropped.Load(), Queued: len(e.queue)}
	if problem := e.problem.Load(); problem != nil {
		info.Problem = *problem
	}
	return info
}

// Close sends the queue and stops, at the latest when ctx ends. The error contains the number of
// traces that were not sent.
func (e *Exporter) Close(ctx context.Context) error {
	e.stop.Do(func() { close(e.stopping) })
	defer context.AfterFunc(ctx, e.giveUp)()
	e.owner.Wait()
	e.giveUp()
	err := e.send.close()
	if lost := len(e.queue); lost > 0 {
		e.dropped.Add(uint64(lost))
		err = errors.Join(err, fmt.Errorf("export traces to %s: %d were not sent", e.cfg.Endpoint, lost))
	}
	return err
}

// run delivers traces until the exporter stops.
func (e *Exporter) run() {
	for e.ctx.Err() == nil {
		batch, more := e.gather()
		if len(batch) > 0 {
			e.deliver(batch)
		}
		if !more {
			return
		}
	}
}

// gather waits for traces and returns the traces of about a second. If the exporter stops and these
// are the last traces, more is false.
func (e *Exporter) gather() (batch []*trace.Trace, more bool) {
	var soon <-chan time.Time
	for len(batch) < batchLength {
		select {
		case t := <-e.queue:
			batch = append(batch, t)
			if soon == nil {
				soon = time.After(gatherTime)
			}
		case <-soon:
			return batch, true
		case <-e.stopping:
			for len(batch) < batchLength && len(e.queue) > 0 {
				batch = append(batch, <-e.queue)
			}
			return batch, len(e.queue) > 0
		}
	}
	return batch, true
}

// deliver sends a batch and retries while a retry may help.
func (e *Exporter) deliver(batch []*trace.Trace) {
	request, spans := e.encode(batch)
	for _, t := range batch {
		t.Attributes = nil // frees memory, because a pod may keep the trace
	}
	pause := firstPause
	for try := 1; ; try++ {
		err := e.sendOnce(request)
		if err == nil {
			e.exported.Add(uint64(spans))
			e.problem.Store(nil)
			return
		}
		text := err.Error()
		e.problem.Store(&text)
		if !mayHelp(err) || try == tries || !e.rest(pause) {
			e.dropped.Add(uint64(len(batch)))
			e.failures.Warn(e.cfg.Log, "drop traces", "endpoint", e.cfg.Endpoint, "traces", len(batch), "error", err)
			return
		}
		pause *= 2
	}
}

// encode encodes a batch. It recovers from a panic, so that a bad trace does not stop the daemon.
func (e *Exporter) encode(batch []*trace.Trace) (request []byte, spans int) {
	err := task.Guard(e.cfg.Log, "encode", "traces", func() (err error) {
		request, spans, err = encodeRequest(e.resource, e.cfg.Version, batch)
		return err
	})
	if err != nil {
		return nil, 0 // an empty request is valid
	}
	return request, spans
}

func (e *Exporter) sendOnce(request []byte) error {
	ctx, cancel := context.WithTimeout(e.ctx, sendTimeout)
	defer cancel()
	return e.send.export(ctx, request)
}

// rest waits before a retry. It returns false if the exporter was already stopping when the last
// attempt failed.
func (e *Exporter) rest(pause time.Duration) bool {
	select {
	case <-e.stopping:
		return false
	default:
	}
	timer := time.NewTimer(pause)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-e.stopping: // for a last attempt
	}
	return true
}
