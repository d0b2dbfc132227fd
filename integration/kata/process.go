package kata

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"time"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"berth/internal/cgroup"
)

// process is a process of a container, a child of this one.
type process struct {
	container             string
	pid                   int
	stdin, stdout, stderr *os.File // this side's; of a terminal the first two are its master
	ended                 chan struct{}
	oom                   bool // its container's OOM kill was reported; guarded by vm.mu
	code                  int  // after ended
}

func (v *vm) find(r *request) (*process, error) {
	v.mu.Lock()
	defer v.mu.Unlock()
	p := v.processes[r.ContainerID+"/"+r.ExecID]
	if p == nil {
		return nil, status.Errorf(codes.NotFound, "no process %s of container %s", r.ExecID, r.ContainerID)
	}
	return p, nil
}

func (v *vm) bundle(id string) string { return filepath.Join(v.dir, id) }

// createContainer creates the container of the spec that the shim has sent, with a cgroup of the
// guest and the pod's network.
func (v *vm) createContainer(_ context.Context, r *request) ([]byte, error) {
	if err := os.Mkdir(v.bundle(r.ContainerID), 0o700); err != nil {
		return nil, err
	}
	// A virtual machine would mount the shared directory there.
	shared := "/run/kata-containers/shared/"
	r.Spec.Root.Path = strings.Replace(r.Spec.Root.Path, shared+"containers/", shared+"sandboxes/"+v.id+"/shared/", 1)
	r.Spec.Linux.CgroupsPath = cgroupOf(r.ContainerID)
	// The agent makes these itself.
	r.Spec.Linux.Namespaces = append(r.Spec.Linux.Namespaces, specs.LinuxNamespace{Type: specs.PIDNamespace})
	r.Spec.Hostname = v.hostname
	if v.netns != "" {
		net := specs.LinuxNamespace{Type: specs.NetworkNamespace, Path: v.netns}
		r.Spec.Linux.Namespaces = append(r.Spec.Linux.Namespaces, net)
	}
	if err := writeJSON(filepath.Join(v.bundle(r.ContainerID), "config.json"), r.Spec); err != nil {
		return nil, err
	}
	return nil, v.launch(r, r.Spec.Process.Terminal, "create", "--bundle", v.bundle(r.ContainerID))
}

func cgroupOf(id string) string { return "/kata-guest/" + id }

func (v *vm) execProcess(_ context.Context, r *request) ([]byte, error) {
	file := filepath.Join(v.bundle(r.ContainerID), r.ExecID+".json")
	if err := writeJSON(file, r.Process); err != nil {
		return nil, err
	}
	return nil, v.launch(r, r.Process.Terminal, "exec", "--detach", "--process", file)
}

// launch makes runc create a process, and follows it.
func (v *vm) launch(r *request, terminal bool, args ...string) error {
	p := &process{container: r.ContainerID, ended: make(chan struct{})}
	pidFile := filepath.Join(v.bundle(r.ContainerID), r.ExecID+".pid")
	args = append(args, "--pid-file", pidFile)
	var streams []*os.File
	var console *net.UnixListener
	var err error
	if terminal {
		socket := filepath.Join(v.dir, "console")
		if console, err = net.ListenUnix("unix", &net.UnixAddr{Name: socket, Net: "unix"}); err != nil {
			return err
		}
		defer console.Close()
		args = append(args, "--console-socket", socket)
		streams = []*os.File{nil, nil, nil}
	} else if streams, err = p.pipes(); err != nil {
		return err
	}
	err = v.call(streams, append(args, r.ContainerID)...)
	if err != nil && strings.Contains(err.Error(), "exec: ") {
		err = fmt.Errorf("the file %s was not found", r.program()) // as Kata's agent
	}
	for _, f := range streams {
		err = errors.Join(err, closeFile(f))
	}
	if err == nil && terminal {
		err = p.receiveTerminal(console)
	}
	if err != nil {
		return err
	}
	text, err := os.ReadFile(pidFile)
	if err != nil {
		return err
	}
	if p.pid, err = strconv.Atoi(string(text)); err != nil {
		return err
	}
	v.mu.Lock()
	v.processes[r.ContainerID+"/"+r.ExecID] = p
	v.mu.Unlock()
	go p.follow()
	return nil
}

// program returns the program of the process in a request.
func (r *request) program() string {
	if r.Spec.Process != nil {
		return r.Spec.Process.Args[0]
	}
	return r.Process.Args[0]
}

