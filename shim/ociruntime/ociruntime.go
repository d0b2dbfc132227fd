// Package ociruntime calls OCI runtimes with the command line of runc, which crun and gVisor's
// runsc share. Launchers create, start and exec with it. The daemon signals and deletes, because
// containers outlive their launchers. The package links few others, to keep launchers small.
//
// # Three kinds
//
// With most runtimes a container's processes are processes of the host, in the container's cgroup.
// With gVisor they run in one sandbox per pod, and the host does not see them. Such a runtime is
// Sandboxed: it has commands to wait for a container and to signal a process in it. Probe detects
// these two kinds. The third is the program berth-task, which calls a shim with containerd's task
// API (TaskAPI). The shim is the parent of the containers' processes. The shim decides whether they
// are Sandboxed.
package ociruntime

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"time"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"berth/internal/failpoint"
)

// SpecVersion is the ociVersion of the specs for OCI runtimes. Some runtimes refuse versions newer
// than their own, and berth uses no newer features.
const SpecVersion = "1.0.2"

// Runtime is an OCI runtime's program and its options. Each container's record has a copy, so that
// the container can be removed after the runtime is gone from the configuration.
type Runtime struct {
	Path          string   `json:"path"`
	Args          []string `json:"args,omitempty"` // before every command
	Root          string   `json:"root"`           // where the runtime keeps its state; the containers of a pod share it
	SystemdCgroup bool     `json:"systemdCgroup,omitempty"`
	Sandboxed     bool     `json:"sandboxed,omitempty"`  // see the package's comment
	Measures      bool     `json:"measures,omitempty"`   // see Capabilities
	TaskAPI       bool     `json:"taskAPI,omitempty"`    // it is berth-task
	SubCgroups    bool     `json:"subCgroups,omitempty"` // it can put an exec into a cgroup below the container's
	Version       string   `json:"version,omitempty"`    // see Capabilities; empty: recorded by an older berth
}

// Parent reports whether the container's init is a child of the runtime's process, not of berth's.
// Then the runtime reports the exit, and sends signals.
func (r *Runtime) Parent() bool { return r.Sandboxed || r.TaskAPI }

// SetsLimits reports whether the runtime, not the node's cgroups, changes the limits of a
// container.
func (r *Runtime) SetsLimits() bool { return r.TaskAPI && r.Sandboxed }

// Saves reports whether the runtime has gVisor's commands to save a sandbox.
func (r *Runtime) Saves() bool { return r.Sandboxed && !r.TaskAPI }

// Error is the message of a failed command of a runtime.
type Error struct {
	Command string // such as "create"
	Message string
	Err     error // the program's exit status
}

func (e *Error) Error() string { return e.Command + ": " + e.Message }
func (e *Error) Unwrap() error { return e.Err }

// IO are the streams that a container or an exec gets from the command that creates it. A nil file
// is the host's /dev/null, which containers must not get.
type IO struct {
	Stdin, Stdout, Stderr *os.File
	ConsoleSocket         string // for a terminal: the socket that receives its master
}

// The files of a bundle, besides config.json.
const (
	logFile         = "runtime.log"
	pidFile         = "pid"
	internalPIDFile = "internal-pid"
)

// Create makes a container from the config.json in bundle, which is absolute. Its
// init waits for Start. The result is the init's process, or, of a Sandboxed runtime, the
// sandbox's.
func (r *Runtime) Create(ctx context.Context, id, bundle string, streams IO) (pid int, err error) {
	defer r.cleanBundle(bundle, &err)
	args := []string{"create", "--bundle", bundle, "--pid-file", filepath.Join(bundle, pidFile)}
	if err := r.runWith(ctx, bundle, streams, append(args, streams.args()...), id); err != nil {
		return 0, err
	}
	return readPID(filepath.Join(bundle, pidFile))
}

// Start makes a created container's init execute its command. Only a container in a sandbox gets
// its streams here.
func (r *Runtime) Start(ctx context.Context, id, bundle string, streams IO) error {
	return r.begin(ctx, bundle, streams, "start", id)
}

