package subject

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// Subject is one CRI runtime to measure.
type Subject struct {
	Column string // of the table
	// BuiltInNetwork: the runtime makes the pods' network itself, without plugins.
	BuiltInNetwork bool
	// Twin marks a runtime that shares its daemon with an earlier one. Rows about the daemon or
	// images omit it.
	Twin    bool
	Version string
	Pid     int     // process ID of the daemon
	Root    string  // directory of the images; empty: unknown
	Daemon  *Daemon // nil: the benchmark did not start it

	Image   string // image of its containers
	Command []string

	with    string   // addition to its version: OCI runtime or commit
	parent  string   // cgroup parent of its pods
	cgroups []string // cgroups of the runtime and its pods; none contains another
	logs    string   // directory of its pods' logs
	state   string   // berth's state directory; empty: another runtime

	counters *counters // of instructions; nil: not yet asked for

	conn   *grpc.ClientConn
	cri    runtimeapi.RuntimeServiceClient
	images runtimeapi.ImageServiceClient
	next   atomic.Int32
}

// workMark is an argument of all containers. It distinguishes them from the runtime's processes.
const workMark = "31536000"

// TermWaiter is the name of berth's pause in images: a program that sleeps until SIGTERM.
const TermWaiter = "await-term"

// Workload is the container that pods consist of.
type Workload struct {
	Image string // with sh, sleep and true
	// Command exits on SIGTERM. If it is empty, a waiting shell is used.
	Command []string
}

func (w Workload) command() []string {
	if len(w.Command) > 0 {
		return append(w.Command[:len(w.Command):len(w.Command)], workMark)
	}
	return []string{"sh", "-c", `trap "exit 0" TERM; sleep ` + workMark + ` & wait`}
}

// maxMessage is kubelet's limit for the size of an answer.
const maxMessage = 16 << 20

// External connects to a runtime that already runs. arg is NAME=SOCKET[,CGROUP-PARENT[,ROOT]]: the
// parent of its pods' cgroups (default: the machine's) and the directory of its images.
func External(ctx context.Context, arg, machine, logs string, work Workload) (*Subject, error) {
	name, socket, ok := strings.Cut(arg, "=")
	if !ok || name == "" {
		return nil, fmt.Errorf("%q is not NAME=SOCKET", arg)
	}
	socket, rest, _ := strings.Cut(strings.TrimPrefix(socket, "unix://"), ",")
	parent, root, _ := strings.Cut(rest, ",")
	s := &Subject{Column: name, Root: root, parent: parent, logs: filepath.Join(logs, name), Image: work.Image, Command: work.command()}
	if err := s.connect(ctx, socket); err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	if err := s.findCgroups(ctx, machine); err != nil {
		s.close()
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	return s, nil
}

// findCgroups finds the cgroup of an external runtime and chooses the cgroup of its pods.
func (s *Subject) findCgroups(ctx context.Context, machine string) error {
	config, err := s.cri.RuntimeConfig(ctx, &runtimeapi.RuntimeConfigRequest{})
	systemd := err == nil && config.GetLinux().GetCgroupDriver() == runtimeapi.CgroupDriver_SYSTEMD
	pods := s.parent
	switch {
	case s.parent == "" && systemd:
		s.parent, pods = "berthbench.slice", "/berthbench.slice"
	case s.parent == "":
		s.parent = filepath.Join("/", machine, s.Column)
		pods = s.parent
	case systemd:
		pods = "" // a slice may be anywhere in the tree
	}
	own, err := cgroupOf(s.Pid)
	if err != nil {
		return err
	}
	// The root cgroup counts the whole machine. Without the pods' cgroup, only half of the runtime
	// would be counted.
	if own == "/" || pods == "" {
		return nil
	}
	s.cgroups = []string{own}
	if !strings.HasPrefix(pods+"/", own+"/") {
		s.cgroups = append(s.cgroups, pods)
	}
	return nil
}

// cgroupOf returns the path of a process's cgroup in the hierarchy that counts CPU time.
func cgroupOf(pid int) (string, error) {
	content, err := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", pid))
	if err != nil {
		return "", err
	}
	for line := range strings.Lines(string(content)) {
		fields := strings.SplitN(strings.TrimSpace(line), ":", 3)
		if len(fields) == 3 && (Cgroup2() && fields[0] == "0" || strings.Contains(","+fields[1]+",", ",cpuacct,")) {
			return fields[2], nil
		}
	}
	return "", fmt.Errorf("process %d has no cgroup that counts CPU time", pid)
}

// connect opens the connection and reads the runtime's name and version.
func (s *Subject) connect(ctx context.Context, socket string) error {
	var err error
	if s.conn == nil {
		s.conn, err = grpc.NewClient("unix://"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()),
			grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(maxMessage)))
		if err != nil {
			return err
		}
		s.cri, s.images = runtimeapi.NewRuntimeServiceClient(s.conn), runtimeapi.NewImageServiceClient(s.conn)
	}
	if s.Pid, err = peer(socket); err != nil {
		return err
	}
	v, err := s.cri.Version(ctx, &runtimeapi.VersionRequest{})
	if err != nil {
		return fmt.Errorf("call Version: %w", err)
	}
	s.Version = strings.TrimSuffix(v.RuntimeName+" "+strings.TrimPrefix(v.RuntimeVersion, "v"), "+unknown")
	if s.with != "" {
		s.Version += ", " + s.with
	}
	return nil
}