func closeFile(f *os.File) error {
	if f == nil {
		return nil
	}
	return f.Close()
}

// pipes makes the process's streams and returns its ends.
func (p *process) pipes() ([]*os.File, error) {
	stdin, ours, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	p.stdin = ours
	streams := []*os.File{stdin}
	for _, stream := range []**os.File{&p.stdout, &p.stderr} {
		r, w, err := os.Pipe()
		if err != nil {
			return nil, err
		}
		*stream, streams = r, append(streams, w)
	}
	return streams, nil
}

func (p *process) receiveTerminal(console *net.UnixListener) error {
	conn, err := console.AcceptUnix()
	if err != nil {
		return err
	}
	defer conn.Close()
	rights := make([]byte, unix.CmsgSpace(4))
	_, n, _, _, err := conn.ReadMsgUnix(make([]byte, 4096), rights)
	if err != nil {
		return err
	}
	messages, err := unix.ParseSocketControlMessage(rights[:n])
	if err != nil || len(messages) != 1 {
		return fmt.Errorf("receive the terminal: %d messages: %w", len(messages), err)
	}
	fds, err := unix.ParseUnixRights(&messages[0])
	if err != nil {
		return err
	}
	p.stdin = os.NewFile(uintptr(fds[0]), "terminal")
	p.stdout = p.stdin
	return nil
}

// follow waits for the end of the process.
func (p *process) follow() {
	var s unix.WaitStatus
	for {
		if _, err := unix.Wait4(p.pid, &s, 0, nil); err != unix.EINTR {
			break
		}
	}
	p.code = s.ExitStatus()
	if s.Signaled() {
		p.code = 128 + int(s.Signal())
	}
	close(p.ended)
}

// call calls runc in the mount namespace of the shim.
func (v *vm) call(streams []*os.File, args ...string) error {
	log := filepath.Join(v.dir, "runc.log")
	cmd := exec.Command(v.runc, append([]string{"--root", filepath.Join(v.dir, "runc"), "--log", log}, args...)...)
	if streams != nil && streams[0] != nil {
		cmd.Stdin, cmd.Stdout, cmd.Stderr = streams[0], streams[1], streams[2]
	}
	err := inMountsOf(int(v.shim.Load()), cmd.Run)
	if err == nil {
		return nil
	}
	said, logErr := os.ReadFile(log)
	return errors.Join(fmt.Errorf("runc %s: %w: %s", args[0], err, said), logErr, os.Remove(log))
}

// inMountsOf calls do on a thread in the mount namespace of a process.
func inMountsOf(pid int, do func() error) error {
	namespace, err := os.Open(fmt.Sprintf("/proc/%d/ns/mnt", pid))
	if err != nil {
		return do() // the shim is lost
	}
	defer namespace.Close()
	done := make(chan error)
	go func() {
		runtime.LockOSThread() // the thread ends with the goroutine
		err := os.NewSyscallError("unshare", unix.Unshare(unix.CLONE_FS))
		if err == nil {
			err = os.NewSyscallError("setns", unix.Setns(int(namespace.Fd()), unix.CLONE_NEWNS))
		}
		if err == nil {
			err = do()
		}
		done <- err
	}()
	return <-done
}

func (v *vm) startContainer(_ context.Context, r *request) ([]byte, error) {
	return nil, v.call(nil, "start", r.ContainerID)
}

