package podrun

import (
	"context"
	"errors"
	"fmt"
	"time"

	"google.golang.org/grpc/codes"
	corev1 "k8s.io/api/core/v1"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/cmd/berth/client"
	"berth/cmd/berth/podyaml"
	"berth/internal/errdefs"
)

// attempt is one start of a container. Its fields do not change after start, except that status and
// err are set before ended is closed.
type attempt struct {
	container podyaml.Container
	number    uint32
	id        string
	ended     chan struct{} // closed when the container has exited and, if it is printed, its log was read
	status    *runtimeapi.ContainerStatus
	err       error // why status is unknown, or the error of reading the log
}

// runContainers runs the init containers and starts the others. Unless the pod is detached, it
// waits until all of them have ended for good.
func (r *podRun) runContainers(ctx context.Context) error {
	for _, c := range r.plan.Containers() {
		if err := r.bring(ctx, c); err != nil {
			return err
		}
	}
	if r.config.Detach {
		return nil
	}
	r.tasks.Wait()
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	if failed := r.firstFailure(); failed != nil {
		return failed
	}
	return nil
}

// bring starts one container and waits until the next one may start.
func (r *podRun) bring(ctx context.Context, c podyaml.Container) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	a, err := r.start(ctx, c, 0)
	if err != nil {
		return err
	}
	switch {
	case c.Sidecar():
		r.sides.Go(func() { r.supervise(ctx, a) })
		return r.waitStarted(ctx, c)
	case c.Init:
		r.supervise(ctx, a)
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		if failed := r.firstFailure(); failed != nil {
			return failed
		}
	case !r.config.Detach:
		r.tasks.Go(func() { r.supervise(ctx, a) })
	}
	return nil
}

