// Package podrun runs a file of Pods through a CRI socket. It makes a pod's files, pulls its
// images, runs its init containers and its containers, and removes everything at the end. Nothing
// restarts or probes the containers, because that needs a kubelet.
//
// # Contract
//
// Run owns what it creates. In all cases, also after an interrupt, it returns with the pods and
// their files removed, or with an error that names the remains. Only detached pods stay, until
// Stop and RemoveFiles.
//
// A pod's files are found by its uid. The sandbox has the uid in its metadata, and the files are in
// the directory with this name.
package podrun

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/cmd/berth/client"
	"berth/cmd/berth/podyaml"
	"berth/internal/cleanup"
)

// Config describes how to run pods.
type Config struct {
	Dir          string            // parent directory of pods' files
	CgroupParent string            // empty: the runtime's default
	Handler      string            // runtime handler; empty: the default
	Detach       bool              // return once the containers run
	Pull         corev1.PullPolicy // replaces the manifest's policies, unless empty
	Host         podyaml.Host

	Stdout, Stderr io.Writer                        // the containers' output, line by line
	Report         func(format string, args ...any) // reports events, one line each
}

// callTimeout bounds calls that create something, as in kubelet.
const callTimeout = 4 * time.Minute

// ContainerFailed is the error of a run with a container that exited with a code other than 0. The
// first such container counts.
type ContainerFailed struct {
	Container string
	Code      int
	Reason    string // the runtime's reason, for example OOMKilled
}

func (e *ContainerFailed) Error() string {
	if e.Reason != "" && e.Reason != "Error" {
		return fmt.Sprintf("container %s exited with code %d (%s)", e.Container, e.Code, e.Reason)
	}
	return fmt.Sprintf("container %s exited with code %d", e.Container, e.Code)
}

// podRun is one run of a pod.
type podRun struct {
	client *client.Client
	plan   *podyaml.Plan
	config Config
	out    *printer
	undo   *cleanup.List

	// life ends with the run, or when the user demands an immediate end. It is the context of the
	// run's calls and goroutines. end cancels it.
	life  context.Context
	end   context.CancelFunc
	abort context.CancelCauseFunc // ends all runs with an error; any goroutine may call it

	files   *files
	images  map[imageKey]*runtimeapi.Image
	podID   string
	sandbox *runtimeapi.PodSandboxConfig
	waits   sync.WaitGroup  // goroutines that follow containers
	ended   []chan struct{} // closed by these goroutines

	mu sync.Mutex
	// +checklocks:mu
	failed *ContainerFailed
}

// Run runs the pods of a manifest at the same time. When ctx ends it stops the containers within
// their grace period. When the context now ends, it kills them at once. A container that fails does
// not stop the other pods. An error that prevents a pod from running does. Run returns the first
// error: the cause of ctx's end, a *ContainerFailed, or the failure of a step. The result has the
// IDs of detached pods.
func Run(ctx, now context.Context, c *client.Client, m *podyaml.Manifest, config Config) (ids []string, err error) {
	ctx, abort := context.WithCancelCause(ctx)
	defer abort(nil)
	out := &printer{stdout: config.Stdout, stderr: config.Stderr, several: len(m.Pods) > 1}
	var runs []*podRun
	var group sync.WaitGroup
	failed := &firstError{}
	for _, pod := range m.Pods {
		r := &podRun{
			client: c, config: config, out: out, abort: abort,
			undo: cleanup.New(), images: map[imageKey]*runtimeapi.Image{},
			plan: &podyaml.Plan{
				Pod: pod, UID: newUID(), Host: config.Host, Objects: m.Objects, CgroupParent: config.CgroupParent,
			},
		}
		r.life, r.end = context.WithCancel(now)
		defer r.end()
		runs = append(runs, r)
		group.Go(func() {
			err := r.run(ctx, now)
			failed.set(err)
			var container *ContainerFailed
			if err != nil && !errors.As(err, &container) {
				abort(err)
			}
		})
	}
	group.Wait()
	err = failed.get()
	for _, r := range runs {
		if err != nil {
			r.undo.Run(&err) // it is empty unless the pod is detached
		}
		r.undo.Release()
		ids = append(ids, r.podID)
	}
	if err != nil || !config.Detach {
		ids = nil
	}
	return ids, err
}

// run runs one pod. It leaves the undo list of a detached pod that runs.
func (r *podRun) run(ctx, now context.Context) (err error) {
	defer func() {
		if err != nil || !r.config.Detach {
			r.undo.Run(&err)
		}
	}()
	if err := r.start(ctx, now); err != nil {
		return interruptedOr(ctx, err)
	}
	if r.config.Detach {
		return nil
	}
	return r.wait(ctx)
}