func (v *vm) removeContainer(ctx context.Context, r *request) ([]byte, error) {
	if err := v.call(nil, "delete", "--force", r.ContainerID); err != nil {
		return nil, err
	}
	group, err := cgroup.Open(cgroupOf(r.ContainerID), false)
	if err != nil {
		return nil, err
	}
	if err := errors.Join(group.Kill(ctx), group.Destroy(ctx)); err != nil { // runc leaves a busy one
		return nil, err
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	for key, p := range v.processes {
		if p.container == r.ContainerID {
			<-p.ended // runc has killed it
			delete(v.processes, key)
		}
	}
	return nil, os.RemoveAll(v.bundle(r.ContainerID))
}

func (v *vm) updateContainer(_ context.Context, r *request) ([]byte, error) {
	file := filepath.Join(v.bundle(r.ContainerID), "resources.json")
	if err := writeJSON(file, r.Resources); err != nil {
		return nil, err
	}
	return nil, v.call(nil, "update", "--resources", file, r.ContainerID)
}

// stats reports the CPU time and the memory of a container.
func (v *vm) stats(_ context.Context, r *request) ([]byte, error) {
	out, err := exec.Command(v.runc, "--root", filepath.Join(v.dir, "runc"), "events", "--stats", r.ContainerID).Output()
	if err != nil {
		return nil, err
	}
	var event struct {
		Data struct {
			CPU    struct{ Usage struct{ Total uint64 } }
			Memory struct{ Usage struct{ Usage uint64 } }
		}
	}
	if err := json.NewDecoder(bytes.NewReader(out)).Decode(&event); err != nil {
		return nil, err
	}
	cpu := appendBytes(nil, 1, appendNumber(nil, 1, event.Data.CPU.Usage.Total))
	memory := appendBytes(nil, 2, appendNumber(nil, 1, event.Data.Memory.Usage.Usage))
	return appendBytes(nil, 1, appendBytes(appendBytes(nil, 1, cpu), 2, memory)), nil
}

// awaitOOM waits for an OOM kill in a container that has not been reported yet.
func (v *vm) awaitOOM(ctx context.Context, _ *request) ([]byte, error) {
	for ; ctx.Err() == nil; time.Sleep(time.Millisecond) {
		v.mu.Lock()
		for _, p := range v.processes {
			group, err := cgroup.Open(cgroupOf(p.container), false)
			if err != nil || p.oom {
				continue
			}
			kills, err := group.OOMKills()
			if p.oom = err == nil && kills > 0; p.oom {
				v.mu.Unlock()
				return appendBytes(nil, 1, []byte(p.container)), nil
			}
		}
		v.mu.Unlock()
	}
	return nil, ctx.Err()
}

// signalProcess signals a process. Without an exec ID it is the container's init, as Kata's agent
// does for all signals but SIGKILL.
func (v *vm) signalProcess(_ context.Context, r *request) ([]byte, error) {
	if r.ExecID == "" {
		r.ExecID = r.ContainerID
	}
	p, err := v.find(r)
	if err != nil {
		return nil, err
	}
	select {
	case <-p.ended:
		return nil, nil
	default:
	}
	if err := unix.Kill(p.pid, unix.Signal(r.Signal)); err != nil && err != unix.ESRCH {
		return nil, err
	}
	return nil, nil
}

func (v *vm) waitProcess(ctx context.Context, r *request) ([]byte, error) {
	p, err := v.find(r)
	if err != nil {
		return nil, err
	}
	select {
	case <-p.ended:
		return appendNumber(nil, 1, uint64(p.code)), nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// --- streams ------------------------------------------------------------------------

func (v *vm) writeStdin(_ context.Context, r *request) ([]byte, error) {
	p, err := v.find(r)
	if err != nil {
		return nil, err
	}
	n, err := p.stdin.Write(r.Data)
	return appendNumber(nil, 1, uint64(n)), err
}

func (v *vm) closeStdin(_ context.Context, r *request) ([]byte, error) {
	p, err := v.find(r)
	if err != nil || p.stdin == p.stdout {
		return nil, err
	}
	return nil, p.stdin.Close()
}

func (v *vm) readStdout(_ context.Context, r *request) ([]byte, error) {
	p, err := v.find(r)
	if err != nil {
		return nil, err
	}
	return read(p.stdout, r.Len)
}

func (v *vm) readStderr(_ context.Context, r *request) ([]byte, error) {
	p, err := v.find(r)
	if err != nil {
		return nil, err
	}
	return read(p.stderr, r.Len)
}

// read returns what is there. The end is an error.
func read(f *os.File, size int) ([]byte, error) {
	if f == nil {
		return nil, io.EOF
	}
	data := make([]byte, size)
	n, err := f.Read(data)
	if err != nil {
		return nil, status.Error(codes.OutOfRange, err.Error())
	}
	return appendBytes(nil, 1, data[:n]), nil
}

func (v *vm) resizeTerminal(_ context.Context, r *request) ([]byte, error) {
	p, err := v.find(r)
	if err != nil {
		return nil, err
	}
	size := &unix.Winsize{Row: r.Row, Col: r.Column}
	return nil, os.NewSyscallError("resize the terminal", unix.IoctlSetWinsize(int(p.stdin.Fd()), unix.TIOCSWINSZ, size))
}