// begin runs a command that makes a created container run. The last argument is the container's ID.
func (r *Runtime) begin(ctx context.Context, bundle string, streams IO, args ...string) (err error) {
	defer r.cleanBundle(bundle, &err)
	if streams == (IO{}) {
		cmd := r.command(ctx, "", args...)
		if err := useBundle(cmd, bundle); err != nil {
			return err
		}
		return r.finish(cmd, args[0])
	}
	return r.runWith(ctx, bundle, streams, args[:len(args)-1], args[len(args)-1])
}

// Exec starts a process in a running container, described by process.json in dir. It returns the
// process. For a runtime that is its Parent, pid is a process on the host that ends together with
// the container's process. internal is what KillExec needs. cgroup is the name of a
// cgroup below the container's. Only runtimes with SubCgroups support it, on cgroup v2. If it is
// empty, the container's cgroup is used.
func (r *Runtime) Exec(ctx context.Context, id, dir, cgroup string, streams IO) (pid, internal int, err error) {
	defer r.cleanBundle(dir, &err)
	args := []string{
		"exec", "--detach",
		"--process", filepath.Join(dir, ProcessFile),
		"--pid-file", filepath.Join(dir, pidFile),
	}
	if r.Parent() {
		args = append(args, "--internal-pid-file", filepath.Join(dir, internalPIDFile))
	}
	if cgroup != "" {
		args = append(args, "--cgroup", cgroup)
	}
	if err := r.runWith(ctx, dir, streams, append(args, streams.args()...), id); err != nil {
		return 0, 0, err
	}
	if r.Parent() {
		if internal, err = readPID(filepath.Join(dir, internalPIDFile)); err != nil {
			return 0, 0, err
		}
	}
	pid, err = readPID(filepath.Join(dir, pidFile))
	return pid, internal, err
}

// The names of the files that Create and Exec read.
const (
	ConfigFile  = "config.json"
	ProcessFile = "process.json"
)

func (s IO) args() []string {
	if s.ConsoleSocket == "" {
		return nil
	}
	return []string{"--console-socket", s.ConsoleSocket}
}

// Waiter returns a command that exits when a container of a Sandboxed runtime has ended. Before, it
// writes {"id": ID, "exitStatus": N}; N is 128+signal after a kill.
func (r *Runtime) Waiter(id string, stdout *os.File) *exec.Cmd {
	cmd := r.command(context.Background(), "", "wait", id) // it outlives the process that starts it
	cmd.Stdout = stdout
	return cmd
}

// Attend returns the command that starts a created container of a TaskAPI runtime, copies its
// streams, and exits when the container has ended. Before, it writes what Waiter's command writes
// to verdict. It writes "ok" to started when the container runs. The message of an error is in the
// bundle's log, see Attended.
//
// The command outlives the process that starts it. An end of ctx before that kills it.
func (r *Runtime) Attend(ctx context.Context, id, bundle string, streams IO, verdict, started *os.File) *exec.Cmd {
	args := append([]string{"run"}, streams.args()...)
	cmd := r.command(ctx, filepath.Join(bundle, logFile), append(args, id)...)
	// The assignments of a nil *os.File would not be nil.
	if streams.Stdin != nil {
		cmd.Stdin = streams.Stdin
	}
	if streams.Stdout != nil {
		cmd.Stdout = streams.Stdout
	}
	if streams.Stderr != nil {
		cmd.Stderr = streams.Stderr
	}
	cmd.ExtraFiles = []*os.File{verdict, started}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	return cmd
}

// Attended returns the error of a command Attend that has written answer to started, and removes
// its log.
func (r *Runtime) Attended(bundle string, answer []byte) (err error) {
	defer r.cleanBundle(bundle, &err)
	if string(answer) == "ok" {
		return nil
	}
	return r.failure("run", lastError(filepath.Join(bundle, logFile)), errors.New("it ended early"))
}

// Kill sends a signal to a container's init. It succeeds if the container has ended.
func (r *Runtime) Kill(ctx context.Context, id string, sig unix.Signal) error {
	err := r.run(ctx, "kill", id, strconv.Itoa(int(sig)))
	if err != nil && r.ended(ctx, id) {
		return nil
	}
	return err
}

// ended returns whether a container has certainly ended.
func (r *Runtime) ended(ctx context.Context, id string) bool {
	var out bytes.Buffer
	cmd := r.command(ctx, "", "state", id)
	cmd.Stdout = &out
	if err := r.call(cmd, "state"); err != nil {
		return false
	}
	var state struct {
		Status string `json:"status"`
	}
	return json.Unmarshal(out.Bytes(), &state) == nil && state.Status == "stopped"
}

