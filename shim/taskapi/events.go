package taskapi

import (
	"context"
	"errors"
	"io/fs"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"syscall"
	"time"

	task "github.com/containerd/containerd/api/runtime/task/v3"
	events "github.com/containerd/containerd/api/services/ttrpc/events/v1"
	"github.com/containerd/ttrpc"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/emptypb"

	"berth/internal/failpoint"
	"berth/internal/pidfd"
)

// Files in a task's directory that tell what the shim has reported of the task.
const (
	oomFile  = "oom"  // it killed a process of the task because memory ran out
	exitFile = "exit" // the task has ended; an OOM kill was reported before or is about to be
)

// eventSocket is where a shim sends its events. The path is short enough for a socket.
func (r *record) eventSocket() string { return filepath.Join(socketDir, "events-"+r.Sandbox) }

// startWatch starts a copy of this program that receives the events of a shim, which is started
// next. A shim may wait or end if nobody receives them. So the copy lives as long as the shim, in
// the shim's cgroup.
func (c *command) startWatch(r *record) error {
	failpoint.Reach("task.make-event-socket")
	if err := os.MkdirAll(socketDir, 0o711); err != nil {
		return err
	}
	listener, err := net.ListenUnix("unix", &net.UnixAddr{Name: r.eventSocket(), Net: "unix"})
	if err != nil {
		return err
	}
	failpoint.Reach("task.event-socket-made")
	f, err := listener.File() // the socket stays, because the listener is not closed
	if err != nil {
		return err
	}
	defer f.Close()
	cmd := exec.Command("/proc/self/exe", append(slices.Clone(c.global), "watch", r.Sandbox)...)
	cmd.Args[0] = os.Args[0]
	cmd.ExtraFiles = []*os.File{f}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	failpoint.Reach("task.start-watch")
	err = cmd.Start()
	failpoint.Reach("task.watch-started")
	return err
}

// watchPause is the time between two looks for the shim's process, which is known late.
const watchPause = time.Second

// watch receives the events of the pod's shim on the socket listenFD until the shim has ended.
func (c *command) watch(ctx context.Context) error {
	listener, err := net.FileListener(os.NewFile(listenFD, "events"))
	if err != nil {
		return err
	}
	server, err := ttrpc.NewServer()
	if err != nil {
		return err
	}
	events.RegisterTTRPCEventsService(server, &c.pod)
	go func() { _ = server.Serve(ctx, listener) }() // until this process ends
	for ; ; time.Sleep(watchPause) {
		r, err := c.readRecord()
		if err != nil {
			return err // the pod was removed
		}
		if r.PID == 0 {
			continue
		}
		process, err := pidfd.OpenVerified(r.PID, r.StartTime)
		if err != nil {
			return err
		}
		return pidfd.Wait(ctx, process)
	}
}

// Forward receives an event of the pod's shim. The relevant events begin with the fields of a
// WaitRequest: the container's ID and, for an exit, the process's ID.
func (p *pod) Forward(_ context.Context, request *events.ForwardRequest) (*emptypb.Empty, error) {
	var of task.WaitRequest
	file := map[string]string{"/tasks/oom": oomFile, "/tasks/exit": exitFile}[request.GetEnvelope().GetTopic()]
	if err := proto.Unmarshal(request.GetEnvelope().GetEvent().GetValue(), &of); file == "" || err != nil {
		return &emptypb.Empty{}, nil // of no interest
	}
	if of.ExecID != "" && of.ExecID != of.ID { // an exec has ended
		return &emptypb.Empty{}, nil
	}
	return &emptypb.Empty{}, p.mark(of.ID, file)
}

// mark makes a file in a task's directory. A virtual machine has chosen the ID, so it may be any.
func (p *pod) mark(id, name string) error {
	known, err := p.tasks()
	if err != nil || !slices.Contains(known, id) {
		return err
	}
	failpoint.Reach("task.mark")
	err = os.WriteFile(filepath.Join(p.taskDir(id), name), nil, 0o600)
	failpoint.Reach("task.marked")
	if errors.Is(err, fs.ErrNotExist) { // the task has just been deleted
		return nil
	}
	return err
}

// The time in which the events of a killed task must arrive, and how long after its exit an OOM
// kill may still be reported.
const (
	eventTimeout = time.Second
	oomTimeout   = 100 * time.Millisecond
	eventPause   = 10 * time.Millisecond
)

// oomKilled returns whether the pod's shim reports an OOM kill of a task that has ended.
func (c *command) oomKilled(id string, code int) bool {
	has := func(name string) bool { return exists(filepath.Join(c.taskDir(id), name)) }
	r, err := c.readRecord()
	if err != nil || code != killed || !exists(r.eventSocket()) {
		return has(oomFile)
	}
	limit := time.Now().Add(eventTimeout)
	for exited := false; !has(oomFile) && time.Now().Before(limit); time.Sleep(eventPause) {
		if !exited && has(exitFile) {
			exited, limit = true, time.Now().Add(oomTimeout)
		}
	}
	return has(oomFile)
}
