package sessions

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"berth/internal/coded"
	"berth/internal/errdefs"
	"berth/internal/failpoint"
	"berth/internal/pidfd"
	"berth/server/sessions/wire"
	"berth/shim/proto"
)

const (
	suffix = ".sock"
	// callTimeout bounds the answer of a process.
	callTimeout = 10 * time.Second
	// greetTimeout bounds the first answer of a process that runs already. It delays the daemon's
	// start.
	greetTimeout = time.Second
	// resumePause is the time between two attempts to connect to a process, or to start one.
	resumePause = time.Second
)

// peer is a process of sessions.
type peer struct {
	socket  string // name in Config.Dir
	conn    *proto.Conn
	welcome wire.Welcome
}

// identify returns a string that differs for another version of a program.
func identify(program string) (string, error) {
	info, err := os.Stat(program)
	if err != nil {
		return "", fmt.Errorf("program of sessions: %w", err)
	}
	st := info.Sys().(*syscall.Stat_t)
	return fmt.Sprint(st.Dev, " ", st.Ino, " ", st.Size, " ", st.Mtim.Nano()), nil
}

// resumeSoon connects to a process. If that fails, it tries again in the background until the
// process has ended.
func (s *Sessions) resumeSoon(socket string) {
	s.starting <- struct{}{}
	err := s.resume(socket)
	<-s.starting
	if err == nil {
		return
	}
	s.cfg.Log.Warn("connect to a process of sessions; berth tries again", "socket", socket, "error", err)
	s.owned.Go(func() {
		for err != nil {
			select {
			case <-time.After(resumePause):
			case <-s.ctx.Done():
				return
			}
			s.starting <- struct{}{}
			err = s.resume(socket)
			<-s.starting
		}
	})
}

// resume connects to the process of an earlier daemon. A process with another program or other
// settings is replaced. The caller has filled s.starting.
func (s *Sessions) resume(socket string) error {
	p, err := s.connect(socket, wire.Hello{Settings: s.cfg.Settings}, nil, greetTimeout)
	if errors.Is(err, unix.ECONNREFUSED) || errors.Is(err, unix.ENOENT) { // it has ended
		return s.removeSocket(socket)
	}
	if err != nil || p.welcome.Retired {
		return err
	}
	if p.welcome.Settings == s.cfg.Settings && s.current() == nil {
		s.use(p)
		return nil
	}
	a, files, err := p.call(wire.Request{Retire: true})
	if err == nil {
		err = a.Err()
	}
	if err != nil {
		// It still listens. The end of the connection makes serve connect again.
		return errors.Join(fmt.Errorf("take over from the process of sessions: %w", err), p.conn.Interrupt())
	}
	s.cfg.Log.Info("another process serves new sessions, the old one ends with its last session",
		"sessions", p.welcome.Sessions)
	if p.welcome.Settings.Address != s.cfg.Settings.Address || len(files) != 1 || s.current() != nil {
		return wire.CloseAll(files)
	}
	next, err := s.start(a.Tokens, files[0])
	if err != nil {
		return errors.Join(err, files[0].Close())
	}
	s.use(next)
	return files[0].Close()
}

func (s *Sessions) removeSocket(socket string) error {
	failpoint.Reach("sessions.remove-socket")
	err := os.Remove(filepath.Join(s.cfg.Dir, socket))
	failpoint.Reach("sessions.socket-removed")
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("remove the socket of a process: %w", err)
	}
	return nil
}

func (s *Sessions) current() *peer {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.active
}

func (s *Sessions) use(p *peer) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.active = p
}

// offer returns the URL of a session.
func (s *Sessions) offer(session wire.Session) (string, error) {
	s.cfg.Certs.Valid() // so that the next process gets this content if the files are invalid then
	for try := 1; ; try++ {
		p, err := s.ready()
		if err != nil {
			return "", errdefs.Unavailable("%s: %w", session.Kind, err)
		}
		a, _, err := p.call(wire.Request{Offer: &session})
		if err == nil {
			return a.URL, a.Err()
		}
		if !wire.Ended(err) || try == 2 {
			return "", errdefs.Unavailable("%s: %w", session.Kind, err)
		}
		s.drop(p)
	}
}

