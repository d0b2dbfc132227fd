package operator

import (
	"context"
	"fmt"
	"log/slog"
	"net/http"
	"net/url"
	"strings"
	"sync"

	"github.com/go-logr/logr"
	"github.com/spf13/cobra"
	"k8s.io/apimachinery/pkg/util/httpstream"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/portforward"
	"k8s.io/client-go/transport/spdy"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
	"k8s.io/klog/v2"

	"berth/cmd/berth/cli"
	"berth/cmd/berth/client"
)

func portForwardCommand(o *Connection) *cobra.Command {
	var address string
	var tls rest.TLSClientConfig
	cmd := &cobra.Command{
		Use:   "port-forward POD [LOCAL:]REMOTE…",
		Short: "Forward local TCP ports to ports of a pod",
		Long: `Forward local TCP ports to the localhost of a pod until Ctrl-C.

LOCAL defaults to REMOTE. ":REMOTE" selects any free local port.`,
		Args: cli.Args(2, 0, "name a pod and a port"),
	}
	cmd.Flags().StringVar(&address, "address", "127.0.0.1", "local IP address to listen on")
	addTLSFlags(cmd, &tls)
	cmd.ValidArgsFunction = completeFirst(o.completeNames(podNames))
	cmd.RunE = o.connected(func(cmd *cobra.Command, args []string, c *client.Client) error {
		pod, err := c.FindPod(cmd.Context(), args[0])
		if err != nil {
			return err
		}
		ctx, stop := cli.Interruptible(cmd.Context())
		defer stop()
		what := "forward ports of pod " + client.ShortID(pod.GetId())
		reply, err := c.PortForward(ctx, &runtimeapi.PortForwardRequest{PodSandboxId: pod.GetId()})
		if err != nil {
			return cli.InterruptStatus(ctx, client.Explain(what, err))
		}
		dialer, err := portForwardDialer(reply.GetUrl(), tls)
		if err != nil {
			return err
		}
		refusals := &refusals{}
		forwarder, err := portforward.NewOnAddressesWithContext(refusals.context(ctx), dialer, []string{address}, args[1:],
			make(chan struct{}), cmd.OutOrStdout(), cmd.ErrOrStderr())
		if err != nil {
			return err
		}
		if err := forwarder.ForwardPorts(); err != nil {
			return client.Explain(what, refusals.explain(err))
		}
		return cli.Silent(cli.InterruptStatus(ctx, context.Cause(ctx))) // an interrupt is the only normal end
	})
	return cmd
}

// refusals is a slog.Handler that keeps the runtime's last reason for refusing to forward a
// connection. client-go only logs the reason, and then ends all connections.
type refusals struct {
	mu     sync.Mutex // guards reason
	reason error
}

// context returns a context that makes client-go log to r.
func (r *refusals) context(parent context.Context) context.Context {
	return klog.NewContext(parent, logr.FromSlogHandler(r))
}

// explain adds the reason, if any, to the session's error.
func (r *refusals) explain(err error) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.reason == nil {
		return err
	}
	return fmt.Errorf("%w: %s", err, strings.ReplaceAll(r.reason.Error(), "\n", "; "))
}

// Enabled implements slog.Handler.
func (r *refusals) Enabled(_ context.Context, level slog.Level) bool { return level >= slog.LevelError }

// Handle implements slog.Handler. It ignores other messages, which report the end of a connection.
func (r *refusals) Handle(_ context.Context, record slog.Record) error {
	if record.Message != "An error occurred forwarding" {
		return nil
	}
	record.Attrs(func(a slog.Attr) bool {
		if reason, ok := a.Value.Any().(error); ok {
			r.mu.Lock()
			r.reason = reason
			r.mu.Unlock()
		}
		return true
	})
	return nil
}

// WithAttrs implements slog.Handler.
func (r *refusals) WithAttrs([]slog.Attr) slog.Handler { return r }

// WithGroup implements slog.Handler.
func (r *refusals) WithGroup(string) slog.Handler { return r }

// portForwardDialer returns a dialer for a URL from the runtime.
func portForwardDialer(address string, tls rest.TLSClientConfig) (httpstream.Dialer, error) {
	u, err := url.Parse(address)
	if err != nil {
		return nil, err
	}
	transport, upgrader, err := spdy.RoundTripperFor(&rest.Config{TLSClientConfig: tls})
	if err != nil {
		return nil, err
	}
	return spdy.NewDialer(upgrader, &http.Client{Transport: transport}, http.MethodPost, u), nil
}
