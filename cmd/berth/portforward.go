package main

import (
	"context"
	"net/http"
	"net/url"

	"github.com/spf13/cobra"
	"k8s.io/apimachinery/pkg/util/httpstream"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/portforward"
	"k8s.io/client-go/transport/spdy"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/internal/client"
)

func portForwardCommand(o *operator) *cobra.Command {
	var address string
	var tls rest.TLSClientConfig
	cmd := &cobra.Command{
		Use:   "port-forward POD [LOCAL:]REMOTE…",
		Short: "Forward local TCP ports to ports of a pod",
		Long: "Forward local TCP ports to ports that a pod's processes listen on at their localhost,\n" +
			"until Ctrl-C. Without LOCAL it is the same as REMOTE; with :REMOTE it is any that is free.",
		Args: cobra.MinimumNArgs(2),
	}
	cmd.Flags().StringVar(&address, "address", "127.0.0.1", "local IP address")
	addTLSFlags(cmd, &tls)
	cmd.RunE = o.connected(func(cmd *cobra.Command, args []string, c *client.Client) error {
		pod, err := c.FindPod(cmd.Context(), args[0])
		if err != nil {
			return err
		}
		ctx, stop := interruptible(cmd.Context())
		defer stop()
		what := "forward ports of pod " + client.ShortID(pod.GetId())
		reply, err := c.PortForward(ctx, &runtimeapi.PortForwardRequest{PodSandboxId: pod.GetId()})
		if err != nil {
			return interruptStatus(ctx, client.Explain(what, err))
		}
		dialer, err := portForwardDialer(reply.GetUrl(), tls)
		if err != nil {
			return err
		}
		forwarder, err := portforward.NewOnAddresses(dialer, []string{address}, args[1:], ctx.Done(), make(chan struct{}), cmd.OutOrStdout(), cmd.ErrOrStderr())
		if err != nil {
			return err
		}
		if err := forwarder.ForwardPorts(); err != nil {
			return client.Explain(what, err)
		}
		return logStatus(interruptStatus(ctx, context.Cause(ctx))) // nothing else ends it well
	})
	return cmd
}

// portForwardDialer connects to a URL that the runtime has given out.
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
