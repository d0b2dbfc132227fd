// Package server serves the CRI v1 services RuntimeService and ImageService (k8s.io/cri-api) by
// gRPC on a unix socket, and berth's own services (package admin). On a second socket Cadvisor
// serves the part of containerd's API that kubelet's cAdvisor uses.
//
// # Contract
//
// The package only translates. It checks that a request has the required fields. If a field is
// missing, InvalidArgument names it. Then it calls one method of the sandbox manager or the image
// store, and encodes the result. Reads come from snapshots and never wait. Errors keep the gRPC
// code of their origin (package errdefs).
//
// A panic in a handler returns Internal and logs the stack, and the daemon continues. Only IDs of
// requests are logged, because a PullImageRequest contains credentials.
//
// RPCs that berth does not implement return Unimplemented.
package server

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"net"
	"sync"
	"time"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sync/semaphore"
	"google.golang.org/grpc"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/cni"
	"berth/image"
	"berth/image/lazy"
	"berth/image/profile"
	"berth/image/pull"
	"berth/internal/lograte"
	"berth/internal/rootfs"
	"berth/internal/task"
	"berth/sandbox/state"
	"berth/sandbox/stream"
	"berth/server/admin"
)

// MaxMessage is the largest gRPC message in bytes, in both directions. kubelet has the same limit.
const MaxMessage = 16 << 20

// stopGrace is the time for running RPCs after Serve is stopped. Then the contexts are cancelled,
// and the handlers get the same time again.
const stopGrace = 10 * time.Second

// handshakeTimeout bounds the time from a client's connection to its first HTTP/2 frames.
const handshakeTimeout = 10 * time.Second

// streamGrace is the time for streams after the last unary request.
const streamGrace = time.Second

// allRequests exceeds any number of requests.
const allRequests = math.MaxInt64

// Sandboxes is the part of the sandbox manager that the server uses. Package sandbox documents the
// contracts.
type Sandboxes interface {
	PodResources
	Events
	Statistics
	RuntimeHandlers
	Health
	Traces
	Checkpoints

	RunPodSandbox(ctx context.Context, cfg *runtimeapi.PodSandboxConfig, handler string) (string, error)
	RestorePod(ctx context.Context, r state.RestoreRequest) (podID string, containers []state.Restored, err error)
	StopPodSandbox(ctx context.Context, id string) error
	RemovePodSandbox(ctx context.Context, id string) error
	Pod(id string) (*state.Pod, error)
	Pods() []*state.Pod

	CreateContainer(
		ctx context.Context, podID string, cfg *runtimeapi.ContainerConfig, pod *runtimeapi.PodSandboxConfig,
	) (string, error)
	StartContainer(ctx context.Context, id string) error
	StopContainer(ctx context.Context, id string, timeout time.Duration) error
	RemoveContainer(ctx context.Context, id string) error
	Container(id string) (*state.Container, error)
	Containers() []*state.Container
	RuntimeSpec(ctx context.Context, id string) (*specs.Spec, error)
	ExecSync(ctx context.Context, id string, cmd []string, timeout time.Duration) (*stream.Result, error)
	UpdateContainerResources(ctx context.Context, id string, resources *runtimeapi.LinuxContainerResources) error
	ReopenContainerLog(ctx context.Context, id string) error

	Reachable

	NetworkStatus(ctx context.Context) error
	UpdatePodCIDR(ctx context.Context, cidrs string) error
	Waits() []task.Wait
}

// Images is the part of the image store that the server uses. Package image documents the
// contracts.
type Images interface {
	PullFor(ctx context.Context, namespace, ref string, auth *runtimeapi.AuthConfig) (*image.Image, error)
	Get(ref string) (*image.Image, error)
	Remove(ctx context.Context, ref string) error
	Usage(ctx context.Context) (image.Usage, error)
	Progress() []pull.Progress
	LazyStatus(img *image.Image) *lazy.Status // nil: the image is complete
	// PullProfile and Profiles: see pull.Puller.
	PullProfile(ctx context.Context, namespace, ref string, auth *runtimeapi.AuthConfig) (cached bool, err error)
	Profiles() *profile.Store
	Fetched(img *image.Image) string // "": the image is complete
	Driver() rootfs.Kind             // the form of new layers
	admin.Store
}

// Config contains the server's static answers and its callbacks.
type Config struct {
	Version        string // runtime_version, semver
	SystemdCgroup  bool   // the cgroup driver is systemd, otherwise cgroupfs
	UserNamespaces bool   // pods can have user namespaces, even with the host's network
	PulledSeccomp  bool   // pods of the built-in runtime can use pulled seccomp profiles
	CgroupMounts   bool   // cgroup_mount_mode can be READ_WRITE

	// Settings returns the present configuration for verbose Status. It encodes as JSON.
	Settings func() any

	// Network returns the network of new pods for verbose Status, or the error that prevents it. It
	// answers from memory and may be nil.
	Network func() cni.Info

	// PassedLimit returns the number of waits beyond their limit for verbose Status. It may be nil.
	PassedLimit func() uint64

	Sessions Sessions // for Exec, Attach and PortForward

	Tracing Tracing // nil: no export

	Observer Observer // nil: none

	Events *EventLog // Serve closes it

	// Names returns the names of the pod or container with an ID. It answers from memory and may be
	// nil.
	Names func(id string) (state.Names, bool)

	// Changing is called before each request that creates, starts, stops or removes an object. Its
	// result is called after the request. Neither may block. Changing may be nil.
	Changing func() (changed func())
}