// ready returns the process that issues URLs. It starts one if there is none.
func (s *Sessions) ready() (*peer, error) {
	s.starting <- struct{}{}
	defer func() { <-s.starting }()
	if p := s.current(); p != nil {
		return p, nil
	}
	if err := s.recentFailure(); err != nil {
		return nil, err
	}
	p, err := s.start(nil, nil)
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.failure, s.failed = err, time.Now(); err == nil {
		s.active = p
	}
	return p, err
}

// recentFailure returns the error of a start that has just failed. Calls that have waited for that
// start do not try again one after another.
func (s *Sessions) recentFailure() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if time.Since(s.failed) < resumePause {
		return s.failure
	}
	return nil
}

// drop forgets a process that has ended.
func (s *Sessions) drop(p *peer) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.active == p {
		s.active = nil
	}
}

// start starts a process. It takes over the tokens and the listener, unless that is nil.
func (s *Sessions) start(tokens []wire.Token, listener *os.File) (*peer, error) {
	dir, err := os.Open(s.cfg.Dir)
	if err != nil {
		return nil, fmt.Errorf("start berth-stream: %w", err)
	}
	defer dir.Close()
	socket := rand.Text()[:12] + suffix
	failpoint.Reach("sessions.start")
	l, err := net.ListenUnix("unix", addressIn(dir, socket))
	if err != nil {
		return nil, fmt.Errorf("start berth-stream: %w", err)
	}
	l.SetUnlinkOnClose(false)
	file, err := l.File()
	if err == nil {
		err = errors.Join(s.spawn(file), file.Close())
	}
	failpoint.Reach("sessions.started")
	if err := errors.Join(err, l.Close()); err != nil {
		return nil, errors.Join(fmt.Errorf("start berth-stream: %w", err), s.removeSocket(socket))
	}
	hello := wire.Hello{Settings: s.cfg.Settings, Tokens: tokens, PEM: s.cfg.Certs.Valid()}
	p, err := s.connect(socket, hello, listener, callTimeout)
	if err != nil { // without a daemon it ends
		return nil, errors.Join(err, s.removeSocket(socket))
	}
	return p, nil
}

// addressIn returns the address of a socket through a descriptor of its directory, since a socket's
// path is limited to 107 bytes.
func addressIn(dir *os.File, name string) *net.UnixAddr {
	return &net.UnixAddr{Name: "/proc/self/fd/" + strconv.Itoa(int(dir.Fd())) + "/" + name, Net: "unix"}
}

