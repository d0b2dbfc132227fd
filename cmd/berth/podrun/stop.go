package podrun

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"sync"
	"time"

	"google.golang.org/grpc/codes"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/cmd/berth/client"
	"berth/cmd/berth/podyaml"
	"berth/internal/errdefs"
)

// defaultGrace is the grace period of containers that do not have AnnotationGrace.
const defaultGrace = 30 * time.Second

// drainTimeout bounds the wait for the last output of stopped containers.
const drainTimeout = 10 * time.Second

// Stop stops the containers of a pod at the same time, within the pod's grace period, and then the
// pod. At the end of ctx it kills them at once. Containers of Run and of kubelet state the grace
// period. For other containers it is 30 seconds.
func Stop(ctx context.Context, c *client.Client, podID string) error {
	containers, err := c.ContainersOf(context.WithoutCancel(ctx), podID)
	if err != nil {
		return fmt.Errorf("containers of pod %s: %w", client.ShortID(podID), err)
	}
	errs := make([]error, len(containers))
	var group sync.WaitGroup
	for i, container := range containers {
		if container.GetState() == runtimeapi.ContainerState_CONTAINER_RUNNING {
			group.Go(func() { errs[i] = stopOne(ctx, c, container) })
		}
	}
	group.Wait()
	if err := errors.Join(errs...); err != nil {
		return err
	}
	return c.StopPod(context.WithoutCancel(ctx), podID)
}

// stopOne stops a container within its grace period, and kills it if ctx ends.
func stopOne(ctx context.Context, c *client.Client, container *runtimeapi.Container) error {
	err := c.Stop(ctx, container.GetId(), graceOf(container))
	if err != nil && ctx.Err() != nil {
		err = c.Stop(context.WithoutCancel(ctx), container.GetId(), 0)
	}
	if errdefs.Code(err) == codes.NotFound {
		return nil
	}
	return err
}

func graceOf(container *runtimeapi.Container) time.Duration {
	n, err := strconv.ParseUint(container.GetAnnotations()[podyaml.AnnotationGrace], 10, 31)
	if err != nil {
		return defaultGrace
	}
	return time.Duration(n) * time.Second
}

// GracePeriod returns the longest grace period of a manifest's pods.
func GracePeriod(m *podyaml.Manifest) time.Duration {
	var longest int64
	for _, pod := range m.Pods {
		longest = max(longest, *pod.Spec.TerminationGracePeriodSeconds)
	}
	return time.Duration(longest) * time.Second
}

// stop stops the run's pod and waits until the last output of its containers is printed.
func (r *podRun) stop(now context.Context) error {
	err := Stop(now, r.client, r.podID)
	if err != nil {
		r.end() // do not wait for a container that could not be stopped
	}
	tooLong := time.AfterFunc(drainTimeout, r.end)
	defer tooLong.Stop()
	r.waits.Wait()
	return err
}

// removePod stops and removes the sandbox and all its containers. If RunPodSandbox returned no ID,
// it looks for the sandbox by its uid.
func (r *podRun) removePod() error {
	ctx := context.WithoutCancel(r.life)
	id := r.podID
	if id == "" {
		pods, err := r.client.Pods(ctx)
		if err != nil {
			return err
		}
		for _, pod := range pods {
			if pod.GetMetadata().GetUid() == r.plan.UID {
				id = pod.GetId()
			}
		}
	}
	if id == "" {
		return nil
	}
	if err := r.client.StopPod(ctx, id); err != nil {
		return err
	}
	return r.client.RemovePod(ctx, id)
}