// Server serves CRI. Use New.
type Server struct {
	log      *slog.Logger
	grpc     *grpc.Server
	grace    time.Duration // stopGrace, shorter in tests
	tracing  Tracing       // nil: none
	observer Observer      // nil: none
	changing func() func() // Config.Changing
	names    func(id string) (state.Names, bool)

	events *runtimeService // for record and its EventLog

	requests *semaphore.Weighted // held by each unary request, and by stop
	begun    sync.WaitGroup      // accepted connections whose handshake has not begun

	stopping   context.Context // ends when Serve is stopped, and ends endless streams
	endStreams context.CancelFunc
}

// New returns a server that passes requests on to pods and images.
func New(cfg Config, pods Sandboxes, images Images, log *slog.Logger) *Server {
	s := &Server{log: log, grace: stopGrace, tracing: cfg.Tracing, observer: cfg.Observer, changing: cfg.Changing,
		names:    cfg.Names,
		requests: semaphore.NewWeighted(allRequests)}
	s.stopping, s.endStreams = context.WithCancel(context.Background())
	s.grpc = grpc.NewServer(
		grpc.MaxRecvMsgSize(MaxMessage),
		grpc.MaxSendMsgSize(MaxMessage),
		grpc.WaitForHandlers(true),
		grpc.ConnectionTimeout(handshakeTimeout),
		grpc.Creds(peerCredentials{log: log, begun: s.begun.Done}),
		grpc.ForceServerCodecV2(newCodec()),
		grpc.UnaryInterceptor(s.unary),
		grpc.StreamInterceptor(s.stream),
	)
	containers := &runtimeService{cfg: cfg, stopping: s.stopping, pods: pods, images: images, log: log}
	s.events = containers
	s.grpc.RegisterService(runtimeServiceDesc(), containers)
	runtimeapi.RegisterImageServiceServer(s.grpc, &imageService{images: images, pods: pods})
	admin.Register(s.grpc, images)
	admin.RegisterContainers(s.grpc, containers)
	admin.RegisterStarts(s.grpc, pods)
	return s
}

// Serve answers requests on l until ctx ends or l fails, and closes l. When ctx ends it accepts no
// further requests. After stopGrace it cancels the contexts of running requests. It returns nil if
// ctx ended.
func (s *Server) Serve(ctx context.Context, l net.Listener) error {
	ctx, cancel := context.WithCancel(ctx)
	var stopping, recording sync.WaitGroup
	graceful := false
	accepting := newEndingListener(l, &s.begun)
	stopping.Go(func() {
		<-ctx.Done()
		accepting.end()
		graceful = s.stop()
	})
	record, endRecord := context.WithCancel(context.Background())
	recording.Go(func() { s.events.record(record) })
	err := s.grpc.Serve(accepting)
	cancel()
	stopping.Wait()
	endRecord()
	recording.Wait()
	if err != nil {
		err = fmt.Errorf("serve CRI on %s: %w", l.Addr(), err)
	}
	return errors.Join(err, s.events.cfg.Events.close(graceful))
}

// stop ends the gRPC server. It first waits for requests, then cancels their contexts, and finally
// abandons the handlers that still run. Streams get streamGrace after the last unary request,
// because a stream whose client does not read ends only with its connection. stop reports whether
// all answers were written.
func (s *Server) stop() (graceful bool) {
	s.endStreams()
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		s.grpc.GracefulStop() // returns after Stop, too
	}()
	ctx, cancel := context.WithTimeout(context.Background(), s.grace)
	defer cancel()
	if s.requests.Acquire(ctx, allRequests) == nil {
		select {
		case <-ended:
			return true
		case <-ctx.Done():
		case <-time.After(streamGrace):
			s.log.Info("cut off clients that do not read their answers")
		}
	} else {
		s.log.Warn("cancel requests that still run", "after", s.grace)
	}
	if !within(s.grace, s.grpc.Stop) {
		s.log.Error("abandon requests that still run after their cancellation")
	}
	return false
}

// within runs f and reports whether it returned in time. It abandons a late f, because the process
// is about to end.
func within(timeout time.Duration, f func()) bool {
	done := make(chan struct{})
	go func() {
		defer close(done)
		f()
	}()
	timer := time.NewTimer(timeout)
	defer timer.Stop()
	select {
	case <-done:
		return true
	case <-timer.C:
		return false
	}
}

// runtimeService implements CRI's RuntimeService.
type runtimeService struct {
	runtimeapi.UnimplementedRuntimeServiceServer
	cfg      Config
	stopping context.Context
	pods     Sandboxes
	images   Images
	log      *slog.Logger

	unmeasured struct{ containers, pods, details lograte.Limiter } // limit warnings
}

// imageService implements CRI's ImageService.
type imageService struct {
	runtimeapi.UnimplementedImageServiceServer
	images Images
	pods   interface {
		Statistics
		RuntimeHandlers
		Traces
	}
}
