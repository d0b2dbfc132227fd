package stream

import (
	"log/slog"
	"net"
	"strconv"
	"testing"

	"google.golang.org/grpc/codes"

	"berth/internal/errdefs"
	"berth/internal/task"
	"berth/internal/testutil"
	"berth/sandbox/state"
	"berth/sandbox/stream/copying"
)

// targets holds containers and pods by full ID.
type targets struct {
	containers map[string]ContainerTarget
	pods       map[string]PodTarget
}

func (t targets) StreamContainer(id string) (ContainerTarget, error) {
	c, known := t.containers[id]
	if !known {
		return c, errdefs.NotFound("container %q does not exist", id)
	}
	return c, nil
}

func (t targets) StreamPod(id string) (PodTarget, error) {
	p, known := t.pods[id]
	if !known {
		return p, errdefs.NotFound("pod sandbox %q does not exist", id)
	}
	return p, nil
}

var (
	testLimits = Limits{Execs: 10, ExecsPerContainer: 3, Sessions: 4}
)

func testStreams() *Service {
	return New(targets{
		containers: map[string]ContainerTarget{
			"runs":     {ID: "runs-with-a-longer-id", PodID: "ready-with-a-longer-id", Running: true},
			"terminal": {ID: "terminal-with-a-longer-id", Running: true, Target: copying.Target{Terminal: true}},
			"ended":    {ID: "ended-with-a-longer-id"},
		},
		pods: map[string]PodTarget{"sandboxed": {ID: "sandboxed-with-a-longer-id", Ready: true, Sandboxed: true}, "ready": {ID: "ready-with-a-longer-id", Ready: true}, "stopped": {ID: "stopped-with-a-longer-id"}},
	}, nil, state.Node{}, testLimits, task.NewRunner(slog.New(slog.DiscardHandler), nil))
}

// start, attach and forward begin a session that must fail.
func start(t *testing.T, s *Service) error {
	_, _, _, err := s.StartExec(t.Context(), "runs", Command{Args: []string{"true"}}, false, true, true)
	return err
}

func attach(t *testing.T, s *Service) error {
	_, _, _, err := s.OpenAttach(t.Context(), "runs", false, false, true, true)
	return err
}

func forward(t *testing.T, s *Service, pod string, port int32) error {
	_, _, err := s.DialPort(t.Context(), pod, port)
	return err
}

// The Check methods refuse impossible sessions and return full IDs for the others.
func TestChecks(t *testing.T) {
	t.Parallel()
	s := testStreams()
	exec := func(command ...string) func(string) (string, error) {
		return func(id string) (string, error) { return s.CheckExec(id, command) }
	}
	attach := func(terminal bool) func(string) (string, error) {
		return func(id string) (string, error) { return s.CheckAttach(id, terminal) }
	}
	for name, test := range map[string]struct {
		check func(string) (string, error)
		id    string
		want  codes.Code
	}{
		"exec":                             {exec("true"), "runs", codes.OK},
		"exec in unknown container":        {exec("true"), "none", codes.NotFound},
		"exec in ended container":          {exec("true"), "ended", codes.FailedPrecondition},
		"empty exec":                       {exec(), "runs", codes.InvalidArgument},
		"exec of an empty program":         {exec("", "argument"), "runs", codes.InvalidArgument},
		"exec with a NUL byte":             {exec("echo", "a\x00b"), "runs", codes.InvalidArgument},
		"empty exec in ended container":    {exec(), "ended", codes.FailedPrecondition},
		"attach":                           {attach(false), "runs", codes.OK},
		"attach to a terminal":             {attach(true), "terminal", codes.OK},
		"attach to a missing terminal":     {attach(true), "runs", codes.InvalidArgument},
		"attach to a terminal without tty": {attach(false), "terminal", codes.InvalidArgument},
		"attach to ended container":        {attach(false), "ended", codes.FailedPrecondition},
		"attach to unknown container":      {attach(false), "none", codes.NotFound},
		"forward a port":                   {s.CheckPortForward, "ready", codes.OK},
		"forward a port of a stopped pod":  {s.CheckPortForward, "stopped", codes.FailedPrecondition},
		"forward a port of unknown pod":    {s.CheckPortForward, "none", codes.NotFound},
	} {
		t.Run(name, func(t *testing.T) {
			full, err := test.check(test.id)
			if got := errdefs.Code(err); got != test.want {
				t.Errorf("%v (%v), want %v", got, err, test.want)
			}
			if want := test.id + "-with-a-longer-id"; err == nil && full != want {
				t.Errorf("ID %q, want %q", full, want)
			}
		})
	}
}

// An invalid port is refused before any connection is opened.
func TestInvalidPortIsRefused(t *testing.T) {
	t.Parallel()
	for _, port := range []int32{-1, 0, 65536} {
		t.Run(strconv.Itoa(int(port)), func(t *testing.T) {
			if err := forward(t, testStreams(), "ready", port); errdefs.Code(err) != codes.InvalidArgument {
				t.Errorf("%v, want InvalidArgument", err)
			}
		})
	}
}

// closedPort returns a port of localhost without a listener.
func closedPort(t *testing.T) int32 {
	t.Helper()
	l, err := net.Listen("tcp", "localhost:0")
	testutil.Must(t, err)
	defer l.Close()
	return int32(l.Addr().(*net.TCPAddr).Port)
}

// For a sandboxed pod a refused connection means that the host cannot reach the pod's localhost.
func TestForwardToClosedPort(t *testing.T) {
	s := testStreams()
	port := closedPort(t)
	for pod, want := range map[string]codes.Code{"ready": codes.Unavailable, "sandboxed": codes.FailedPrecondition} {
		t.Run(pod, func(t *testing.T) {
			if err := forward(t, s, pod, port); errdefs.Code(err) != want {
				t.Errorf("%v, want %v", err, want)
			}
		})
	}
}