// waitStarted waits until a sidecar's startup probe has succeeded. Without such a probe it returns
// at once.
func (r *podRun) waitStarted(ctx context.Context, c podyaml.Container) error {
	if c.StartupProbe == nil || r.config.Detach {
		return nil
	}
	select {
	case <-r.health.started[c.Name]:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// supervise follows a container through all its attempts. It returns when the container has ended
// for good or ctx ends. It aborts the run on an error that prevents another attempt.
func (r *podRun) supervise(ctx context.Context, a *attempt) {
	pause := r.config.Backoff.First
	for {
		select {
		case <-ctx.Done():
			return
		case <-a.ended:
		}
		if a.err != nil {
			r.abort(a.err)
			return
		}
		if !r.startsAgain(a) {
			r.conclude(a)
			return
		}
		if ranFor(a.status) >= r.config.Backoff.Reset {
			pause = r.config.Backoff.First
		}
		if a.status.GetExitCode() != 0 && !r.config.failures.take() {
			r.conclude(a)
			r.abort(r.firstFailure()) // the Job has failed, and with it this pod
			return
		}
		r.config.Report("[%s] exited with code %d, restarting in %s",
			r.label(a.container.Name), a.status.GetExitCode(), pause)
		if !sleep(ctx, pause) {
			return
		}
		pause = min(2*pause, r.config.Backoff.Most)
		next, err := r.startAgain(ctx, a)
		if err != nil {
			r.abort(err)
			return
		}
		a = next
	}
}

// startsAgain reports whether the restart policies require another attempt. An init container that
// exits with 0 needs none.
func (r *podRun) startsAgain(a *attempt) bool {
	policy := r.plan.Pod.Spec.RestartPolicy
	ok := a.status.GetExitCode() == 0
	switch {
	case a.container.Sidecar():
		return true
	case a.container.Init:
		return !ok && policy != corev1.RestartPolicyNever
	}
	return policy == corev1.RestartPolicyAlways || (policy == corev1.RestartPolicyOnFailure && !ok)
}

// conclude records the exit status of a container that is not started again.
func (r *podRun) conclude(a *attempt) {
	code := int(a.status.GetExitCode())
	if code == 0 {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.failed == nil {
		r.failed = &ContainerFailed{Container: a.container.Name, Code: code, Reason: a.status.GetReason()}
	}
}

func (r *podRun) firstFailure() *ContainerFailed {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.failed
}

func ranFor(status *runtimeapi.ContainerStatus) time.Duration {
	return time.Duration(status.GetFinishedAt() - status.GetStartedAt())
}

// sleep waits for d. It returns false if ctx ended first.
func sleep(ctx context.Context, d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-timer.C:
		return true
	}
}

// startAgain starts the next attempt of a container.
func (r *podRun) startAgain(ctx context.Context, old *attempt) (*attempt, error) {
	if err := r.client.Remove(r.life, old.id); err != nil {
		return nil, err
	}
	r.forget(old)
	return r.start(ctx, old.container, old.number+1)
}

// start creates and starts an attempt of a container and runs its postStart hook.
func (r *podRun) start(ctx context.Context, c podyaml.Container, number uint32) (*attempt, error) {
	id, err := r.create(c, number)
	if err != nil {
		return nil, client.Explain("create container "+c.Name, err)
	}
	a := &attempt{container: c, number: number, id: id, ended: make(chan struct{})}
	if _, err := r.client.StartContainer(r.life, &runtimeapi.StartContainerRequest{ContainerId: id}); err != nil {
		return nil, client.Explain("start container "+c.Name, err)
	}
	r.remember(a)
	if c.Init || !r.config.Detach {
		r.waits.Go(func() {
			defer close(a.ended)
			a.status, a.err = r.attend(a)
		})
	}
	if c.Lifecycle != nil && c.Lifecycle.PostStart != nil {
		if err := r.hooks().run(ctx, running{id, c}, c.Lifecycle.PostStart, 0); err != nil {
			return nil, fmt.Errorf("postStart hook of container %s: %w", c.Name, err)
		}
	}
	if !r.config.Detach && (!c.Init || c.Sidecar()) {
		r.waits.Go(func() { r.probe(ctx, a) })
	}
	return a, nil
}

// create creates the container from its part of the manifest.
func (r *podRun) create(c podyaml.Container, number uint32) (string, error) {
	if err := r.files.makeContainerLogDir(r.plan.LogDir, c.Name); err != nil {
		return "", err
	}
	image := r.images[keyOf(c)]
	config, err := r.plan.Container(c, podyaml.Run{
		Attempt:  number,
		ImageRef: image.GetId(),
		Image:    image,
		PodIPs:   r.podIPs,
		EtcHosts: r.files.hosts(),
		Source:   r.files.source,

		VolumeImages: r.volumeImages(),
	})
	if err != nil {
		return "", err
	}
	ctx, cancel := context.WithTimeout(r.life, callTimeout)
	defer cancel()
	reply, err := r.client.CreateContainer(ctx, &runtimeapi.CreateContainerRequest{
		PodSandboxId: r.podID, Config: config, SandboxConfig: r.sandbox,
	})
	return reply.GetContainerId(), err
}

// attend waits for the end of an attempt and prints its log meanwhile. It reports an error of
// reading the log and continues, but an error of writing the output ends the run.
func (r *podRun) attend(a *attempt) (*runtimeapi.ContainerStatus, error) {
	exited := make(chan struct{})
	read := make(chan struct{})
	go func() {
		err := r.out.follow(r.life, r.label(a.container.Name), r.logPath(a), exited)
		var unwritten *outputError
		if errors.As(err, &unwritten) {
			r.abort(err)
		} else if err != nil {
			r.config.Report("[%s] %v", r.label(a.container.Name), err)
		}
		close(read)
	}()
	status, err := r.client.WaitContainer(r.life, a.id)
	close(exited)
	<-read
	return status, err
}

// label returns the name of a container in the output. With several pods it has the pod's name,
// too.
func (r *podRun) label(container string) string {
	if r.config.several {
		return r.plan.Pod.Name + "/" + container
	}
	return container
}

// hooks runs the lifecycle handlers of a pod's containers.
type hooks struct {
	client *client.Client
	host   string // address of the pod
}

func (r *podRun) hooks() hooks { return hooks{r.client, r.probeHost()} }

// run runs a handler. timeout 0 means no limit.
func (k hooks) run(ctx context.Context, c running, h *corev1.LifecycleHandler, timeout time.Duration) error {
	switch {
	case h.HTTPGet != nil:
		if timeout > 0 {
			var cancel context.CancelFunc
			ctx, cancel = context.WithTimeout(ctx, timeout)
			defer cancel()
		}
		_, err := httpGet(ctx, c.container, h.HTTPGet, k.host)
		return err
	case h.Sleep != nil:
		pause := time.Duration(h.Sleep.Seconds) * time.Second
		if timeout > 0 {
			pause = min(pause, timeout)
		}
		sleep(ctx, pause)
		return nil
	case h.Exec == nil:
		return nil
	}
	reply, err := k.client.ExecSync(ctx, &runtimeapi.ExecSyncRequest{
		ContainerId: c.id, Cmd: h.Exec.Command, Timeout: int64((timeout + time.Second - 1) / time.Second),
	})
	if err != nil {
		return err
	}
	if code := reply.GetExitCode(); code != 0 {
		return fmt.Errorf("command exited with code %d: %s", code, lastLine(reply.GetStderr()))
	}
	return nil
}

// remember adds an attempt to the list that the end of the run stops.
func (r *podRun) remember(a *attempt) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.attempts = append(r.attempts, a)
}

func (r *podRun) forget(old *attempt) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for i, a := range r.attempts {
		if a == old {
			r.attempts = append(r.attempts[:i:i], r.attempts[i+1:]...)
			return
		}
	}
}

// gone reports whether err means that the container no longer exists.
func gone(err error) bool { return errdefs.Code(err) == codes.NotFound }
