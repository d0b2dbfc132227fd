package config

import (
	"strings"
	"testing"
)

func TestTracingEndpointIsValidated(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct{ name, text, want string }{
		{"gRPC", "tracing.endpoint = 'collector.monitoring.svc:4317'", ""},
		{"HTTP", "tracing.endpoint = '[::1]:4318'\ntracing_protocol = 'http/protobuf'\ntracing_insecure = true\ntracing_sampling_rate_per_million = 1000000", ""},
		{"a URL", "tracing.endpoint = 'http://127.0.0.1:4318'", "tracing.endpoint"},
		{"no port", "tracing.endpoint = '127.0.0.1'", "tracing.endpoint"},
		{"no host", "tracing.endpoint = ':4317'", "tracing.endpoint"},
		{"a path", "tracing.endpoint = 'localhost:4318/v1/traces'", "tracing.endpoint"},
		{"JSON", "tracing.protocol = 'http/json'", "tracing.protocol"},
		{"more than all", "tracing.sampling_rate_per_million = 1000001", "tracing.sampling_rate_per_million"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			_, err := Parse("config.toml", []byte(tt.text))
			if tt.want == "" && err != nil || tt.want != "" && (err == nil || !strings.Contains(err.Error(), tt.want)) {
				t.Errorf("got %v, want %q", err, tt.want)
			}
		})
	}
}
