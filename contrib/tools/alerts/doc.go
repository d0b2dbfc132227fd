// Package alerts tests the alerts of contrib/prometheus and the queries of contrib/grafana with the
// packages of Prometheus. It is a module of its own, because Prometheus needs many modules.
package alerts
