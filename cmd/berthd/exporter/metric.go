package exporter

import (
	"runtime"
	"strings"
	"sync"

	"github.com/prometheus/client_golang/prometheus"
)

// Metric describes a metric of berth for the documentation.
type Metric struct {
	Name, Kind, Help string
	Labels           []string
}

// Metrics returns the metrics whose names begin with berth_.
func (e *Exporter) Metrics() []Metric { return e.metrics }

func (e *Exporter) describe(kind, name, help string, labels []string) {
	e.metrics = append(e.metrics, Metric{Name: name, Kind: kind, Help: help, Labels: labels})
}

func (e *Exporter) counter(name, help string) prometheus.Counter {
	return e.counterVec(name, help).WithLabelValues()
}

func (e *Exporter) counterVec(name, help string, labels ...string) *prometheus.CounterVec {
	e.describe("counter", name, help, labels)
	v := prometheus.NewCounterVec(prometheus.CounterOpts{Name: name, Help: help}, labels)
	e.registry.MustRegister(v)
	return v
}

func (e *Exporter) gauge(name, help string) prometheus.Gauge {
	return e.gaugeVec(name, help).WithLabelValues()
}

func (e *Exporter) gaugeVec(name, help string, labels ...string) *prometheus.GaugeVec {
	e.describe("gauge", name, help, labels)
	v := prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: name, Help: help}, labels)
	e.registry.MustRegister(v)
	return v
}

func (e *Exporter) histogramVec(name, help string, buckets []float64, labels ...string) *prometheus.HistogramVec {
	e.describe("histogram", name, help, labels)
	v := prometheus.NewHistogramVec(prometheus.HistogramOpts{Name: name, Help: help, Buckets: buckets}, labels)
	e.registry.MustRegister(v)
	return v
}

// otherValue replaces the values of a label beyond its limit.
const otherValue = "other"

// maxValue bounds the length of a label's value, in bytes.
const maxValue = 128

// limited limits the number of a label's values.
type limited struct {
	limit int

	mu sync.RWMutex
	// +checklocks:mu
	seen map[string]bool
}

// value returns v, or otherValue if the label has enough values.
func (l *limited) value(v string) string {
	l.mu.RLock()
	known := l.seen[v]
	l.mu.RUnlock()
	if known {
		return v
	}
	if v == "" || len(v) > maxValue {
		return otherValue
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.seen) >= l.limit && !l.seen[v] {
		return otherValue
	}
	if l.seen == nil {
		l.seen = map[string]bool{}
	}
	v = strings.ToValidUTF8(v, "?") // other values make a scrape fail
	l.seen[v] = true
	return v
}

func goVersion() string { return runtime.Version() }
