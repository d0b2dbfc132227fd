package exporter

import (
	"fmt"
	"net/http/httptest"
	"testing"
	"time"

	"google.golang.org/grpc/codes"

	"berth/internal/trace"
)

// newBusy returns an exporter with the series of a node that has run pods for a while.
func newBusy() *Exporter {
	e := newWatching()
	for i := range 20 {
		e.Answered(fmt.Sprintf("Method%d", i), false, codes.OK, time.Millisecond)
		e.PluginRan(fmt.Sprintf("plugin-%d", i/7), fmt.Sprintf("VERB%d", i%7), time.Millisecond, nil)
		e.Traced("RunPodSandbox", []trace.Part{{Name: "RunPodSandbox", Parent: -1}, {Name: fmt.Sprintf("step %d", i)}})
	}
	return e
}

func BenchmarkScrape(b *testing.B) {
	e := newBusy()
	h := e.metricsHandler()
	var size int
	b.ReportAllocs()
	for b.Loop() {
		w := httptest.NewRecorder()
		h.ServeHTTP(w, httptest.NewRequest("GET", "/metrics", nil))
		size = w.Body.Len()
	}
	b.ReportMetric(float64(size), "bytes")
}

func BenchmarkObserve(b *testing.B) {
	e := newBusy()
	spans := make([]trace.Part, 30)
	for i := range spans {
		spans[i] = trace.Part{Name: fmt.Sprintf("step %d", i%12), Parent: i%3 - 1, Ended: 1}
	}
	b.ReportAllocs()
	b.Run("Answered", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			e.Answered("Method1", false, codes.OK, time.Millisecond)
		}
	})
	b.Run("Traced", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			e.Traced("RunPodSandbox", spans)
		}
	})
}
