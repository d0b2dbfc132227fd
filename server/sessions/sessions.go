// Package sessions is the daemon's side of exec, attach and port-forward sessions. A process of
// their own, berth-stream, has them (package process).
//
// # Contract
//
// The sessions outlive the daemon. A new daemon uses the process that it finds, if that has the
// same program and settings. Otherwise a new process takes over the listener and the unused URLs,
// and the old one ends with its last session. [Sessions] counts the sessions of all processes.
//
// The daemon begins each session and gives it away: the launcher of an exec, the connection to a
// container's monitor, the connection to a port. After the end of the process the launchers kill
// its execs, and the next session starts a new process.
package sessions

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"sync"
	"time"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/internal/failpoint"
	"berth/sandbox/stream"
	"berth/sandbox/stream/copying"
	"berth/server/sessions/certs"
	"berth/server/sessions/wire"
	"berth/shim"
	"berth/shim/running"
)

// Targets begins sessions. Package sandbox/stream documents the methods.
type Targets interface {
	StartExec(ctx context.Context, id string, command stream.Command, stdin, stdout, stderr bool) (
		process *shim.Exec, kept copying.Pipes, release func(), err error)
	OpenAttach(ctx context.Context, id string, terminal, stdin, stdout, stderr bool) (
		conn *running.Attached, target copying.Target, release func(), err error)
	DialPort(ctx context.Context, podID string, port int32) (conn *net.TCPConn, release func(), err error)
	Resume(kind, id string) (release func())
}

// Config configures the sessions.
type Config struct {
	Dir      string        // of the processes' sockets; it need not exist
	Program  string        // path of berth-stream
	Settings wire.Settings // Open sets Settings.Program
	Certs    *certs.Files  // of Settings.TLS; nil: none
	// Explain returns a function that adds the names of a pod or container to an error.
	Explain func(id string) func(error) error
	Log     *slog.Logger
}

// Sessions issues URLs and begins their sessions. It is safe for concurrent use.
type Sessions struct {
	cfg      Config
	targets  Targets
	ctx      context.Context
	cancel   context.CancelFunc
	owned    sync.WaitGroup
	starting chan struct{} // capacity 1: full while a process is started

	mu sync.Mutex
	// +checklocks:mu
	active *peer // issues URLs; nil: none has started
	// +checklocks:mu
	failure error // of the last start; nil: it succeeded
	// +checklocks:mu
	failed time.Time
}

// Open connects to the processes of earlier daemons. The first URL starts a process if there is
// none.
func Open(cfg Config, targets Targets) (*Sessions, error) {
	if err := os.MkdirAll(cfg.Dir, 0o700); err != nil {
		return nil, fmt.Errorf("create directory of sessions: %w", err)
	}
	var err error
	if cfg.Settings.Program, err = identify(cfg.Program); err != nil {
		return nil, err
	}
	s := &Sessions{cfg: cfg, targets: targets, starting: make(chan struct{}, 1)}
	s.ctx, s.cancel = context.WithCancel(context.Background())
	sockets, err := filepath.Glob(filepath.Join(cfg.Dir, "*"+suffix))
	if err != nil {
		return nil, fmt.Errorf("find processes of sessions: %w", err)
	}
	for _, path := range sockets {
		s.resumeSoon(filepath.Base(path))
	}
	return s, nil
}

// Close leaves the processes. Their sessions continue.
func (s *Sessions) Close() error {
	s.cancel()
	s.owned.Wait()
	return nil
}

// ExecWith returns the URL of a session that runs a command. The caller has checked the request.
// The error is ResourceExhausted if too many URLs are unused, and Unavailable if no process starts.
func (s *Sessions) ExecWith(req *runtimeapi.ExecRequest, options stream.ExecOptions) (string, error) {
	encoded, err := json.Marshal(options)
	if err != nil {
		return "", fmt.Errorf("encode options of exec: %w", err)
	}
	return s.offer(wire.Session{Kind: wire.Exec, ID: req.GetContainerId(), Command: req.GetCmd(), Options: encoded,
		TTY: req.GetTty(), Stdin: req.GetStdin(), Stdout: req.GetStdout(), Stderr: req.GetStderr()})
}

