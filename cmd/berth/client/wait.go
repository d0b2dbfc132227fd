package client

import (
	"context"
	"fmt"
	"time"

	"google.golang.org/grpc/codes"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/internal/errdefs"
)

// Polling intervals of WaitContainer: short at first, for short-lived containers, then longer.
const (
	waitShortest = 10 * time.Millisecond
	waitLongest  = 250 * time.Millisecond
)

// ContainerState returns the status of a container.
func (c *Client) ContainerState(ctx context.Context, id string) (*runtimeapi.ContainerStatus, error) {
	reply, err := c.ContainerStatus(ctx, &runtimeapi.ContainerStatusRequest{ContainerId: id})
	if err != nil {
		return nil, fmt.Errorf("status of container %s: %w", ShortID(id), err)
	}
	return reply.GetStatus(), nil
}

// WaitContainer returns a container's status once it has exited. It polls, so that it cannot miss
// an event, and waits for a runtime that restarts, because containers keep running.
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
