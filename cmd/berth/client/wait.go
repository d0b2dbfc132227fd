package client

import (
	"context"
	"fmt"
	"time"

	"google.golang.org/grpc/codes"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/internal/errdefs"
)

// Intervals at which WaitContainer looks: soon at first, for short-lived
// containers, then less and less often.
const (
	waitShortest = 10 * time.Millisecond
	waitLongest  = 250 * time.Millisecond
)

// ContainerState returns what the runtime knows about a container.
func (c *Client) ContainerState(ctx context.Context, id string) (*runtimeapi.ContainerStatus, error) {
	reply, err := c.ContainerStatus(ctx, &runtimeapi.ContainerStatusRequest{ContainerId: id})
	if err != nil {
		return nil, fmt.Errorf("status of container %s: %w", ShortID(id), err)
	}
	return reply.GetStatus(), nil
}

// WaitContainer returns a container's status once it has exited. It looks again
// and again, so no event can be lost, and it waits for a runtime that is being
// restarted: containers run on meanwhile.
func (c *Client) WaitContainer(ctx context.Context, id string) (*runtimeapi.ContainerStatus, error) {
	timer := time.NewTimer(0)
	defer timer.Stop()
	for pause := waitShortest; ; pause = min(2*pause, waitLongest) {
		select {
		case <-ctx.Done():
			return nil, fmt.Errorf("wait for container %s: %w", ShortID(id), context.Cause(ctx))
		case <-timer.C:
		}
		status, err := c.ContainerState(ctx, id)
		switch {
		case err == nil && status.GetState() == runtimeapi.ContainerState_CONTAINER_EXITED:
			return status, nil
		case err != nil && errdefs.Code(err) != codes.Unavailable:
			return nil, err
		}
		timer.Reset(pause)
	}
}
