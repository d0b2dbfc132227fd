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

// leastGrace is what a sidecar gets even if the others used the pod's grace
// period up, as with kubelet.
const leastGrace = 2 * time.Second

// drainTime is how long the last output of stopped containers may take.
const drainTime = 10 * time.Second

// running is a container to be stopped. Its manifest is empty if it is not known.
type running struct {
	id        string
	container podyaml.Container
}

// stopper stops the containers of a pod in the right order.
type stopper struct {
	client   *client.Client
	now      context.Context // when it ends, grace is over
	deadline time.Time
}

// stopAll ends the run's containers and waits until their last output is printed.
func (r *podRun) stopAll(now context.Context) error {
	r.abort(nil) // no container starts again
	r.tasks.Wait()
	r.sides.Wait()
	r.mu.Lock()
	var list []running
	for _, a := range r.attempts {
		list = append(list, running{a.id, a.container})
	}
	r.mu.Unlock()
	err := newStopper(now, r.client, grace(r.plan.Pod)).stop(list)
	if err != nil {
		r.end() // what could not be stopped will not end, so do not wait for it
	}
	tooLong := time.AfterFunc(drainTime, r.end)
	defer tooLong.Stop()
	r.waits.Wait()
	return err
}

func grace(pod *corev1.Pod) time.Duration {
	return time.Duration(*pod.Spec.TerminationGracePeriodSeconds) * time.Second
}

func newStopper(now context.Context, c *client.Client, grace time.Duration) *stopper {
	return &stopper{client: c, now: now, deadline: time.Now().Add(grace)}
}

// stop stops the containers side by side, then the sidecars one after the other,
// the last started first (KEP-753).
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

// stopOne runs the container's preStop hook and stops it; both together have
// grace. If patience ends meanwhile, the container is killed.
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

// preStop runs the hook if the container still runs.
func (s *stopper) preStop(c running, grace time.Duration) error {
	if c.container.Container == nil || c.container.Lifecycle == nil || c.container.Lifecycle.PreStop == nil || grace <= 0 {
		return nil
	}
	status, err := s.client.ContainerState(s.now, c.id)
	if err != nil || status.GetState() != runtimeapi.ContainerState_CONTAINER_RUNNING {
		return nil // whatever is wrong, stopping it will tell
	}
	err = runHook(s.now, s.client, c.id, c.container.Lifecycle.PreStop, grace)
	if err != nil && s.now.Err() == nil {
		return fmt.Errorf("preStop hook of container %s: %w", c.container.Name, err)
	}
	return nil
}

func lastLine(text []byte) []byte {
	text = bytes.TrimSpace(text)
	return text[bytes.LastIndexByte(text, '\n')+1:]
}
