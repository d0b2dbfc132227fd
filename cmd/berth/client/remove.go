package client

import (
	"context"
	"fmt"
	"time"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// overhead is added to a call's own time limit, as in kubelet.
const overhead = 2 * time.Minute

// Stop stops a container: it sends the stop signal, and SIGKILL after grace (rounded up to seconds;
// 0 kills at once).
func (c *Client) Stop(ctx context.Context, id string, grace time.Duration) error {
	ctx, cancel := context.WithTimeout(ctx, grace+overhead)
	defer cancel()
	_, err := c.StopContainer(ctx, &runtimeapi.StopContainerRequest{ContainerId: id, Timeout: seconds(grace)})
	if err != nil {
		return fmt.Errorf("stop container %s: %w", ShortID(id), err)
	}
	return nil
}

// seconds rounds up, so that a short grace period does not become 0.
func seconds(d time.Duration) int64 {
	return int64((max(d, 0) + time.Second - 1) / time.Second)
}

// Remove removes a container, and kills it if it runs.
func (c *Client) Remove(ctx context.Context, id string) error {
	ctx, cancel := context.WithTimeout(ctx, overhead)
	defer cancel()
	if _, err := c.RemoveContainer(ctx, &runtimeapi.RemoveContainerRequest{ContainerId: id}); err != nil {
		return fmt.Errorf("remove container %s: %w", ShortID(id), err)
	}
	return nil
}

// StopPod stops a pod: it kills its containers and removes its network.
func (c *Client) StopPod(ctx context.Context, id string) error {
	ctx, cancel := context.WithTimeout(ctx, overhead)
	defer cancel()
	if _, err := c.StopPodSandbox(ctx, &runtimeapi.StopPodSandboxRequest{PodSandboxId: id}); err != nil {
		return fmt.Errorf("stop pod %s: %w", ShortID(id), err)
	}
	return nil
}

// RemovePod removes a pod with its containers in any state.
func (c *Client) RemovePod(ctx context.Context, id string) error {
	ctx, cancel := context.WithTimeout(ctx, overhead)
	defer cancel()
	if _, err := c.RemovePodSandbox(ctx, &runtimeapi.RemovePodSandboxRequest{PodSandboxId: id}); err != nil {
		return fmt.Errorf("remove pod %s: %w", ShortID(id), err)
	}
	return nil
}

// PodState returns the status of a pod.
func (c *Client) PodState(ctx context.Context, id string) (*runtimeapi.PodSandboxStatus, error) {
	reply, err := c.PodSandboxStatus(ctx, &runtimeapi.PodSandboxStatusRequest{PodSandboxId: id})
	if err != nil {
		return nil, fmt.Errorf("status of pod %s: %w", ShortID(id), err)
	}
	return reply.GetStatus(), nil
}

// PodIPs returns a pod's addresses, the primary one first.
func PodIPs(status *runtimeapi.PodSandboxStatus) []string {
	var ips []string
	if ip := status.GetNetwork().GetIp(); ip != "" {
		ips = append(ips, ip)
	}
	for _, more := range status.GetNetwork().GetAdditionalIps() {
		ips = append(ips, more.GetIp())
	}
	return ips
}

// ContainersOf returns the containers of a pod, newest first.
func (c *Client) ContainersOf(ctx context.Context, podID string) ([]*runtimeapi.Container, error) {
	all, err := c.Containers(ctx)
	if err != nil {
		return nil, err
	}
	var own []*runtimeapi.Container
	for _, container := range all {
		if container.GetPodSandboxId() == podID {
			own = append(own, container)
		}
	}
	return own, nil
}
