package config

import (
	"strings"
	"testing"
)

func TestStreamOptionsFitTogether(t *testing.T) {
	t.Parallel()
	const tls = "stream_tls_cert = '/c'\nstream_tls_key = '/k'\n"
	for _, tt := range []struct{ name, text, want string }{
		{"default", "", ""},
		{"IPv6 loopback", "stream_address = '[::1]:10010'", ""},
		{"all with TLS", "stream_address = '0.0.0.0:10010'\n" + tls + "stream_client_ca = '/ca'", ""},
		{"no port", "stream_address = '127.0.0.1'", "stream.address"},
		{"a name", "stream_address = 'localhost:0'", "stream.address"},
		{"plain HTTP beyond loopback", "stream_address = '0.0.0.0:10010'", "loopback"},
		{"plain HTTP for the network", "stream_address = '192.0.2.1:10010'", "loopback"},
		{"certificate without key", "stream_tls_cert = '/c'", "stream.tls_key"},
		{"key without certificate", "stream_tls_key = '/k'", "stream.tls_cert"},
		{"client CA without TLS", "stream_client_ca = '/ca'", "stream.client_ca"},
		{"relative path", "stream_tls_cert = 'c'\nstream_tls_key = '/k'", "absolute"},
		{"no idle timeout", "stream_idle_timeout = '0s'", "stream.idle_timeout"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			_, err := Parse("config.toml", []byte(tt.text))
			if tt.want == "" && err != nil || tt.want != "" && (err == nil || !strings.Contains(err.Error(), tt.want)) {
				t.Errorf("got %v, want %q", err, tt.want)
			}
		})
	}
}
