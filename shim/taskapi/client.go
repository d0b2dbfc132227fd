package taskapi

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"strings"
	"time"

	task "github.com/containerd/containerd/api/runtime/task/v3"
	"github.com/containerd/ttrpc"
	specs "github.com/opencontainers/runtime-spec/specs-go"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"
	"google.golang.org/protobuf/types/known/emptypb"
)

// namespace is containerd's namespace of all tasks.
const namespace = "berth"

// Timeouts of the calls to a shim.
const (
	connectTimeout = 5 * time.Second
	createTimeout  = 2 * time.Minute // a virtual machine boots
	callTimeout    = 10 * time.Second
	// A daemon gives a runtime ten seconds to kill or delete a container. A shim that does not
	// answer must be killed within that time.
	endTimeout      = 3 * time.Second
	shutdownTimeout = 5 * time.Second
	deleteTimeout   = 5 * time.Second // of the shim's command delete
)

// errUnanswered says that a shim did not answer in time, or that its connection ended.
var errUnanswered = errors.New("the shim does not answer")

// client calls the task service of a shim. The messages of its versions 2 and 3 are the same.
type client struct {
	rpc     *ttrpc.Client
	service string
}

// connect connects to a shim's socket. The error wraps errUnanswered.
func connect(ctx context.Context, address string, version int32) (*client, error) {
	ctx, cancel := context.WithTimeout(ctx, connectTimeout)
	defer cancel()
	conn, err := (&net.Dialer{}).DialContext(ctx, "unix", strings.TrimPrefix(address, "unix://"))
	if err != nil {
		return nil, fmt.Errorf("%w: %w", errUnanswered, err)
	}
	return &client{rpc: ttrpc.NewClient(conn), service: fmt.Sprintf("containerd.task.v%d.Task", version)}, nil
}

func (c *client) close() error { return c.rpc.Close() }

// call calls a method. A timeout of zero means no limit. The error wraps errUnanswered if the shim
// did not answer.
func (c *client) call(
	ctx context.Context, timeout time.Duration, method string, request, response proto.Message,
) error {
	if timeout > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, timeout)
		defer cancel()
	}
	ctx = ttrpc.WithMetadata(ctx, ttrpc.MD{"containerd-namespace-ttrpc": {namespace}})
	err := c.rpc.Call(ctx, c.service, method, request, response)
	switch {
	case err == nil:
		return nil
	case errors.Is(err, ttrpc.ErrClosed), ctx.Err() != nil: // an answer may be DeadlineExceeded, too
		return fmt.Errorf("%s: %w: %w", method, errUnanswered, err)
	}
	if s, ok := status.FromError(err); ok {
		return &callError{method: method, code: s.Code(), message: s.Message()}
	}
	return fmt.Errorf("%s: %w", method, err)
}

// callError is an error that a shim answered.
type callError struct {
	method  string
	code    codes.Code
	message string
}

func (e *callError) Error() string { return strings.ToLower(e.method) + ": " + e.message }

// isGone reports whether a shim answered that it has no such task, or that its process has ended.
func isGone(err error) bool {
	var said *callError
	return errors.As(err, &said) &&
		(said.code == codes.NotFound || strings.Contains(said.message, "process already finished"))
}

func (c *client) do(ctx context.Context, method string, request proto.Message) error {
	return c.call(ctx, callTimeout, method, request, &emptypb.Empty{})
}

func (c *client) create(ctx context.Context, request *task.CreateTaskRequest) (pid int, err error) {
	var created task.CreateTaskResponse
	err = c.call(ctx, createTimeout, "Create", request, &created)
	return int(created.Pid), err
}

func (c *client) start(ctx context.Context, id, exec string) (pid int, err error) {
	var started task.StartResponse
	err = c.call(ctx, createTimeout, "Start", &task.StartRequest{ID: id, ExecID: exec}, &started)
	return int(started.Pid), err
}

// shimPID returns the shim's process.
func (c *client) shimPID(ctx context.Context, id string) (int, error) {
	var connected task.ConnectResponse
	err := c.call(ctx, callTimeout, "Connect", &task.ConnectRequest{ID: id}, &connected)
	return int(connected.ShimPid), err
}

// addProcess adds a process to a task. Start starts it.
func (c *client) addProcess(ctx context.Context, request *task.ExecProcessRequest, process *specs.Process) error {
	data, err := json.Marshal(process)
	if err != nil {
		return err
	}
	request.Spec = &anypb.Any{TypeUrl: "types.containerd.io/opencontainers/runtime-spec/1/Process", Value: data}
	return c.do(ctx, "Exec", request)
}

// update changes the limits of a task.
func (c *client) update(ctx context.Context, id string, resources []byte) error {
	return c.do(ctx, "Update", &task.UpdateTaskRequest{ID: id, Resources: &anypb.Any{
		TypeUrl: "types.containerd.io/opencontainers/runtime-spec/1/LinuxResources", Value: resources}})
}

// wait waits for a process and returns its exit code, which is 128+signal after a signal.
func (c *client) wait(ctx context.Context, id, exec string) (code int, err error) {
	var exited task.WaitResponse
	err = c.call(ctx, 0, "Wait", &task.WaitRequest{ID: id, ExecID: exec}, &exited)
	return int(exited.ExitStatus), err
}

func (c *client) kill(ctx context.Context, id, exec string, signal uint32, all bool) error {
	request := &task.KillRequest{ID: id, ExecID: exec, Signal: signal, All: all}
	return c.call(ctx, endTimeout, "Kill", request, &emptypb.Empty{})
}

func (c *client) delete(ctx context.Context, id, exec string) error {
	return c.call(ctx, endTimeout, "Delete", &task.DeleteRequest{ID: id, ExecID: exec}, &task.DeleteResponse{})
}

// shutdown makes a shim without tasks remove the rest of its sandbox, such as a virtual machine,
// and exit. Many shims exit without an answer.
func (c *client) shutdown(ctx context.Context, id string) error {
	err := c.call(ctx, shutdownTimeout, "Shutdown", &task.ShutdownRequest{ID: id}, &emptypb.Empty{})
	if errors.Is(err, errUnanswered) {
		return nil // it is killed next
	}
	return err
}
