package client

import (
	"context"
	"fmt"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// Settings returns the configuration of a berth daemon as JSON. It fails for another runtime.
func (c *Client) Settings(ctx context.Context) ([]byte, error) {
	version, err := c.Version(ctx, &runtimeapi.VersionRequest{})
	if err != nil {
		return nil, err
	}
	if version.GetRuntimeName() != "berth" {
		return nil, fmt.Errorf("the runtime is %.100q, not berth", version.GetRuntimeName())
	}
	status, err := c.RuntimeServiceClient.Status(ctx, &runtimeapi.StatusRequest{Verbose: true})
	if err != nil {
		return nil, err
	}
	config, ok := status.GetInfo()["config"]
	if !ok {
		return nil, fmt.Errorf("verbose Status contains no configuration")
	}
	return []byte(config), nil
}