// spawn starts the program with its socket. The process has few threads and a small heap.
func (s *Sessions) spawn(socket *os.File) error {
	null, err := os.OpenFile(os.DevNull, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer null.Close()
	fd := -1
	proc, err := os.StartProcess(s.cfg.Program, []string{"berth-stream"}, &os.ProcAttr{
		Files: []*os.File{null, null, os.Stderr, socket},
		Env:   append([]string{"GOGC=25", "GOMAXPROCS=2"}, failpoint.Env()...),
		Sys:   &syscall.SysProcAttr{Setsid: true, PidFD: &fd},
		Dir:   "/",
	})
	if err != nil {
		return err
	}
	if err := proc.Release(); err != nil {
		return err
	}
	process, err := pidfd.FromFD(fd)
	if err != nil {
		return err
	}
	s.owned.Go(func() {
		defer process.Close()
		_ = pidfd.Wait(s.ctx, process) // after the daemon's end, init reaps it
	})
	return nil
}

// connect greets a process and begins to serve it. It counts the process's sessions.
func (s *Sessions) connect(socket string, hello wire.Hello, listener *os.File, timeout time.Duration) (*peer, error) {
	dir, err := os.Open(s.cfg.Dir)
	if err != nil {
		return nil, err
	}
	defer dir.Close()
	c, err := net.DialUnix("unix", nil, addressIn(dir, socket))
	if err != nil {
		return nil, err
	}
	f, err := c.File()
	if err := errors.Join(err, c.Close()); err != nil {
		return nil, err
	}
	p := &peer{socket: socket}
	if p.conn, err = proto.NewConn(f); err != nil {
		return nil, err
	}
	if err := s.greet(p, hello, listener, timeout); err != nil {
		return nil, errors.Join(fmt.Errorf("greet berth-stream: %w", err), p.conn.Close())
	}
	s.owned.Go(func() { s.serve(p) })
	return p, nil
}

func (s *Sessions) greet(p *peer, hello wire.Hello, listener *os.File, timeout time.Duration) error {
	var files []*os.File
	if listener != nil {
		files = append(files, listener)
	}
	err := p.conn.SetDeadline(time.Now().Add(timeout))
	if err == nil {
		err = p.conn.Send(hello, files...)
	}
	if err == nil {
		_, err = p.conn.Receive(&p.welcome)
	}
	if err == nil && p.welcome.Error != "" {
		err = errors.New(p.welcome.Error)
	}
	for i := 0; i < p.welcome.Sessions && err == nil; i++ {
		err = s.next(p)
	}
	return errors.Join(err, p.conn.SetDeadline(time.Time{}))
}

// serve begins the sessions of a process until its end. After an error of the connection it
// connects again.
func (s *Sessions) serve(p *peer) {
	defer context.AfterFunc(s.ctx, func() { _ = p.conn.Interrupt() })()
	var err error
	for err == nil {
		err = s.next(p)
	}
	s.drop(p)
	_ = p.conn.Close() // it carries no more data
	if s.ctx.Err() != nil {
		return
	}
	s.cfg.Log.Info("the connection to a process of sessions has ended", "reason", err)
	s.resumeSoon(p.socket)
}

// next receives a request and serves it until the session's end.
func (s *Sessions) next(p *peer) error {
	r, reply, err := wire.Receive(p.conn)
	switch {
	case err != nil:
		return err
	case r.Open == nil, s.ctx.Err() != nil: // of a later version, or for the next daemon
		return reply.Close()
	case r.Open.Running:
		release := s.targets.Resume(r.Open.Kind, r.Open.ID)
		s.owned.Go(func() { s.hold(reply, s.watch(reply, func() {}), release) })
	default:
		s.owned.Go(func() { s.open(r.Open, reply) })
	}
	return nil
}

// open begins a session, and counts it until its end.
func (s *Sessions) open(o *wire.Open, reply *proto.Conn) {
	ctx, cancel := context.WithCancel(s.ctx)
	defer cancel()
	gone := s.watch(reply, cancel)
	explain := s.cfg.Explain(o.ID) // before the container may be removed
	release, err := s.begin(ctx, o, func(a wire.Answer, files ...*os.File) error { return reply.Send(a, files...) })
	if err != nil {
		err = explain(err)
		release = func() {}
		s.cfg.Log.Debug("session refused", "kind", o.Kind, "id", o.ID, "error", err)
		if s.ctx.Err() == nil { // otherwise the process asks the next daemon
			// The client may have left.
			_ = reply.Send(wire.Answer{Error: &wire.Error{Code: coded.Code(errdefs.Code(err)), Text: err.Error()}})
		}
	}
	s.hold(reply, gone, release)
}

// watch calls do and closes gone at the end of a session's connection.
func (s *Sessions) watch(reply *proto.Conn, do func()) (gone <-chan struct{}) {
	ended := make(chan struct{})
	s.owned.Go(func() {
		defer close(ended)
		defer do()
		defer context.AfterFunc(s.ctx, func() { _ = reply.Interrupt() })()
		_, _ = reply.Receive(&struct{}{}) // the process sends nothing
	})
	return ended
}

// hold counts a session until its end.
func (s *Sessions) hold(reply *proto.Conn, gone <-chan struct{}, release func()) {
	<-gone
	release()
	_ = reply.Close() // it carries no more data
}

// call sends a request and waits for the answer.
func (p *peer) call(r wire.Request) (a wire.Answer, files []*os.File, err error) {
	reply, err := wire.Send(p.conn, r)
	if err != nil {
		if !wire.Ended(err) { // part of the request may be sent: serve connects again
			err = errors.Join(err, p.conn.Interrupt())
		}
		return a, nil, err
	}
	defer reply.Close()
	if err := reply.SetDeadline(time.Now().Add(callTimeout)); err != nil {
		return a, nil, err
	}
	files, err = reply.Receive(&a)
	return a, files, err
}