func (s *Subject) close() {
	if err := s.conn.Close(); err != nil {
		fmt.Fprintf(os.Stderr, "bench: %s: close: %v\n", s.Column, err)
	}
}

// Close stops the daemon, if the benchmark started it, and closes the connection.
func (s *Subject) Close() error {
	s.close()
	if s.Daemon == nil {
		return nil
	}
	return s.Daemon.stop()
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
		return 0, fmt.Errorf("%s: the daemon's PID namespace is not visible", socket)
	}
	return int(cred.Pid), nil
}

// Pull pulls an image and returns the duration.
func (s *Subject) Pull(ctx context.Context, image string) (time.Duration, error) {
	begin := time.Now()
	_, err := s.images.PullImage(ctx, &runtimeapi.PullImageRequest{Image: &runtimeapi.ImageSpec{Image: image}})
	if err != nil {
		return 0, fmt.Errorf("PullImage: %w", err)
	}
	return time.Since(begin), nil
}

// RemoveImage removes an image and returns the duration.
func (s *Subject) RemoveImage(ctx context.Context, image string) (time.Duration, error) {
	begin := time.Now()
	_, err := s.images.RemoveImage(ctx, &runtimeapi.RemoveImageRequest{Image: &runtimeapi.ImageSpec{Image: image}})
	if err != nil {
		return 0, fmt.Errorf("RemoveImage: %w", err)
	}
	return time.Since(begin), nil
}

// PullWorkload pulls the image of the pods.
func (s *Subject) PullWorkload(ctx context.Context) error {
	_, err := s.Pull(ctx, s.Image)
	return err
}

// Clean removes all pods of the benchmark, and returns an error for each pod that is left.
func (s *Subject) Clean(ctx context.Context) error {
	pods, err := s.cri.ListPodSandbox(ctx, &runtimeapi.ListPodSandboxRequest{Filter: &runtimeapi.PodSandboxFilter{LabelSelector: labels()}})
	if err != nil {
		return fmt.Errorf("ListPodSandbox: %w", err)
	}
	var group errgroup.Group
	group.SetLimit(8)
	errs := make([]error, len(pods.Items))
	for i, p := range pods.Items {
		group.Go(func() error {
			errs[i] = (&Pod{s: s, ID: p.Id}).Remove(ctx)
			return errs[i]
		})
	}
	if group.Wait() == nil { // otherwise errs has all errors
		return nil
	}
	return errors.Join(errs...)
}

// labels marks the benchmark's pods.
func labels() map[string]string { return map[string]string{"berth-bench": fmt.Sprint(os.Getpid())} }
