package client

import (
	"context"
	"fmt"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// Settings returns the configuration that a daemon of berth runs with, as JSON, of at most the size
// of a message. Another runtime's is an error.
func (c *Client) Settings(ctx context.Context) ([]byte, error) {
	version, err := c.Version(ctx, &runtimeapi.VersionRequest{})
	if err != nil {
		return nil, err
	}
	if version.GetRuntimeName() != "berth" {
		return nil, fmt.Errorf("it is another runtime, %.100q", version.GetRuntimeName())
	}
	status, err := c.RuntimeServiceClient.Status(ctx, &runtimeapi.StatusRequest{Verbose: true})
	if err != nil {
		return nil, err
	}
	told, ok := status.GetInfo()["config"]
	if !ok {
		return nil, fmt.Errorf("verbose status tells no configuration")
	}
	return []byte(told), nil
}