// KillExec kills a process that Exec has started with a runtime that is its Parent. A Sandboxed
// runtime kills its process group, too, but not a shim.
func (r *Runtime) KillExec(ctx context.Context, id string, internal int) error {
	group := r.run(ctx, "kill", "--pgid", strconv.Itoa(internal), id, strconv.Itoa(int(unix.SIGKILL)))
	if group == nil {
		return nil
	}
	return r.run(ctx, "kill", "--pid", strconv.Itoa(internal), id, strconv.Itoa(int(unix.SIGKILL)))
}

// Update changes the limits of a container in the sandbox of a TaskAPI runtime.
func (r *Runtime) Update(ctx context.Context, id string, resources *specs.LinuxResources) error {
	document, err := json.Marshal(resources)
	if err != nil {
		return err
	}
	cmd := r.command(ctx, "", "update", "--resources", "-", id)
	cmd.Stdin = bytes.NewReader(document)
	return r.call(cmd, "update")
}

// Delete kills the processes of a container and removes it. It succeeds if the container does not
// exist.
func (r *Runtime) Delete(ctx context.Context, id string) error {
	return r.run(ctx, "delete", "--force", id)
}

// Has returns whether the runtime has a container with that ID that it has not deleted, even an
// ended one.
func (r *Runtime) Has(id string) bool {
	if _, err := os.Lstat(filepath.Join(r.Root, id)); err == nil { // runc's and crun's directory
		return true
	}
	found, err := filepath.Glob(filepath.Join(r.Root, id+sandboxMark+"*")) // runsc's files
	return err == nil && len(found) > 0
}

// maxMessage bounds the message of a runtime in an error, in bytes.
const maxMessage = 4 << 10

// maxOutput bounds the part of a runtime's output or log that is read, in bytes. gVisor's errors
// can have long stack traces.
const maxOutput = 256 << 10

// outputTimeout is how long other processes may keep the output of a command open after its end.
const outputTimeout = 2 * time.Second

// command returns a call of the program. log is the file for its messages; empty: its standard
// error.
func (r *Runtime) command(ctx context.Context, log string, args ...string) *exec.Cmd {
	all := append([]string{}, r.Args...)
	if r.Root != "" {
		all = append(all, "--root", r.Root)
	}
	if r.SystemdCgroup {
		all = append(all, "--systemd-cgroup")
	}
	if log != "" {
		all = append(all, "--log", log, "--log-format", "json")
	}
	cmd := exec.CommandContext(ctx, r.program(), append(all, args...)...)
	cmd.Dir = "/"
	cmd.Env = append([]string{"PATH=" + os.Getenv("PATH")}, failpoint.Env()...)
	cmd.WaitDelay = outputTimeout
	return cmd
}

// program returns the path of the program. berth-task may have moved with berth's other programs
// since the container was made, for example when the package was removed.
func (r *Runtime) program() string {
	if !r.TaskAPI {
		return r.Path
	}
	if _, err := os.Stat(r.Path); err == nil {
		return r.Path
	}
	self, err := os.Executable()
	if err != nil {
		return r.Path
	}
	return filepath.Join(filepath.Dir(self), filepath.Base(r.Path))
}

// run runs a command that has no streams.
func (r *Runtime) run(ctx context.Context, args ...string) error {
	return r.call(r.command(ctx, "", args...), args[0])
}

// call is finish with a directory for temporary files. It serves the daemon's commands, which have
// no bundle.
func (r *Runtime) call(cmd *exec.Cmd, what string) (err error) {
	remove, err := r.useRoot(cmd)
	if err != nil {
		return fmt.Errorf("%s %s: %w", filepath.Base(r.Path), what, err)
	}
	defer func() { err = errors.Join(err, remove()) }()
	return r.finish(cmd, what)
}

// finish runs cmd and returns its standard error as the error's text. It uses a file in memory
// instead of a pipe, because surviving processes would hold a pipe open.
func (r *Runtime) finish(cmd *exec.Cmd, what string) error {
	fd, err := unix.MemfdCreate("runtime output", unix.MFD_CLOEXEC)
	if err != nil {
		return os.NewSyscallError("memfd_create", err)
	}
	said := os.NewFile(uintptr(fd), "runtime output")
	defer said.Close()
	cmd.Stderr = said
	if cmd.Stdout == nil {
		cmd.Stdout = said
	}
	failpoint.Reach("program.run")
	err = cmd.Run()
	failpoint.Reach("program.ran")
	if err != nil {
		return r.failure(what, string(last(said)), err)
	}
	return nil
}

