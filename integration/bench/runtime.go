package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// sleepTime marks the container's process, so that it can be told from the runtime's.
const sleepTime = "31536000"

// runtime is one CRI runtime to measure.
type runtime struct {
	name    string
	parent  string // cgroup parent of its pods; empty: its own default
	image   string
	logs    string
	version string
	daemon  int // process ID

	conn *grpc.ClientConn
	cri  runtimeapi.RuntimeServiceClient
	next int
}

// connect parses NAME=SOCKET[,CGROUP-PARENT], connects, and pulls the image.
func connect(ctx context.Context, arg, image, logs string) (*runtime, error) {
	name, socket, ok := strings.Cut(arg, "=")
	if !ok {
		return nil, fmt.Errorf("%q is not NAME=SOCKET", arg)
	}
	socket, parent, _ := strings.Cut(strings.TrimPrefix(socket, "unix://"), ",")
	r := &runtime{name: name, parent: parent, image: image, logs: logs}
	var err error
	if r.daemon, err = peer(socket); err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	r.conn, err = grpc.NewClient("unix://"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	r.cri = runtimeapi.NewRuntimeServiceClient(r.conn)
	if err := r.prepare(ctx); err != nil {
		return nil, errors.Join(fmt.Errorf("%s: %w", name, err), r.conn.Close())
	}
	return r, nil
}

func (r *runtime) prepare(ctx context.Context) error {
	v, err := r.cri.Version(ctx, &runtimeapi.VersionRequest{})
	if err != nil {
		return err
	}
	r.version = v.RuntimeVersion
	_, err = runtimeapi.NewImageServiceClient(r.conn).PullImage(ctx, &runtimeapi.PullImageRequest{Image: &runtimeapi.ImageSpec{Image: r.image}})
	return err
}

func (r *runtime) close() {
	if err := r.conn.Close(); err != nil {
		fmt.Fprintf(os.Stderr, "bench: %s: close: %v\n", r.name, err)
	}
}

// peer returns the process that listens at a unix socket.
func peer(socket string) (int, error) {
	conn, err := net.Dial("unix", socket)
	if err != nil {
		return 0, err
	}
	defer conn.Close()
	raw, err := conn.(*net.UnixConn).SyscallConn()
	if err != nil {
		return 0, err
	}
	var cred *unix.Ucred
	var credErr error
	if err := raw.Control(func(fd uintptr) { cred, credErr = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED) }); err != nil {
		return 0, err
	}
	if credErr != nil {
		return 0, os.NewSyscallError("getsockopt SO_PEERCRED", credErr)
	}
	if cred.Pid == 0 {
		return 0, fmt.Errorf("%s: its daemon is in a PID namespace that is not seen from here", socket)
	}
	return int(cred.Pid), nil
}

// podTimes are the times of one pod's start.
type podTimes struct{ sandbox, create, start time.Duration }

func (t podTimes) total() time.Duration { return t.sandbox + t.create + t.start }

// startPod starts a pod of one container on the host's network.
func (r *runtime) startPod(ctx context.Context) (id string, times podTimes, err error) {
	r.next++
	config := r.podConfig()
	if err := os.MkdirAll(config.LogDirectory, 0o755); err != nil {
		return "", times, err
	}
	begin := time.Now()
	pod, err := r.cri.RunPodSandbox(ctx, &runtimeapi.RunPodSandboxRequest{Config: config})
	if err != nil {
		return "", times, fmt.Errorf("RunPodSandbox: %w", err)
	}
	times.sandbox = time.Since(begin)
	begin = time.Now()
	c, err := r.cri.CreateContainer(ctx, &runtimeapi.CreateContainerRequest{PodSandboxId: pod.PodSandboxId, Config: r.containerConfig(), SandboxConfig: config})
	if err != nil {
		return pod.PodSandboxId, times, fmt.Errorf("CreateContainer: %w", err)
	}
	times.create = time.Since(begin)
	begin = time.Now()
	if _, err := r.cri.StartContainer(ctx, &runtimeapi.StartContainerRequest{ContainerId: c.ContainerId}); err != nil {
		return pod.PodSandboxId, times, fmt.Errorf("StartContainer: %w", err)
	}
	times.start = time.Since(begin)
	return pod.PodSandboxId, times, nil
}

// removePod removes the pod also if the benchmark was interrupted.
func (r *runtime) removePod(ctx context.Context, id string) error {
	ctx = context.WithoutCancel(ctx)
	if _, err := r.cri.StopPodSandbox(ctx, &runtimeapi.StopPodSandboxRequest{PodSandboxId: id}); err != nil {
		return fmt.Errorf("StopPodSandbox: %w", err)
	}
	if _, err := r.cri.RemovePodSandbox(ctx, &runtimeapi.RemovePodSandboxRequest{PodSandboxId: id}); err != nil {
		return fmt.Errorf("RemovePodSandbox: %w", err)
	}
	return nil
}

func (r *runtime) podConfig() *runtimeapi.PodSandboxConfig {
	name := fmt.Sprintf("bench-%d-%d", os.Getpid(), r.next)
	return &runtimeapi.PodSandboxConfig{
		Metadata:     &runtimeapi.PodSandboxMetadata{Name: name, Namespace: "bench", Uid: name},
		LogDirectory: filepath.Join(r.logs, r.name, name),
		Linux: &runtimeapi.LinuxPodSandboxConfig{
			CgroupParent:    r.parent,
			SecurityContext: &runtimeapi.LinuxSandboxSecurityContext{NamespaceOptions: namespaces()},
		},
	}
}

func (r *runtime) containerConfig() *runtimeapi.ContainerConfig {
	return &runtimeapi.ContainerConfig{
		Metadata: &runtimeapi.ContainerMetadata{Name: "sleep"},
		Image:    &runtimeapi.ImageSpec{Image: r.image},
		Command:  []string{"sleep", sleepTime},
		LogPath:  "sleep.log",
		Linux: &runtimeapi.LinuxContainerConfig{
			Resources:       &runtimeapi.LinuxContainerResources{CpuShares: 2, OomScoreAdj: 1000},
			SecurityContext: &runtimeapi.LinuxContainerSecurityContext{NamespaceOptions: namespaces()},
		},
	}
}

func namespaces() *runtimeapi.NamespaceOption {
	return &runtimeapi.NamespaceOption{Network: runtimeapi.NamespaceMode_NODE, Pid: runtimeapi.NamespaceMode_CONTAINER}
}
