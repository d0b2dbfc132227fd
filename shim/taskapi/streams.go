package taskapi

import (
	"context"
	"errors"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	task "github.com/containerd/containerd/api/runtime/task/v3"
)

// streams are the FIFOs between a shim and the process that copies them. A stream that the process
// does not have is empty.
type streams struct {
	Terminal bool   `json:"terminal,omitempty"`
	Stdin    string `json:"stdin,omitempty"`
	Stdout   string `json:"stdout,omitempty"`
	Stderr   string `json:"stderr,omitempty"`
}

// makeStreams makes FIFOs in dir for those of this process's own streams that are pipes. A
// terminal has no stderr.
func makeStreams(dir string, terminal bool) (s streams, err error) {
	s.Terminal = terminal
	for fd, stream := range []*string{&s.Stdin, &s.Stdout, &s.Stderr} {
		if terminal && fd == 2 || !terminal && !isPipe(fd) {
			continue
		}
		*stream = filepath.Join(dir, []string{"stdin", "stdout", "stderr"}[fd])
		if err := makeFIFO(*stream); err != nil {
			return s, err
		}
	}
	return s, nil
}

func isPipe(fd int) bool {
	var st unix.Stat_t
	return unix.Fstat(fd, &st) == nil && st.Mode&unix.S_IFMT == unix.S_IFIFO
}

// hold opens both ends of the FIFOs. A shim that opens its end then does not wait, and what it
// writes is not lost while nobody else has the FIFO open.
func (s *streams) hold() (release func(), err error) {
	var held []int
	release = func() {
		for _, fd := range held {
			_ = unix.Close(fd) // nothing was written
		}
	}
	for _, path := range []string{s.Stdin, s.Stdout, s.Stderr} {
		if path == "" {
			continue
		}
		fd, err := openFIFO(path, unix.O_RDWR)
		if err != nil {
			release()
			return nil, err
		}
		held = append(held, fd)
	}
	return release, nil
}

// openFIFO opens a FIFO without a wait for its other end. The descriptor is blocking.
func openFIFO(path string, mode int) (int, error) {
	fd, err := unix.Open(path, mode|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if err != nil {
		return -1, &os.PathError{Op: "open", Path: path, Err: err}
	}
	if err := unix.SetNonblock(fd, false); err != nil {
		return -1, errors.Join(os.NewSyscallError("fcntl", err), unix.Close(fd))
	}
	return fd, nil
}

// attendant copies the streams of one process of a task.
type attendant struct {
	streams
	client   atomic.Pointer[client] // another one after the connection was lost
	id, exec string
	started  *os.File // it receives "ok" when the process has started

	stdin, stdout, stderr int // this side's descriptors
	slave                 *os.File
	output                sync.WaitGroup // copies to stdout and stderr
	waiting               atomic.Int32   // those that have nothing to copy
}

// drainTimeout is how long an attendant waits for the end of the output after the end of the
// process. Another process may still hold the streams open.
const (
	drainTimeout = 2 * time.Second
	drainPause   = 50 * time.Millisecond
)

// begin starts the copying. The process has started, and the caller holds the FIFOs until begin
// returns.
func (a *attendant) begin() error {
	a.stdin, a.stdout, a.stderr = 0, 1, 2
	if a.slave != nil {
		a.stdin, a.stdout = int(a.slave.Fd()), int(a.slave.Fd())
		go a.followSize() // until this process ends
	}
	for _, out := range []struct {
		path string
		to   int
	}{{a.Stdout, a.stdout}, {a.Stderr, a.stderr}} {
		if out.path == "" {
			continue
		}
		from, err := openFIFO(out.path, unix.O_RDONLY)
		if err != nil {
			return err
		}
		a.output.Go(func() { copyStream(from, out.to, &a.waiting) })
	}
	if a.Stdin == "" {
		return nil
	}
	to, err := openFIFO(a.Stdin, unix.O_RDWR)
	if err != nil {
		return err
	}
	go a.feed(to) // it may wait for input until this process ends
	return nil
}

// feed copies the input, and tells the shim its end. The shim holds the FIFO open, too.
func (a *attendant) feed(to int) {
	copyStream(a.stdin, to, new(atomic.Int32))
	_ = unix.Close(to)
	// The process may have ended.
	_ = a.client.Load().do(context.Background(), "CloseIO", &task.CloseIORequest{ID: a.id, ExecID: a.exec, Stdin: true})
}

// finish waits for the rest of the output, also if its reader is slow.
func (a *attendant) finish() {
	done := make(chan struct{})
	go func() { a.output.Wait(); close(done) }()
	for idle := time.Duration(0); idle < drainTimeout; {
		select {
		case <-done:
			return
		case <-time.After(drainPause):
		}
		if a.waiting.Load() > 0 {
			idle += drainPause
		} else {
			idle = 0
		}
	}
}

// copyStream copies until the end of the input. If nobody reads the output, it discards the rest,
// so that the writer does not wait. It splices only between pipes. During a splice from a terminal
// that has no input, nobody else can use the pipe. waiting counts the copies that wait for input.
func copyStream(from, to int, waiting *atomic.Int32) {
	input := fileReader{fd: from, waiting: waiting}
	if isPipe(from) && isPipe(to) {
		for {
			input.await()
			n, err := unix.Splice(from, nil, to, nil, 1<<20, 0)
			if err == nil && n == 0 {
				return
			}
			if err != nil && err != unix.EINTR {
				break
			}
		}
	} else if _, err := io.Copy(fileWriter(to), input); err == nil {
		return
	}
	_, _ = io.Copy(io.Discard, input) // a terminal ends with an error
}

// discard reads the output of a process that nobody attends any more, until stop.
func (s *streams) discard() (stop func(), err error) {
	var files []*os.File
	var reading sync.WaitGroup
	stop = func() {
		for _, f := range files {
			_ = f.Close() // nothing was written
		}
		reading.Wait()
	}
	for _, path := range []string{s.Stdout, s.Stderr} {
		if path == "" {
			continue
		}
		f, err := os.OpenFile(path, os.O_RDWR|unix.O_NONBLOCK, 0) // with a writer, reads wait
		if err != nil {
			stop()
			return nil, err
		}
		files = append(files, f)
		reading.Go(func() { _, _ = io.Copy(io.Discard, f) }) // it ends with stop
	}
	return stop, nil
}

// fileReader and fileWriter are descriptors without a finalizer.
type (
	fileReader struct {
		fd      int
		waiting *atomic.Int32
	}
	fileWriter int
)

// await waits for input, or for the end of it.
func (f fileReader) await() {
	f.waiting.Add(1)
	defer f.waiting.Add(-1)
	for {
		_, err := unix.Poll([]unix.PollFd{{Fd: int32(f.fd), Events: unix.POLLIN}}, -1)
		if err != unix.EINTR {
			return
		}
	}
}

func (f fileReader) Read(p []byte) (int, error) {
	f.await()
	for {
		n, err := unix.Read(f.fd, p)
		switch {
		case err == unix.EINTR:
		case err != nil: // a terminal whose other side is closed: EIO
			return 0, err
		case n == 0:
			return 0, io.EOF
		default:
			return n, nil
		}
	}
}

func (f fileWriter) Write(p []byte) (written int, err error) {
	for written < len(p) {
		n, err := unix.Write(int(f), p[written:])
		switch {
		case err == unix.EINTR:
		case err != nil:
			return written, err
		default:
			written += n
		}
	}
	return written, nil
}

// makeTerminal makes a terminal, sends its master to a socket and keeps its slave, through which
// the bytes pass unchanged. This process becomes the session of the terminal, and so learns of
// changes of its size. The shim's terminal in the container does all processing.
func makeTerminal(socket string) (slave *os.File, err error) {
	master, err := os.OpenFile("/dev/ptmx", os.O_RDWR|unix.O_NOCTTY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, master.Close()) }()
	if err := unix.IoctlSetPointerInt(int(master.Fd()), unix.TIOCSPTLCK, 0); err != nil {
		return nil, os.NewSyscallError("unlock the terminal", err)
	}
	fd, _, errno := unix.Syscall(unix.SYS_IOCTL, master.Fd(), unix.TIOCGPTPEER, unix.O_RDWR|unix.O_NOCTTY|unix.O_CLOEXEC)
	if errno != 0 {
		return nil, os.NewSyscallError("open the terminal", errno)
	}
	slave = os.NewFile(fd, "terminal")
	if err := makeRaw(int(fd)); err != nil {
		return nil, errors.Join(err, slave.Close())
	}
	if err := unix.IoctlSetInt(int(fd), unix.TIOCSCTTY, 0); err != nil {
		return nil, errors.Join(os.NewSyscallError("TIOCSCTTY", err), slave.Close())
	}
	if err := sendFile(socket, master); err != nil {
		return nil, errors.Join(err, slave.Close())
	}
	return slave, nil
}

