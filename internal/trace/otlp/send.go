package otlp

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net/http"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/status"
)

// sender sends an encoded ExportTraceServiceRequest to a collector.
type sender interface {
	export(ctx context.Context, request []byte) error
	close() error
}

func newSender(cfg Config) (sender, error) {
	if cfg.Protocol == HTTP {
		return newHTTPSender(cfg), nil
	}
	return newGRPCSender(cfg)
}

// mayHelp reports whether a retry may succeed, according to OTLP's specification of failures.
func mayHelp(err error) bool {
	if answer, ok := errors.AsType[*httpError](err); ok {
		switch answer.status {
		case http.StatusTooManyRequests, http.StatusBadGateway, http.StatusServiceUnavailable, http.StatusGatewayTimeout:
			return true
		}
		return false
	}
	st, ok := status.FromError(err)
	if !ok {
		return true // a connection error
	}
	switch st.Code() {
	case codes.Canceled,
		codes.DeadlineExceeded,
		codes.Aborted,
		codes.OutOfRange,
		codes.Unavailable,
		codes.DataLoss,
		codes.ResourceExhausted:
		return true
	}
	return false
}

const exportMethod = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"

// maxAnswer bounds how much of a collector's answer is read, in bytes.
const maxAnswer = 64 << 10

type grpcSender struct{ conn *grpc.ClientConn }

func newGRPCSender(cfg Config) (*grpcSender, error) {
	secure := credentials.NewTLS(&tls.Config{MinVersion: tls.VersionTLS12})
	if cfg.Insecure {
		secure = insecure.NewCredentials()
	}
	conn, err := grpc.NewClient("dns:///"+cfg.Endpoint,
		grpc.WithTransportCredentials(secure),
		grpc.WithUserAgent("berth/"+cfg.Version),
		grpc.WithNoProxy(),
		grpc.WithIdleTimeout(sendTimeout), // closes the connection and its goroutines while no pods start
		// This detects a collector that has disappeared without closing the connection. An idle
		// exporter sends no pings and needs no timer.
		grpc.WithKeepaliveParams(keepalive.ClientParameters{Time: sendTimeout, Timeout: sendTimeout}),
		grpc.WithDefaultCallOptions(grpc.ForceCodec(encoded{}), grpc.MaxCallRecvMsgSize(maxAnswer)))
	if err != nil {
		return nil, err
	}
	return &grpcSender{conn}, nil
}

func (s *grpcSender) export(ctx context.Context, request []byte) error {
	var answer []byte
	if err := s.conn.Invoke(ctx, exportMethod, &request, &answer); err != nil {
		return err
	}
	return refusal(answer)
}

func (s *grpcSender) close() error { return s.conn.Close() }

// encoded is a codec for messages that are already encoded.
type encoded struct{}

func (encoded) Name() string                  { return "proto" }
func (encoded) Marshal(v any) ([]byte, error) { return *v.(*[]byte), nil }

func (encoded) Unmarshal(data []byte, v any) error {
	*v.(*[]byte) = bytes.Clone(data)
	return nil
}

type httpSender struct {
	client *http.Client
	url    string
	agent  string
}

func newHTTPSender(cfg Config) *httpSender {
	scheme := "https://"
	if cfg.Insecure {
		scheme = "http://"
	}
	transport := http.DefaultTransport.(*http.Transport).Clone()
	transport.Proxy = nil // ignore the environment's proxy, which is for image registries
	transport.MaxIdleConnsPerHost = 1
	transport.IdleConnTimeout = sendTimeout                                                     // as for gRPC
	transport.HTTP2 = &http.HTTP2Config{SendPingTimeout: sendTimeout, PingTimeout: sendTimeout} // as for gRPC
	return &httpSender{
		client: &http.Client{Transport: transport, CheckRedirect: noRedirect},
		url:    scheme + cfg.Endpoint + "/v1/traces",
		agent:  "berth/" + cfg.Version,
	}
}

// noRedirect refuses redirects. Traces contain names of pods and must reach the configured
// collector only.
func noRedirect(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }

// httpError is an HTTP status other than success.
type httpError struct{ status int }

func (e *httpError) Error() string {
	return fmt.Sprintf("the collector answers %d %s", e.status, http.StatusText(e.status))
}

func (s *httpSender) export(ctx context.Context, request []byte) (err error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, s.url, bytes.NewReader(request))
	if err != nil {
		return err
	}
	req.Header.Set("Content-Type", "application/x-protobuf")
	req.Header.Set("User-Agent", s.agent)
	resp, err := s.client.Do(req)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, resp.Body.Close()) }()
	if resp.StatusCode/100 != 2 {
		return &httpError{resp.StatusCode}
	}
	answer, err := io.ReadAll(io.LimitReader(resp.Body, maxAnswer))
	if err != nil {
		return err
	}
	return refusal(answer)
}

func (s *httpSender) close() error {
	s.client.CloseIdleConnections()
	return nil
}
