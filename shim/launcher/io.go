package launcher

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"

	"golang.org/x/sys/unix"

	"berth/internal/failpoint"
	"berth/shim/proto"
)

// stdio is the container's input and output. Each file is there or nil.
type stdio struct {
	// The monitor's.
	stdin, stdout, stderr *os.File // our ends of the pipes
	console               *os.File // or the master of a terminal
	log                   *os.File
	listener              *os.File
	oom, oomNotify        *os.File // the kernel's count of OOM kills, and the eventfd for its changes
	oomParent             *os.File

	terminal bool
	theirs   ends     // the container's, closed when it has them
	socket   *os.File // where libcontainer sends the terminal's master
}

// ends are the container's ends of its streams. libcontainer's init sends the terminal's master to
// console.
type ends struct{ stdin, stdout, stderr, console *os.File }

// all returns each file once: one null device may serve as several streams.
func (e *ends) all() (files []*os.File) {
	for _, f := range []*os.File{e.stdin, e.stdout, e.stderr, e.console} {
		if f != nil && !slices.Contains(files, f) {
			files = append(files, f)
		}
	}
	return files
}

// fill sets the streams that are missing to a null device of the process's own. Without a file
// package os/exec would take the host's.
func (e *ends) fill() error {
	if e.stdin != nil && e.stdout != nil && e.stderr != nil {
		return nil
	}
	null, err := newNull()
	if err != nil {
		return err
	}
	for _, stream := range []**os.File{&e.stdin, &e.stdout, &e.stderr} {
		if *stream == nil {
			*stream = null
		}
	}
	return nil
}

// openIO opens the streams between the container's process and its monitor.
func (c *launch) openIO() (err error) {
	c.io = &stdio{}
	if _, plain := c.backend.(*pauseBackend); plain {
		return nil // pause closes its streams
	}
	if !c.Pause {
		err = c.openMonitored()
	}
	if err != nil {
		return err
	}
	return c.io.theirs.fill()
}

// openMonitored makes the streams that the monitor has the other ends of, and its socket.
func (c *launch) openMonitored() (err error) {
	if c.io.listener, err = listen(c.Dir); err != nil {
		return fmt.Errorf("socket: %w", err)
	}
	c.undo.Add("remove the socket", func() error {
		failpoint.Reach("launcher.remove-socket")
		return ignore(unix.Unlink(filepath.Join(c.Dir, proto.SocketFile)), unix.ENOENT)
	})
	if c.Terminal {
		return c.io.makeTerminal(c.Runtime == nil)
	}
	return c.io.makePipes(c.backend, c.Stdin)
}

// makeTerminal prepares the transfer of the terminal's master: libcontainer uses a socket pair, an
// OCI runtime connects to a path.
func (s *stdio) makeTerminal(library bool) (err error) {
	s.terminal = true
	if library {
		s.socket, s.theirs.console, err = socketPair("console")
	}
	return err
}

// makePipes gives the process pipes; the container's root owns its ends of them,
// also where that is another user on the host.
func (s *stdio) makePipes(b backend, withStdin bool) (err error) {
	if s.theirs.stdout, s.stdout, err = pipe("stdout"); err != nil {
		return err
	}
	if s.theirs.stderr, s.stderr, err = pipe("stderr"); err != nil {
		return err
	}
	if withStdin {
		if s.stdin, s.theirs.stdin, err = pipe("stdin"); err != nil {
			return err
		}
	}
	uid, gid, err := b.hostRoot()
	if err == nil {
		err = s.theirs.chown(uid, gid)
	}
	if err != nil {
		return fmt.Errorf("owner of stdio: %w", err)
	}
	return nil
}

// pipes returns those ends that are pipes: another one is a null device, which belongs to root
// everywhere.
func (e *ends) pipes() *ends {
	only := func(f *os.File) *os.File {
		var st unix.Stat_t
		if f == nil || unix.Fstat(int(f.Fd()), &st) != nil || st.Mode&unix.S_IFMT != unix.S_IFIFO {
			return nil
		}
		return f
	}
	return &ends{stdin: only(e.stdin), stdout: only(e.stdout), stderr: only(e.stderr)}
}