// makeRaw is cfmakeraw(3).
func makeRaw(fd int) error {
	t, err := unix.IoctlGetTermios(fd, unix.TCGETS)
	if err != nil {
		return os.NewSyscallError("TCGETS", err)
	}
	t.Iflag &^= unix.IGNBRK | unix.BRKINT | unix.PARMRK | unix.ISTRIP | unix.INLCR | unix.IGNCR | unix.ICRNL | unix.IXON
	t.Oflag &^= unix.OPOST
	t.Lflag &^= unix.ECHO | unix.ECHONL | unix.ICANON | unix.ISIG | unix.IEXTEN
	t.Cflag = t.Cflag&^(unix.CSIZE|unix.PARENB) | unix.CS8
	t.Cc[unix.VMIN], t.Cc[unix.VTIME] = 1, 0
	return os.NewSyscallError("TCSETS", unix.IoctlSetTermios(fd, unix.TCSETS, t))
}

// sendFile sends a file to a socket, as runc sends the master of a terminal.
func sendFile(socket string, f *os.File) error {
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return os.NewSyscallError("socket", err)
	}
	defer unix.Close(fd)
	if err := unix.Connect(fd, &unix.SockaddrUnix{Name: socket}); err != nil {
		return os.NewSyscallError("connect to the console socket", err)
	}
	err = unix.Sendmsg(fd, []byte(f.Name()), unix.UnixRights(int(f.Fd())), nil, 0)
	return os.NewSyscallError("send the terminal", err)
}

// followSize passes changes of the terminal's size to the shim.
func (a *attendant) followSize() {
	changed := make(chan os.Signal, 1)
	signal.Notify(changed, unix.SIGWINCH)
	for ; ; <-changed {
		size, err := unix.IoctlGetWinsize(int(a.slave.Fd()), unix.TIOCGWINSZ)
		if err != nil || size.Row == 0 && size.Col == 0 {
			continue // it has none yet
		}
		// The process may have ended.
		_ = a.client.Load().do(context.Background(), "ResizePty",
			&task.ResizePtyRequest{ID: a.id, ExecID: a.exec, Width: uint32(size.Col), Height: uint32(size.Row)})
	}
}
