// Package client talks CRI to a runtime over its unix socket, for the operator's commands. To the
// generated gRPC client it adds references by ID prefix or name, readable errors, and the progress
// of pulls.
//
// It does not use k8s.io/cri-client, which links OpenTelemetry into the binary and hides the
// requests.
package client

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"strings"
	"syscall"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

const (
	// DefaultSocket is the default socket of the daemon.
	DefaultSocket = "unix:///run/berth/berth.sock"

	// maxMessage is CRI's limit on one message, in bytes, as in kubelet.
	maxMessage = 16 << 20

	dialTimeout = 5 * time.Second
)

// Client is a connection to a runtime. It is safe for concurrent use. Every failed call returns an
// *Error.
type Client struct {
	runtimeapi.RuntimeServiceClient
	runtimeapi.ImageServiceClient

	Socket string // path

	conn *grpc.ClientConn
}

// Dial connects to the runtime's socket: "unix:///run/x.sock" or a bare path. It fails at once,
// with a reason that an operator can act on, if no process listens. When the runtime is restarted,
// later calls connect again.
func Dial(ctx context.Context, socket string) (*Client, error) {
	path, err := socketPath(socket)
	if err != nil {
		return nil, err
	}
	if err := probe(ctx, path); err != nil {
		return nil, err
	}
	conn, err := grpc.NewClient("unix://"+path,
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(maxMessage), grpc.MaxCallSendMsgSize(maxMessage)),
		grpc.WithUnaryInterceptor(translateErrors),
		grpc.WithStreamInterceptor(translateStreamErrors),
	)
	if err != nil {
		return nil, fmt.Errorf("connect to %s: %w", path, err)
	}
	return &Client{
		Socket:               path,
		RuntimeServiceClient: runtimeapi.NewRuntimeServiceClient(conn),
		ImageServiceClient:   runtimeapi.NewImageServiceClient(conn),
		conn:                 conn,
	}, nil
}

// Close closes the connection. Calls in progress fail.
func (c *Client) Close() error { return c.conn.Close() }

// socketPath returns the path in a socket's address. It accepts crictl's forms, too.
func socketPath(socket string) (string, error) {
	path := strings.TrimPrefix(strings.TrimPrefix(socket, "unix:"), "//")
	if !strings.HasPrefix(path, "/") {
		return "", fmt.Errorf("socket %q: want unix:///absolute/path or /absolute/path", socket)
	}
	return path, nil
}

// probe connects once and disconnects, because gRPC connects lazily and reports a failure only as
// text.
func probe(ctx context.Context, path string) error {
	dialer := net.Dialer{Timeout: dialTimeout}
	conn, err := dialer.DialContext(ctx, "unix", path)
	switch {
	case err == nil:
		return conn.Close()
	case errors.Is(err, fs.ErrNotExist), errors.Is(err, syscall.ECONNREFUSED):
		return fmt.Errorf("no runtime listens on %s (is berthd running?)", path)
	case errors.Is(err, fs.ErrPermission):
		return fmt.Errorf("no permission to use %s (run as root)", path)
	}
	return fmt.Errorf("connect to %s: %w", path, err)
}

// translateErrors converts the errors of calls to *Error.
func translateErrors(ctx context.Context, method string, req, reply any,
	conn *grpc.ClientConn, invoke grpc.UnaryInvoker, opts ...grpc.CallOption,
) error {
	if err := invoke(ctx, method, req, reply, conn, opts...); err != nil {
		return newError(err)
	}
	return nil
}

// translateStreamErrors converts the errors of streaming calls to *Error.
func translateStreamErrors(ctx context.Context, desc *grpc.StreamDesc, conn *grpc.ClientConn, method string,
	open grpc.Streamer, opts ...grpc.CallOption,
) (grpc.ClientStream, error) {
	s, err := open(ctx, desc, conn, method, opts...)
	if err != nil {
		return nil, newError(err)
	}
	return translatedStream{s}, nil
}

// translatedStream is a stream whose errors are *Error.
type translatedStream struct{ grpc.ClientStream }

// RecvMsg implements grpc.ClientStream. The end of the stream is io.EOF.
func (s translatedStream) RecvMsg(m any) error {
	err := s.ClientStream.RecvMsg(m)
	if err == nil || errors.Is(err, io.EOF) {
		return err
	}
	return newError(err)
}