func (e *ends) chown(uid, gid int) error {
	if uid == os.Geteuid() && gid == os.Getegid() {
		return nil
	}
	for _, f := range e.all() {
		if err := f.Chown(uid, gid); err != nil {
			return err
		}
	}
	return nil
}

// receiveConsole takes the terminal that libcontainer's init has sent.
func (s *stdio) receiveConsole() (err error) {
	if s.console, err = receiveFile(s.socket); err != nil {
		return fmt.Errorf("terminal: %w", err)
	}
	err = s.socket.Close()
	s.socket = nil
	return err
}

// started closes the container's ends, so that there is no writer of its output but
// the container.
func (s *stdio) started() (err error) {
	for _, f := range s.theirs.all() {
		err = errors.Join(err, f.Close())
	}
	s.theirs = ends{}
	return err
}

// abandon closes what started has not.
func (s *stdio) abandon() {
	for _, f := range append(s.theirs.all(), s.socket, s.console) {
		if f != nil {
			_ = f.Close() // twice is harmless
		}
	}
}

// pipe returns the write end first. Blocking ends: one is the container's, and the
// monitor changes the other.
func pipe(name string) (w, r *os.File, err error) {
	var fds [2]int
	if err := unix.Pipe2(fds[:], unix.O_CLOEXEC); err != nil {
		return nil, nil, fmt.Errorf("pipe for %s: %w", name, err)
	}
	return os.NewFile(uintptr(fds[1]), name), os.NewFile(uintptr(fds[0]), name), nil
}

func socketPair(name string) (ours, theirs *os.File, err error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, nil, fmt.Errorf("socket pair for %s: %w", name, err)
	}
	return os.NewFile(uintptr(fds[0]), name), os.NewFile(uintptr(fds[1]), name), nil
}

// receiveFile takes the one file that init has sent before it reported ready.
func receiveFile(socket *os.File) (*os.File, error) {
	name := make([]byte, 4096) // init sends the terminal's path along
	oob := make([]byte, unix.CmsgSpace(4))
	_, n, _, _, err := unix.Recvmsg(int(socket.Fd()), name, oob, unix.MSG_CMSG_CLOEXEC|unix.MSG_DONTWAIT)
	if err != nil {
		return nil, os.NewSyscallError("recvmsg", err)
	}
	messages, err := unix.ParseSocketControlMessage(oob[:n])
	if err != nil {
		return nil, err
	}
	if len(messages) != 1 {
		return nil, errors.New("init sent no file")
	}
	fds, err := unix.ParseUnixRights(&messages[0])
	if err != nil {
		return nil, err
	}
	if len(fds) != 1 {
		return nil, errors.New("init sent no file")
	}
	return os.NewFile(uintptr(fds[0]), "console"), nil
}

// listen makes the monitor's socket. Its path goes through a descriptor of the
// directory, since a socket's path is limited to 107 bytes.
func listen(dir string) (_ *os.File, err error) {
	d, err := os.Open(dir)
	if err != nil {
		return nil, err
	}
	defer d.Close()
	path := "/proc/self/fd/" + strconv.Itoa(int(d.Fd())) + "/" + proto.SocketFile
	if err := unix.Unlink(path); err != nil && err != unix.ENOENT {
		return nil, os.NewSyscallError("unlink", err)
	}
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return nil, os.NewSyscallError("socket", err)
	}
	s := os.NewFile(uintptr(fd), proto.SocketFile)
	failpoint.Reach("launcher.bind")
	if err := unix.Bind(fd, &unix.SockaddrUnix{Name: path}); err != nil {
		return nil, errors.Join(os.NewSyscallError("bind", err), s.Close())
	}
	failpoint.Reach("launcher.bound")
	if err := errors.Join(unix.Chmod(path, 0o600), unix.Listen(fd, 128)); err != nil {
		return nil, errors.Join(err, unix.Unlink(path), s.Close())
	}
	failpoint.Reach("launcher.listens")
	return s, nil
}
