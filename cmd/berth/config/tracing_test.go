package config

import (
	"strings"
	"testing"
)

func TestTracingEndpointIsValidated(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct{ name, text, want string }{
		{"gRPC", "tracing_endpoint = 'collector.monitoring.svc:4317'", ""},
		{"HTTP", "tracing_endpoint = '[::1]:4318'\ntracing_protocol = 'http/protobuf'\ntracing_insecure = true\ntracing_sampling_rate_per_million = 1000000", ""},
		{"a URL", "tracing_endpoint = 'http://127.0.0.1:4318'", "tracing_endpoint"},
		{"no port", "tracing_endpoint = '127.0.0.1'", "tracing_endpoint"},
		{"no host", "tracing_endpoint = ':4317'", "tracing_endpoint"},
		{"a path", "tracing_endpoint = 'localhost:4318/v1/traces'", "tracing_endpoint"},
		{"JSON", "tracing_protocol = 'http/json'", "tracing_protocol"},
		{"more than all", "tracing_sampling_rate_per_million = 1000001", "tracing_sampling_rate_per_million"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			_, err := Parse("config.toml", []byte(tt.text))
			if tt.want == "" && err != nil || tt.want != "" && (err == nil || !strings.Contains(err.Error(), tt.want)) {
				t.Errorf("got %v, want %q", err, tt.want)
			}
		})
	}
}
