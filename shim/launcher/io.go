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

// stdio holds both ends of the container's streams. Any file may be nil.
type stdio struct {
	// Files of the monitor.
	stdin, stdout, stderr *os.File // our ends of the pipes
	console               *os.File // or the master of a terminal
	log                   *os.File
	listener              *os.File
	oom, oomNotify        *os.File // the kernel's count of OOM kills, and the eventfd for its changes
	oomParent             *os.File

	terminal bool
	theirs   ends     // the container's ends, closed after it has inherited them
	socket   *os.File // receives the terminal's master from libcontainer
}

// ends are the container's ends of its streams. libcontainer's init sends the terminal's master to
// console.
type ends struct{ stdin, stdout, stderr, console *os.File }

// all returns each file once, because several streams may share one null device.
func (e *ends) all() (files []*os.File) {
	for _, f := range []*os.File{e.stdin, e.stdout, e.stderr, e.console} {
		if f != nil && !slices.Contains(files, f) {
			files = append(files, f)
		}
	}
	return files
}

// fill sets missing streams to a null device of this process only. Package os/exec would use the
// host's.
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

// openIO opens the streams between the container's process and its monitor. uid and gid are those
// of the container's root on the host.
func (c *launch) openIO(uid, gid int) (err error) {
	c.io = &stdio{}
	if _, plain := c.backend.(*pauseBackend); plain {
		return nil // pause closes its streams
	}
	if c.Pause == "" {
		err = c.openMonitored(uid, gid)
	}
	if err != nil {
		return err
	}
	return c.io.theirs.fill()
}

// openMonitored opens the streams to the monitor, and its socket.
func (c *launch) openMonitored(uid, gid int) (err error) {
	if c.io.listener, err = listen(c.Dir); err != nil {
		return fmt.Errorf("open the monitor's socket: %w", err)
	}
	c.undo.Add("remove the socket", func() error {
		failpoint.Reach("launcher.remove-socket")
		return ignore(unix.Unlink(filepath.Join(c.Dir, proto.SocketFile)), unix.ENOENT)
	})
	if c.Terminal {
		return c.io.makeTerminal(c.Runtime == nil)
	}
	return c.io.makePipes(uid, gid, c.Stdin)
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

// makePipes makes pipes. The container's ends belong to the container's root, which may be another
// user on the host.
func (s *stdio) makePipes(uid, gid int, withStdin bool) (err error) {
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
	if err := s.theirs.chown(uid, gid); err != nil {
		return fmt.Errorf("owner of stdio: %w", err)
	}
	return nil
}

// pipes returns the ends that are pipes. The other streams are null devices, which always belong to
// root.
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

// receiveConsole receives the terminal from libcontainer's init.
func (s *stdio) receiveConsole() (err error) {
	if s.console, err = receiveFile(s.socket); err != nil {
		return fmt.Errorf("receive the terminal: %w", err)
	}
	err = s.socket.Close()
	s.socket = nil
	return err
}

// started closes the container's ends, so that the container is the only writer of its output.
func (s *stdio) started() (err error) {
	for _, f := range s.theirs.all() {
		err = errors.Join(err, f.Close())
	}
	s.theirs = ends{}
	return err
}

// abandon closes the files that started has left open.
func (s *stdio) abandon() {
	for _, f := range append(s.theirs.all(), s.socket, s.console) {
		if f != nil {
			_ = f.Close() // twice is harmless
		}
	}
}

// pipe returns a pipe with blocking ends, the write end first. The monitor makes its end
// non-blocking.
func pipe(name string) (w, r *os.File, err error) {
	var fds [2]int
	if err := unix.Pipe2(fds[:], unix.O_CLOEXEC); err != nil {
		return nil, nil, fmt.Errorf("make pipe for %s: %w", name, err)
	}
	return os.NewFile(uintptr(fds[1]), name), os.NewFile(uintptr(fds[0]), name), nil
}

func socketPair(name string) (ours, theirs *os.File, err error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, nil, fmt.Errorf("make socket pair for %s: %w", name, err)
	}
	return os.NewFile(uintptr(fds[0]), name), os.NewFile(uintptr(fds[1]), name), nil
}

