package podrun

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/cmd/berth/client"
	"berth/cmd/berth/podyaml"
)

// leastGrace is the minimum grace period of a sidecar after the others have used up the pod's, as
// in kubelet.
const leastGrace = 2 * time.Second

// drainTime bounds the wait for the last output of stopped containers.
const drainTime = 10 * time.Second

// running is a container to stop. Its manifest is empty if unknown.
type running struct {
	id        string
	container podyaml.Container
}

// stopper stops the containers of a pod in the right order.
type stopper struct {
	client   *client.Client
	hooks    hooks
	now      context.Context // its end is the end of the grace period
	deadline time.Time
}

// stopAll stops the run's containers and waits until their last output is printed.
func (r *podRun) stopAll(now context.Context) error {
	r.abort(nil) // no container is started again
	r.tasks.Wait()
	r.sides.Wait()
	r.mu.Lock()
	var list []running
	for _, a := range r.attempts {
		list = append(list, running{a.id, a.container})
	}
	r.mu.Unlock()
	err := newStopper(now, r.client, grace(r.plan.Pod), r.hooks()).stop(list)
	if err != nil {
		r.end() // do not wait for a container that could not be stopped
	}
	tooLong := time.AfterFunc(drainTime, r.end)
	defer tooLong.Stop()
	r.waits.Wait()
	return err
}

func grace(pod *corev1.Pod) time.Duration {
	return time.Duration(*pod.Spec.TerminationGracePeriodSeconds) * time.Second
}

func newStopper(now context.Context, c *client.Client, grace time.Duration, h hooks) *stopper {
	return &stopper{client: c, hooks: h, now: now, deadline: time.Now().Add(grace)}
}

// stop stops the containers in parallel, and then the sidecars one by one, the last started first
// (KEP-753).
func (s *stopper) stop(list []running) error {
	var mu sync.Mutex
	var errs []error
	var group sync.WaitGroup
	for _, c := range list {
		if c.container.Sidecar() {
			continue
		}
		group.Go(func() {
			err := s.stopOne(c, time.Until(s.deadline))
			mu.Lock()
			defer mu.Unlock()
			errs = append(errs, err)
		})
	}
	group.Wait()
	for i := len(list) - 1; i >= 0; i-- {
		if list[i].container.Sidecar() {
			errs = append(errs, s.stopOne(list[i], max(time.Until(s.deadline), leastGrace)))
		}
	}
	return errors.Join(errs...)
}

// stopOne runs the container's preStop hook and stops it, both within grace. It kills the container
// if now ends meanwhile.
func (s *stopper) stopOne(c running, grace time.Duration) error {
	end := time.Now().Add(grace)
	err := s.preStop(c, grace)
	stopErr := s.client.Stop(s.now, c.id, max(time.Until(end), 0))
	if stopErr != nil && s.now.Err() != nil {
		stopErr = s.client.Stop(context.WithoutCancel(s.now), c.id, 0)
	}
	if gone(stopErr) {
		return nil
	}
	return errors.Join(err, stopErr)
}

// preStop runs the hook of a running container.
func (s *stopper) preStop(c running, grace time.Duration) error {
	if c.container.Container == nil || c.container.Lifecycle == nil || c.container.Lifecycle.PreStop == nil || grace <= 0 {
		return nil
	}
	status, err := s.client.ContainerState(s.now, c.id)
	if err != nil || status.GetState() != runtimeapi.ContainerState_CONTAINER_RUNNING {
		return nil // stopping it will report the problem
	}
	err = s.hooks.run(s.now, c, c.container.Lifecycle.PreStop, grace)
	if err != nil && s.now.Err() == nil {
		return fmt.Errorf("preStop hook of container %s: %w", c.container.Name, err)
	}
	return nil
}

func lastLine(text []byte) []byte {
	text = bytes.TrimSpace(text)
	return text[bytes.LastIndexByte(text, '\n')+1:]
}
