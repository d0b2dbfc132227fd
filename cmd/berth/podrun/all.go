package podrun

import (
	"context"
	"errors"
	"fmt"
	"io"
	"sync"
	"sync/atomic"
	"time"

	corev1 "k8s.io/api/core/v1"

	"berth/cmd/berth/client"
	"berth/cmd/berth/podyaml"
	"berth/internal/cleanup"
)

// RunAll runs all workloads of a manifest at the same time, each like Run. It returns when all have
// ended. A container that fails does not stop the other pods; an error that prevents a pod from
// running does. The error is the first one.
func RunAll(ctx, now context.Context, c *client.Client, m *podyaml.Manifest, config Config) ([]Result, error) {
	config.Objects = m.Objects
	if config.Detach {
		return detachAll(ctx, now, c, m, config)
	}
	config.several = len(m.Workloads) > 1 || m.Workloads[0].Job != nil
	if config.several {
		var mu sync.Mutex
		config.Stdout, config.Stderr = &lockedWriter{&mu, config.Stdout}, &lockedWriter{&mu, config.Stderr}
	}
	ctx, abort := context.WithCancelCause(ctx)
	defer abort(nil)
	failed := &firstError{}
	var group sync.WaitGroup
	for _, w := range m.Workloads {
		group.Go(func() {
			err := runWorkload(ctx, now, c, w, config)
			var container *ContainerFailed
			if err != nil && !errors.As(err, &container) {
				abort(err)
			}
			failed.set(err)
		})
	}
	group.Wait()
	return nil, failed.get()
}

// detachAll starts all pods, one after the other. After an error it removes those that it started.
func detachAll(ctx, now context.Context, c *client.Client, m *podyaml.Manifest,
	config Config) (results []Result, err error) {
	undo := cleanup.New()
	defer undo.Run(&err)
	for _, w := range m.Workloads {
		result, err := Run(ctx, now, c, w.Pod, config)
		if err != nil {
			return nil, err
		}
		undo.Add("remove pod "+w.Pod.Name, func() error {
			_, err := Down(context.WithoutCancel(ctx), c, config.Dir, func(pod *corev1.Pod) bool {
				return pod.Name == w.Pod.Name && pod.Namespace == w.Pod.Namespace
			}, DefaultGrace)
			return err
		})
		results = append(results, result)
	}
	undo.Release()
	return results, nil
}

func runWorkload(ctx, now context.Context, c *client.Client, w podyaml.Workload, config Config) error {
	if w.Job != nil {
		return runJob(ctx, now, c, w, config)
	}
	_, err := Run(ctx, now, c, w.Pod, config)
	return err
}

// runJob runs pods until as many as the Job demands have succeeded, or too many have failed. A
// failed pod is replaced after the backoff. With restartPolicy OnFailure, restarts of containers
// count as failures.
func runJob(ctx, now context.Context, c *client.Client, w podyaml.Workload, config Config) error {
	job := w.Job
	if job.Deadline > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeoutCause(ctx, job.Deadline,
			fmt.Errorf("job %s: activeDeadlineSeconds: it ran for %s", w.Name, job.Deadline))
		defer cancel()
	}
	ctx, abort := context.WithCancelCause(ctx)
	defer abort(nil)
	config.failures = &failureLimit{left: int64(job.BackoffLimit)}
	indexes := make(chan int, job.Completions)
	for i := range job.Completions {
		indexes <- i
	}
	close(indexes)
	failed := &firstError{}
	var group sync.WaitGroup
	for range min(job.Parallelism, job.Completions) {
		group.Go(func() {
			for i := range indexes {
				if err := completeOne(ctx, now, c, w, i, config); err != nil {
					abort(err)
					failed.set(err)
					return
				}
			}
		})
	}
	group.Wait()
	if err := failed.get(); err != nil {
		return err
	}
	config.Report("job %s is complete", w.Name)
	return nil
}

// completeOne runs pods for one completion of a Job until one succeeds.
func completeOne(ctx, now context.Context, c *client.Client, w podyaml.Workload, i int, config Config) error {
	pod := w.Pod.DeepCopy()
	if w.Job.Completions > 1 {
		pod.Name = fmt.Sprintf("%s-%d", w.Pod.Name, i)
	}
	pause := config.Backoff.First
	for {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		_, err := Run(ctx, now, c, pod, config)
		var container *ContainerFailed
		switch {
		case err == nil || !errors.As(err, &container):
			return err
		case ctx.Err() != nil:
			return context.Cause(ctx) // another pod of the Job failed
		}
		if pod.Spec.RestartPolicy == corev1.RestartPolicyOnFailure || !config.failures.take() {
			return fmt.Errorf("job %s: backoffLimit %d reached: %w", w.Name, w.Job.BackoffLimit, err)
		}
		config.Report("pod %s failed: %v; the next pod starts in %s", pod.Name, err, pause)
		if !sleep(ctx, pause) {
			return context.Cause(ctx)
		}
		pause = min(2*pause, config.Backoff.Most)
	}
}

// failureLimit counts the failures that a Job may have. A nil limit has no end.
type failureLimit struct{ left int64 }

// take counts a failure. It returns false if it was one too many.
func (l *failureLimit) take() bool { return l == nil || atomic.AddInt64(&l.left, -1) >= 0 }

// firstError keeps the first error that is not nil.
type firstError struct {
	mu  sync.Mutex // guards err
	err error
}

func (f *firstError) set(err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.err == nil {
		f.err = err
	}
}

func (f *firstError) get() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.err
}

// lockedWriter serializes the lines of several pods.
type lockedWriter struct {
	mu *sync.Mutex
	io.Writer
}

func (w *lockedWriter) Write(line []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.Writer.Write(line)
}

// GracePeriod returns the longest grace period of a manifest's pods.
func GracePeriod(m *podyaml.Manifest) time.Duration {
	var longest time.Duration
	for _, w := range m.Workloads {
		longest = max(longest, grace(w.Pod))
	}
	return longest
}