// Attach returns the URL of a session that attaches to a container. It has the errors of ExecWith.
func (s *Sessions) Attach(req *runtimeapi.AttachRequest) (string, error) {
	return s.offer(wire.Session{Kind: wire.Attach, ID: req.GetContainerId(),
		TTY: req.GetTty(), Stdin: req.GetStdin(), Stdout: req.GetStdout(), Stderr: req.GetStderr()})
}

// PortForward returns the URL of a session that forwards ports. It has the errors of ExecWith, and
// InvalidArgument for too many ports.
func (s *Sessions) PortForward(req *runtimeapi.PortForwardRequest) (string, error) {
	return s.offer(wire.Session{Kind: wire.PortForward, ID: req.GetPodSandboxId(), Ports: req.GetPort()})
}

// begin begins a session and sends it with the answer. The caller calls release after the session.
func (s *Sessions) begin(ctx context.Context, o *wire.Open, send func(wire.Answer, ...*os.File) error) (
	release func(), err error) {
	switch o.Kind {
	case wire.Exec:
		return s.beginExec(ctx, o, send)
	case wire.Attach:
		return s.beginAttach(ctx, o, send)
	}
	conn, release, err := s.targets.DialPort(ctx, o.ID, o.Port)
	if err != nil {
		return nil, err
	}
	return give(conn, release, func(f *os.File) error { return send(wire.Answer{}, f) })
}

func (s *Sessions) beginExec(ctx context.Context, o *wire.Open, send func(wire.Answer, ...*os.File) error) (
	release func(), err error) {
	command := stream.Command{Args: o.Command, Terminal: o.TTY}
	if err := json.Unmarshal(o.Options, &command.Options); err != nil {
		return nil, fmt.Errorf("decode options of exec: %w", err)
	}
	process, kept, release, err := s.targets.StartExec(ctx, o.ID, command, o.Stdin, o.Stdout, o.Stderr)
	if err != nil {
		return nil, err
	}
	defer kept.Close()
	var a wire.Answer
	var files []*os.File
	for i, f := range kept {
		if f != nil {
			a.Kept |= 1 << i
			files = append(files, f)
		}
	}
	err = process.HandOver(func(r running.Record, more []*os.File) error {
		a.Exec = &r
		return send(a, append(files, more...)...)
	})
	if err != nil {
		release()
		return nil, err
	}
	return release, nil
}

func (s *Sessions) beginAttach(ctx context.Context, o *wire.Open, send func(wire.Answer, ...*os.File) error) (
	release func(), err error) {
	conn, target, release, err := s.targets.OpenAttach(ctx, o.ID, o.TTY, o.Stdin, o.Stdout, o.Stderr)
	if err != nil {
		return nil, err
	}
	if conn == nil {
		if err := send(wire.Answer{}); err != nil {
			release()
			return nil, err
		}
		return release, nil
	}
	a := wire.Answer{Attach: &wire.Attached{Target: target, In: conn.In, AnnouncesEnd: conn.AnnouncesEnd}}
	return give(conn.UnixConn, release, func(f *os.File) error { return send(a, f) })
}

// give sends a connection to the process and closes it here.
func give(conn interface {
	File() (*os.File, error)
	Close() error
}, release func(), send func(*os.File) error) (func(), error) {
	f, err := conn.File()
	if err == nil {
		failpoint.Reach("sessions.give")
		err = errors.Join(send(f), f.Close())
		failpoint.Reach("sessions.given")
	}
	if err := errors.Join(err, conn.Close()); err != nil {
		release()
		return nil, fmt.Errorf("give away a session: %w", err)
	}
	return release, nil
}