// receiveFile receives the one file that init has sent before it became ready.
func receiveFile(socket *os.File) (*os.File, error) {
	name := make([]byte, 4096) // the message holds the terminal's path
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

// listen creates the monitor's socket. It uses a path through a descriptor of the directory, since
// a socket's path is limited to 107 bytes.
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

// newNull creates and opens a null device for one process. A process can change the mode and owner
// of a device node through a descriptor. If the process had the host's node, it could make
// /dev/null unusable on the host.
//
// The node is /dev/null of a new tmpfs that is attached to no mount namespace and disappears with
// the last descriptor. It has the name that programs expect, and no file handle leads to another
// process's node.
func newNull() (_ *os.File, err error) {
	root, err := newTmpfs()
	if err != nil {
		return nil, fmt.Errorf("make null device: %w", err)
	}
	defer root.Close()
	dir := int(root.Fd())
	failpoint.Reach("launcher.make-null")
	if err := unix.Mkdirat(dir, "dev", 0o755); err != nil {
		return nil, fmt.Errorf("make null device: %w", os.NewSyscallError("mkdirat", err))
	}
	if err := unix.Mknodat(dir, "dev/null", unix.S_IFCHR|0o666, int(unix.Mkdev(1, 3))); err != nil {
		return nil, fmt.Errorf("make null device: %w", os.NewSyscallError("mknodat", err))
	}
	if err := unix.Fchmodat(dir, "dev/null", 0o666, 0); err != nil { // mknod obeys the umask
		return nil, fmt.Errorf("make null device: %w", os.NewSyscallError("fchmodat", err))
	}
	fd, err := unix.Openat(dir, "dev/null", unix.O_RDWR|unix.O_NOCTTY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("make null device: %w", os.NewSyscallError("openat", err))
	}
	failpoint.Reach("launcher.null-made")
	null := os.NewFile(uintptr(fd), os.DevNull)
	if err := copyLabel(os.DevNull, null); err != nil {
		return nil, errors.Join(fmt.Errorf("make null device: %w", err), null.Close())
	}
	return null, nil
}

// newTmpfs mounts a tmpfs that is attached to no mount namespace.
func newTmpfs() (*os.File, error) {
	fs, err := unix.Fsopen("tmpfs", unix.FSOPEN_CLOEXEC)
	if err != nil {
		return nil, os.NewSyscallError("fsopen", err)
	}
	defer unix.Close(fs)
	if err := unix.FsconfigCreate(fs); err != nil {
		return nil, os.NewSyscallError("fsconfig", err)
	}
	fd, err := unix.Fsmount(fs, unix.FSMOUNT_CLOEXEC, unix.MOUNT_ATTR_NOSUID|unix.MOUNT_ATTR_NOEXEC)
	if err != nil {
		return nil, os.NewSyscallError("fsmount", err)
	}
	return os.NewFile(uintptr(fd), "tmpfs"), nil
}

// seLinuxLabel is the extended attribute with a file's SELinux label.
const seLinuxLabel = "security.selinux"

// copyLabel copies the SELinux label of a file that all containers may use. On a host without
// SELinux it does nothing.
func copyLabel(from string, to *os.File) error {
	label := make([]byte, 256)
	n, err := unix.Getxattr(from, seLinuxLabel, label)
	if err == unix.ENODATA || err == unix.ENOTSUP {
		return nil
	}
	if err != nil {
		return fmt.Errorf("copy SELinux label: %w", err)
	}
	failpoint.Reach("launcher.label-null")
	if err := unix.Fsetxattr(int(to.Fd()), seLinuxLabel, label[:n], 0); err != nil {
		return fmt.Errorf("copy SELinux label: %w", err)
	}
	failpoint.Reach("launcher.null-labelled")
	return nil
}
