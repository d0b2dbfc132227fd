package jail

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"os"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"unicode"

	"golang.org/x/sys/unix"
)

// Descriptors of a program beside the standard ones.
const (
	TreeFD  = 3 // the tree; package early expects it here too
	exeFD   = 4 // the program itself
	FilesFD = 5 // the first of Command.Files
)

// Command is a run of a program that confines itself. The caller keeps its files and closes them.
type Command struct {
	Name    string   // argument 0, and the name in errors
	Exe     *os.File // the program, even if another version is installed meanwhile
	Version string   // version of the exchange; Main refuses any other
	Args    []string
	Tree    *os.File   // the directory that becomes the root, on a separate mount: see Clone
	Files   []*os.File // further descriptors, from FilesFD on; nil leaves one out
}

// Worker is a running program. In and Out are the caller's ends of its standard input and output.
// The data from Out may be hostile. In may be closed before End.
type Worker struct {
	In, Out *os.File

	process *os.Process
	ended   chan struct{}    // closed when the process has been waited for
	state   *os.ProcessState // valid then
	said    chan string      // the first line of its standard error
}

// pipeSize is the size that Linux allows unprivileged processes (fs.pipe-max-size).
const pipeSize = 1 << 20

// Start starts a program with an empty environment, in namespaces of its own for processes, network
// and IPC. It ends with the daemon. The caller ends it with End.
func Start(c Command) (_ *Worker, err error) {
	w := &Worker{ended: make(chan struct{}), said: make(chan string, 1)}
	var theirs, mine pipes
	defer func() {
		theirs.close()
		if err != nil {
			mine.close()
		}
	}()
	stdin, in, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	theirs, mine = append(theirs, stdin), append(mine, in)
	// This fails if the user has many pipes (fs.pipe-user-pages-soft). Then the transfer is only
	// slower.
	_, _ = unix.FcntlInt(stdin.Fd(), unix.F_SETPIPE_SZ, pipeSize)
	out, stdout, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	theirs, mine = append(theirs, stdout), append(mine, out)
	messages, stderr, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	theirs, mine = append(theirs, stderr), append(mine, messages)
	w.In, w.Out = in, out
	inherited := []*os.File{stdin, stdout, stderr, TreeFD: c.Tree, exeFD: c.Exe}
	if err := w.run(c, append(inherited, c.Files...)); err != nil {
		return nil, err
	}
	go func() { w.said <- firstLine(messages) }()
	return w, nil
}

// pipes are closed together. Closing a pipe loses no data.
type pipes []*os.File

func (p pipes) close() {
	for _, file := range p {
		_ = file.Close()
	}
}

// run starts the process and a goroutine that waits for it. The kernel kills the process when the
// starting thread ends (Pdeathsig), so the goroutine keeps its thread until the process has ended.
func (w *Worker) run(c Command, fds []*os.File) error {
	const namespaces = unix.CLONE_NEWPID | unix.CLONE_NEWIPC | unix.CLONE_NEWNET
	attr := &os.ProcAttr{
		Files: fds, Env: []string{}, Dir: "/",
		Sys: &syscall.SysProcAttr{Cloneflags: namespaces, Setsid: true, Pdeathsig: unix.SIGKILL},
	}
	started := make(chan error)
	go func() {
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		var err error
		w.process, err = os.StartProcess("/proc/self/fd/"+strconv.Itoa(exeFD),
			append([]string{c.Name, c.Version}, c.Args...), attr)
		started <- err
		if err != nil {
			return
		}
		defer close(w.ended)
		if w.state, err = w.process.Wait(); err != nil {
			w.state = &os.ProcessState{} // cannot happen: nothing else waits for children
		}
	}()
	return <-started
}

// Kill ends the program, at any time.
func (w *Worker) Kill() { _ = w.process.Kill() } // an error means that it has ended by itself

// End kills the program, waits for its end and closes the pipes. It returns how the program ended
// and the first line of its standard error, which is printable.
func (w *Worker) End() (state *os.ProcessState, said string) {
	w.Kill()
	return w.wait()
}

