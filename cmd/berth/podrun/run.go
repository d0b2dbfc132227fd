// Package podrun runs Kubernetes manifests through a CRI socket in place of kubelet and the
// workload controllers. It creates a pod's files, pulls its images, runs its init containers,
// supervises and probes its containers, and removes everything at the end.
//
// # Contract
//
// Run owns what it creates. In all cases, also after an interrupt, it returns with the pod and its
// files removed, or with an error that names the remains. Only a detached pod stays, until Stop and
// RemoveFiles. The data of persistent volume claims stays, until RemoveClaims.
//
// A run's objects are found by its uid: the sandbox has it in its metadata, and the files are in
// the directory of that name.
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

// Config describes how to run a pod.
type Config struct {
	Dir          string            // parent directory of pods' files
	LogDir       string            // directory of the logs, which stay; empty: logs are part of the pod's files
	CgroupParent string            // empty: the runtime's default
	Handler      string            // runtime handler; empty: the default
	Detach       bool              // return once the containers run
	Pull         corev1.PullPolicy // instead of the manifest's policies; empty: those
	Host         podyaml.Host
	Objects      *podyaml.Objects // ConfigMaps, Secrets and claims of the manifest

	Stdout, Stderr io.Writer                        // the containers' output, line by line
	Report         func(format string, args ...any) // reports events, one line each

	Backoff Backoff // delay before a container's next attempt

	several  bool          // several pods write to Stdout and Stderr
	failures *failureLimit // limit of restarts after a failure; nil: none
}

// Backoff is the delay before the next attempt of a container: First, then doubled up to Most. It
// is First again after an attempt that ran for Reset.
type Backoff struct{ First, Most, Reset time.Duration }

// KubeletBackoff is kubelet's backoff.
var KubeletBackoff = Backoff{First: 10 * time.Second, Most: 5 * time.Minute, Reset: 10 * time.Minute}

// callTimeout bounds calls that create something, as in kubelet.
const callTimeout = 4 * time.Minute

// ContainerFailed is the error of a run with a container that exited for good with a code other
// than 0. The first such container counts.
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

// Result identifies the pod of a run.
type Result struct{ PodID, UID string }

// podRun is one run of a pod.
type podRun struct {
	client *client.Client
	plan   *podyaml.Plan
	config Config
	files  *files
	out    *prefixer

	// life ends with the run, or when the user demands an immediate end. It is the context of the
	// run's calls and goroutines.
	life context.Context
	end  context.CancelFunc // cancels life
	// abort ends the run with an error. Any goroutine may call it.
	abort context.CancelCauseFunc

	health  *health
	images  map[imageKey]*runtimeapi.Image
	podID   string
	sandbox *runtimeapi.PodSandboxConfig
	podIPs  []string

	tasks sync.WaitGroup // goroutines that supervise containers other than sidecars
	sides sync.WaitGroup // goroutines that supervise sidecars
	waits sync.WaitGroup // goroutines that wait for the end of attempts

	mu       sync.Mutex // guards the following fields
	attempts []*attempt // attempts that may be running
	failed   *ContainerFailed
}

// Run runs the pod. When ctx ends it stops the containers within their grace period. When the
// context now ends, it kills them at once. The error is the cause of ctx's end, a *ContainerFailed,
// or the failure of a step.
func Run(ctx, now context.Context, c *client.Client, pod *corev1.Pod, config Config) (result Result, err error) {
	uid := newUID()
	ctx, abort := context.WithCancelCause(ctx)
	defer abort(nil)
	life, end := context.WithCancel(now)
	defer end()
	if d := pod.Spec.ActiveDeadlineSeconds; d != nil && !config.Detach {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeoutCause(ctx, time.Duration(*d)*time.Second,
			fmt.Errorf("pod %s: activeDeadlineSeconds: it ran for %d s", pod.Name, *d))
		defer cancel()
	}
	r := &podRun{
		client: c, config: config, life: life, end: end, abort: abort,
		images: map[imageKey]*runtimeapi.Image{}, out: &prefixer{stdout: config.Stdout, stderr: config.Stderr},
	}
	undo := cleanup.New()
	defer undo.Run(&err)

	if r.files, err = makeFiles(config.Dir, uid, pod); err != nil {
		return Result{}, err
	}
	undo.Add("remove the files of the pod", r.files.remove)
	if err := r.makePlan(ctx, pod, uid); err != nil {
		return Result{}, err
	}
	if err := r.files.makeVolumes(r.plan); err != nil {
		return Result{}, err
	}
	if err := r.pullImages(ctx); err != nil {
		return Result{}, interruptedOr(ctx, err)
	}
	undo.Add("remove the pod", r.removePod)
	if err := r.startSandbox(); err != nil {
		return Result{}, err
	}
	undo.Add("stop the containers", func() error { return r.stopAll(now) })
	if err := r.runContainers(ctx); err != nil {
		return Result{}, interruptedOr(ctx, err)
	}
	if config.Detach {
		undo.Release()
	}
	return Result{PodID: r.podID, UID: uid}, nil
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

func (r *podRun) makePlan(ctx context.Context, pod *corev1.Pod, uid string) error {
	logs, err := r.files.makeLogDir(r.config.LogDir)
	if err != nil {
		return err
	}
	r.plan = &podyaml.Plan{
		Pod: pod, UID: uid, Host: r.config.Host, Objects: r.config.Objects,
		LogDir: logs, CgroupParent: r.config.CgroupParent,
	}
	r.health = newHealth(r.plan.Containers())
	if podyaml.WantsUserNamespace(pod) {
		r.plan.FirstHostID, err = r.chooseHostIDs(ctx)
	}
	return err
}

// startSandbox runs the pod sandbox. An interrupt does not cancel the call, because it is short,
// and after a cancelled call the sandbox may or may not exist.
func (r *podRun) startSandbox() error {
	ctx, cancel := context.WithTimeout(r.life, callTimeout)
	defer cancel()
	r.sandbox = r.plan.Sandbox()
	reply, err := r.client.RunPodSandbox(ctx, &runtimeapi.RunPodSandboxRequest{
		Config: r.sandbox, RuntimeHandler: r.config.Handler,
	})
	if err != nil {
		return fmt.Errorf("run pod %s: %w", r.plan.Pod.Name, explainPorts(ctx, r.client, err))
	}
	r.podID = reply.GetPodSandboxId()
	status, err := r.client.PodState(ctx, r.podID)
	if err != nil {
		return err
	}
	r.podIPs = client.PodIPs(status)
	where := "IP " + strings.Join(r.podIPs, ", ")
	if r.plan.Pod.Spec.HostNetwork {
		r.podIPs = r.plan.Host.IPs
		where = "on the host's network"
	}
	r.config.Report("pod %s has ID %s, %s", r.plan.Pod.Name, client.ShortID(r.podID), where)
	return r.files.writeHosts(r.plan.EtcHosts(r.podIPs))
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