// runWith runs a command with the container's streams. The command writes its errors to a log file
// instead.
func (r *Runtime) runWith(ctx context.Context, dir string, streams IO, args []string, id string) error {
	log := filepath.Join(dir, logFile)
	cmd := r.command(ctx, log, append(args, id)...)
	// The command must end with its launcher. The kernel sends the signal when the thread that
	// started the command ends.
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	// A nil *os.File in the interface would not be nil.
	if streams.Stdin != nil {
		cmd.Stdin = streams.Stdin
	}
	if streams.Stdout != nil {
		cmd.Stdout = streams.Stdout
	}
	if streams.Stderr != nil {
		cmd.Stderr = streams.Stderr
	}
	if err := useBundle(cmd, dir); err != nil {
		return err
	}
	if err := cmd.Run(); err != nil {
		return r.failure(args[0], lastError(log), err)
	}
	return nil
}

func (r *Runtime) failure(what, message string, err error) error {
	message, _, _ = strings.Cut(message, "\ngoroutine ") // a stack trace
	message = strings.TrimSpace(message)
	if half := maxMessage / 2; len(message) > maxMessage {
		message = strings.ToValidUTF8(message[:half]+" … "+message[len(message)-half:], "")
	}
	if message == "" {
		message = err.Error()
	}
	return &Error{Command: filepath.Base(r.Path) + " " + what, Message: message, Err: err}
}

// lastError returns the message of the last error in a log of JSON lines.
func lastError(path string) string {
	f, err := os.Open(path)
	if err != nil {
		return ""
	}
	defer f.Close()
	message := ""
	for line := range strings.Lines(string(last(f))) {
		var entry struct{ Level, Msg string }
		if json.Unmarshal([]byte(line), &entry) == nil && (entry.Level == "error" || entry.Level == "fatal") {
			message = entry.Msg
		}
	}
	return message
}

// last returns the last maxOutput bytes of a file.
func last(f *os.File) []byte {
	info, err := f.Stat()
	if err != nil {
		return nil
	}
	text := make([]byte, min(info.Size(), maxOutput))
	n, _ := f.ReadAt(text, info.Size()-int64(len(text))) // on an error the message is shorter
	return text[:n]
}

// cleanBundle removes the files that a command left in its bundle.
func (r *Runtime) cleanBundle(dir string, err *error) {
	for _, name := range []string{logFile, pidFile, internalPIDFile} {
		if e := os.Remove(filepath.Join(dir, name)); e != nil && !errors.Is(e, os.ErrNotExist) {
			*err = errors.Join(*err, e)
		}
	}
	*err = errors.Join(*err, removeTempDir(filepath.Join(dir, tempDir)))
}

// Bundle holds the parts of a container's spec that are needed while it exists.
type Bundle struct {
	CgroupsPath string                 // in the spec's form
	UIDMappings []specs.LinuxIDMapping // of its user namespace; empty: the host's
	GIDMappings []specs.LinuxIDMapping
}

// ReadBundle reads the spec in the bundle of a container. The error wraps fs.ErrNotExist if there
// is none.
func ReadBundle(dir string) (Bundle, error) {
	data, err := os.ReadFile(filepath.Join(dir, ConfigFile))
	if err != nil {
		return Bundle{}, fmt.Errorf("spec of a container: %w", err)
	}
	var spec struct{ Linux Bundle }
	if err := json.Unmarshal(data, &spec); err != nil {
		return Bundle{}, fmt.Errorf("spec of the container in %s: %w", dir, err)
	}
	return spec.Linux, nil
}

func readPID(path string) (int, error) {
	data, err := os.ReadFile(path)
	if err != nil {
		return 0, fmt.Errorf("process ID from the runtime: %w", err)
	}
	pid, err := strconv.Atoi(strings.TrimSpace(string(data)))
	if err != nil || pid <= 0 {
		return 0, fmt.Errorf("process ID from the runtime: %q is none", data)
	}
	return pid, nil
}