// wait waits for the end of the program and closes the pipes.
func (w *Worker) wait() (state *os.ProcessState, said string) {
	<-w.ended
	pipes{w.In, w.Out}.close() // closing a pipe again does no harm
	return w.state, <-w.said
}

// Run runs a program without input until its end, and returns its standard output. The output has
// at most limit bytes and may be hostile, so the caller must decode it strictly. An error has the
// first line of the program's standard error, or is ctx's.
func Run(ctx context.Context, c Command, limit int) ([]byte, error) {
	w, err := Start(c)
	if err != nil {
		return nil, fmt.Errorf("start %s: %w", c.Name, err)
	}
	stopKilling := context.AfterFunc(ctx, w.Kill)
	_ = w.In.Close() // it is a pipe
	answer, err := io.ReadAll(io.LimitReader(w.Out, int64(limit)+1))
	if err == nil && len(answer) > limit {
		err = fmt.Errorf("answer of more than %d bytes", limit)
	}
	if err != nil {
		w.Kill()
	}
	state, said := w.wait()
	stopKilling()
	switch {
	case ctx.Err() != nil:
		return nil, fmt.Errorf("%s: %w", c.Name, context.Cause(ctx))
	case err != nil:
		return nil, fmt.Errorf("%s: %w: %q", c.Name, err, said)
	case !state.Success():
		return nil, fmt.Errorf("%s: %v: %q", c.Name, state, said)
	}
	return answer, nil
}

// firstLine reads all and returns the first line, made printable.
func firstLine(r io.ReadCloser) string {
	const limit = 512 // of what is kept
	defer r.Close()
	text, _ := io.ReadAll(io.LimitReader(r, limit)) // the part before an error counts
	_, _ = io.Copy(io.Discard, r)
	line, _, _ := bytes.Cut(text, []byte("\n"))
	return strings.Map(func(r rune) rune {
		if unicode.IsPrint(r) {
			return r
		}
		return -1
	}, string(line))
}

// Main is the main function of a program that Start started. It returns the exit status. The status
// is 0 if run gave an answer, even if the answer is an error. run confines the process with Process
// before it reads any input. Before run, Main closes the program's own file, so that hostile input
// cannot change the file's mode.
func Main(name, version string, run func(args []string, tree *os.File) error) int {
	err := fmt.Errorf("%s must be started by a berth of the same version", name)
	if len(os.Args) > 1 && os.Args[1] == version {
		err = os.NewFile(exeFD, name).Close()
		if err == nil {
			err = run(os.Args[2:], os.NewFile(TreeFD, "tree"))
		}
	}
	if err != nil {
		fmt.Fprintf(os.Stderr, "%v\n", err)
		return 1
	}
	return 0
}

// Attributes make devices, set-id bits and programs on a mount unusable.
const Attributes = unix.MOUNT_ATTR_NODEV | unix.MOUNT_ATTR_NOSUID | unix.MOUNT_ATTR_NOEXEC

// Clone clones the mount of dir as a detached mount, with dir as its root. No path leads out of it.
// The kernel drops the mount when its last descriptor is closed.
func Clone(dir *os.File) (*os.File, error) {
	fd, err := unix.OpenTree(int(dir.Fd()), "", unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC|unix.AT_EMPTY_PATH)
	if err != nil {
		return nil, fmt.Errorf("clone mount of %s: %w", dir.Name(), err)
	}
	return os.NewFile(uintptr(fd), "tree"), nil
}

// Restrict gives a mount Attributes and more, such as MOUNT_ATTR_RDONLY. The error is ENOSYS before
// Linux 5.12.
func Restrict(mount *os.File, more uint64) error {
	attr := unix.MountAttr{Attr_set: more | Attributes}
	if err := unix.MountSetattr(int(mount.Fd()), "", unix.AT_EMPTY_PATH, &attr); err != nil {
		return fmt.Errorf("restrict mount: %w", err)
	}
	return nil
}