// start starts the pod and its containers.
func (r *podRun) start(ctx, now context.Context) (err error) {
	pod := r.plan.Pod
	if r.files, err = makeFiles(r.config.Dir, r.plan.UID, pod); err != nil {
		return err
	}
	r.undo.Add("remove the files of the pod", r.files.remove)
	r.plan.LogDir = r.files.logs()
	if err := r.files.makeVolumes(); err != nil {
		return err
	}
	if err := r.pullImages(ctx); err != nil {
		return err
	}
	r.undo.Add("remove the pod", r.removePod)
	if err := r.startSandbox(); err != nil {
		return err
	}
	r.undo.Add("stop the containers", func() error { return r.stop(now) })
	for _, c := range r.plan.Containers() {
		if err := r.startContainer(ctx, c); err != nil {
			return err
		}
	}
	return nil
}

// wait waits until the containers have exited and their output is printed, or ctx ends.
func (r *podRun) wait(ctx context.Context) error {
	for _, ended := range r.ended {
		select {
		case <-ended:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return r.failure()
}

// failure returns the first container that failed, or nil.
func (r *podRun) failure() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.failed == nil {
		return nil
	}
	return r.failed
}

// newUID returns a random UUID (version 4), like the API server's.
func newUID() string {
	var b [16]byte
	_, _ = rand.Read(b[:]) // never fails
	b[6], b[8] = b[6]&0x0f|0x40, b[8]&0x3f|0x80
	return fmt.Sprintf("%x-%x-%x-%x-%x", b[:4], b[4:6], b[6:8], b[8:10], b[10:])
}

// interruptedOr returns the cause of ctx's end if it has ended, else err.
func interruptedOr(ctx context.Context, err error) error {
	if ctx.Err() != nil && (errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded)) {
		return context.Cause(ctx)
	}
	return err
}

// startSandbox runs the pod sandbox. An interrupt does not cancel the call, because the call is
// short. After a cancelled call it would be unknown whether the sandbox exists.
func (r *podRun) startSandbox() error {
	ctx, cancel := context.WithTimeout(r.life, callTimeout)
	defer cancel()
	r.sandbox = r.plan.Sandbox()
	reply, err := r.client.RunPodSandbox(ctx, &runtimeapi.RunPodSandboxRequest{
		Config: r.sandbox, RuntimeHandler: r.config.Handler,
	})
	if err != nil {
		return fmt.Errorf("run pod %s: %w", r.plan.Pod.Name, err)
	}
	r.podID = reply.GetPodSandboxId()
	status, err := r.client.PodState(ctx, r.podID)
	if err != nil {
		return err
	}
	ips := client.PodIPs(status)
	where := "IP " + strings.Join(ips, ", ")
	if r.plan.Pod.Spec.HostNetwork {
		where = "on the host's network"
	}
	r.config.Report("pod %s has ID %s, %s", r.plan.Pod.Name, client.ShortID(r.podID), where)
	return r.files.writeHosts(r.plan.EtcHosts(ips))
}

// startContainer starts one container and follows it. It waits for the end of an init container.
func (r *podRun) startContainer(ctx context.Context, c podyaml.Container) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	id, err := r.create(c)
	if err != nil {
		return client.Explain("create container "+c.Name, err)
	}
	if _, err := r.client.StartContainer(r.life, &runtimeapi.StartContainerRequest{ContainerId: id}); err != nil {
		return client.Explain("start container "+c.Name, err)
	}
	if r.config.Detach && !c.Init {
		return nil
	}
	ended := make(chan struct{})
	r.ended = append(r.ended, ended)
	r.waits.Go(func() {
		defer close(ended)
		r.follow(c, id)
	})
	if !c.Init {
		return nil
	}
	return r.wait(ctx)
}

// create creates the container from its part of the manifest.
func (r *podRun) create(c podyaml.Container) (string, error) {
	if err := r.files.makeLogDir(c.Name); err != nil {
		return "", err
	}
	config, err := r.plan.Container(c, podyaml.Run{
		Image: r.images[keyOf(c)], EtcHosts: r.files.hosts(), VolumeDir: r.files.volumeDir,
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

// follow waits for the end of a container and prints its log meanwhile. It reports an error of
// reading the log and continues, but an error of writing the output ends the run.
func (r *podRun) follow(c podyaml.Container, id string) {
	exited := make(chan struct{})
	var reading sync.WaitGroup
	reading.Go(func() {
		err := r.out.follow(r.life, r.plan.Pod.Name, c.Name, r.logPath(c), exited)
		var unwritten *outputError
		if errors.As(err, &unwritten) {
			r.abort(err)
		} else if err != nil {
			r.config.Report("[%s] %v", c.Name, err)
		}
	})
	status, err := r.client.WaitContainer(r.life, id)
	close(exited)
	reading.Wait()
	switch code := int(status.GetExitCode()); {
	case err != nil:
		r.abort(err)
	case code != 0:
		r.mu.Lock()
		defer r.mu.Unlock()
		if r.failed == nil {
			r.failed = &ContainerFailed{Container: c.Name, Code: code, Reason: status.GetReason()}
		}
	}
}

// firstError keeps the first error that is not nil.
type firstError struct {
	mu sync.Mutex
	// +checklocks:mu
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
