package main

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"sync/atomic"

	"berth/internal/config"
	"berth/server/streaming"
)

// listenStreaming opens the port of exec, attach and port-forward sessions.
func listenStreaming(cfg *config.Config, runtime streaming.Runtime, log *slog.Logger) (*streaming.Server, error) {
	tlsConfig, err := streamTLS(cfg, log)
	if err != nil {
		return nil, err
	}
	return streaming.Listen(streaming.Config{Address: cfg.StreamAddress, TLS: tlsConfig, IdleTimeout: cfg.StreamIdleTimeout.Duration, Log: log}, runtime)
}

// streamTLS returns the configuration of the streaming server's TLS; nil without
// certificates. They are read anew for each connection, which are few, so that a
// rotation needs no restart. While they can't be used, say in the middle of a rotation,
// the last ones that could are.
func streamTLS(cfg *config.Config, log *slog.Logger) (*tls.Config, error) {
	if cfg.StreamTLSCert == "" {
		return nil, nil
	}
	first, err := readStreamTLS(cfg)
	if err != nil {
		return nil, err
	}
	var last atomic.Pointer[tls.Config]
	last.Store(first)
	return &tls.Config{MinVersion: tls.VersionTLS12, GetConfigForClient: func(*tls.ClientHelloInfo) (*tls.Config, error) {
		current, err := readStreamTLS(cfg)
		if err != nil {
			log.Warn("the certificates of the streaming server can't be used: it goes on with those it had", "error", err)
			return last.Load(), nil
		}
		last.Store(current)
		return current, nil
	}}, nil
}

// readStreamTLS reads certificates and key.
func readStreamTLS(cfg *config.Config) (*tls.Config, error) {
	certificate, err := tls.LoadX509KeyPair(cfg.StreamTLSCert, cfg.StreamTLSKey)
	if err != nil {
		return nil, fmt.Errorf("stream_tls_cert and stream_tls_key: %w", err)
	}
	// No tickets: they would let in whom an authority that is gone has vouched for.
	t := &tls.Config{Certificates: []tls.Certificate{certificate}, MinVersion: tls.VersionTLS12, SessionTicketsDisabled: true}
	if cfg.StreamClientCA == "" {
		return t, nil
	}
	data, err := os.ReadFile(cfg.StreamClientCA)
	if err != nil {
		return nil, fmt.Errorf("stream_client_ca: %w", err)
	}
	t.ClientCAs, t.ClientAuth = x509.NewCertPool(), tls.RequireAndVerifyClientCert
	if !t.ClientCAs.AppendCertsFromPEM(data) {
		return nil, errors.New("stream_client_ca: there is no certificate in " + cfg.StreamClientCA)
	}
	return t, nil
}

// serveStreaming serves sessions in the background. stop ends them all and waits.
func serveStreaming(s *streaming.Server, log *slog.Logger) (stop func() error) {
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() {
		err := s.Serve(ctx)
		if err != nil && ctx.Err() == nil {
			log.Error("exec, attach and port-forward are served no more", "error", err)
		}
		ended <- err
	}()
	return func() error {
		cancel()
		return <-ended
	}
}
