package taskapi

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"

	task "github.com/containerd/containerd/api/runtime/task/v3"
	specs "github.com/opencontainers/runtime-spec/specs-go"
	"github.com/opencontainers/runtime-spec/specs-go/features"
	"golang.org/x/sys/unix"

	"berth/internal/failpoint"
)

// The annotation that distinguishes the sandbox of a pod from its other containers.
const (
	typeAnnotation = "io.kubernetes.cri.container-type"
	typeSandbox    = "sandbox"
)

// Descriptors that run and attend get.
const (
	verdictFD = 3 // run: it receives the exit
	startedFD = 4 // it receives "ok" when the process has started
)

// killed is the exit code of a container whose shim was lost.
const killed = 128 + int(unix.SIGKILL)

// command is one call of the program.
type command struct {
	pod
	systemdCgroup bool
	args          []string // after the global options
	global        []string // for a copy of this program

	// Options of the commands.
	bundle, pidFile, internalPIDFile, consoleSocket, process string
	processID                                                int
}

// task is what the state directory has of one task.
type taskRecord struct {
	streams
	Bundle string   `json:"bundle"`
	Mounts []string `json:"mounts,omitempty"` // below Bundle, in the shim's mount namespace
	// Deletes counts the calls of the shim's command delete, without the one that succeeded.
	Deletes int `json:"deletes,omitempty"`
}

// Main carries out one command and returns the exit code.
func Main(args []string) int {
	log, code, err := run(args)
	if err == nil {
		return code
	}
	fmt.Fprintln(os.Stderr, "berth-task:", err)
	if log != "" {
		line, _ := json.Marshal(map[string]string{"level": "error", "msg": err.Error()}) // strings only
		if err := os.WriteFile(log, append(line, '\n'), 0o600); err != nil {
			fmt.Fprintln(os.Stderr, "berth-task: write the log:", err)
		}
	}
	return 1
}

func run(args []string) (log string, code int, err error) {
	var c command
	var options []string
	global := flag.NewFlagSet("berth-task", flag.ContinueOnError)
	global.SetOutput(io.Discard)
	global.StringVar(&c.path, "shim", "", "")
	global.Func("option", "", func(text string) error { options = append(options, text); return nil })
	global.StringVar(&c.dir, "root", "", "")
	global.BoolVar(&c.systemdCgroup, "systemd-cgroup", false, "")
	global.StringVar(&log, "log", "", "")
	global.String("log-format", "", "")
	version := global.Bool("version", false, "")
	if err := global.Parse(args); err != nil {
		return log, 0, err
	}
	if c.program.options, err = typedOptions(c.path, options, c.dir, c.systemdCgroup); err != nil {
		return log, 0, err
	}
	c.args = global.Args()
	c.global = args[:len(args)-len(c.args)]
	if *version {
		return log, 0, c.printVersion()
	}
	if len(c.args) == 0 {
		return log, 0, errors.New("no command")
	}
	name := c.args[0]
	if err := c.parse(); err != nil {
		return log, 0, err
	}
	code, err = c.execute(name)
	return log, code, err
}

// parse parses the options of a command.
func (c *command) parse() error {
	options := flag.NewFlagSet(c.args[0], flag.ContinueOnError)
	options.SetOutput(io.Discard)
	options.StringVar(&c.bundle, "bundle", "", "")
	options.StringVar(&c.pidFile, "pid-file", "", "")
	options.StringVar(&c.internalPIDFile, "internal-pid-file", "", "")
	options.StringVar(&c.consoleSocket, "console-socket", "", "")
	options.StringVar(&c.process, "process", "", "")
	options.IntVar(&c.processID, "pid", 0, "")
	options.IntVar(&c.processID, "pgid", 0, "")
	options.String("resources", "", "")
	options.Bool("force", false, "")
	options.Bool("detach", false, "")
	err := options.Parse(c.args[1:])
	c.args = options.Args()
	return err
}

func (c *command) execute(name string) (code int, err error) {
	ctx := context.Background()
	switch {
	case name == "features":
		return 0, c.printFeatures(ctx)
	case name == "help":
		return 0, c.help(ctx)
	case len(c.args) == 0:
		return 0, fmt.Errorf("%s: no container ID", name)
	}
	id := c.args[0]
	switch name {
	case "create":
		return 0, c.create(ctx, id)
	case "start":
		return 0, c.startTask(ctx, id)
	case "run":
		return 0, c.runTask(ctx, id)
	case "exec":
		return 0, c.startProcess(ctx, id)
	case "attend":
		return c.attend(ctx, id)
	case "state":
		return 0, c.state(ctx, id)
	case "update":
		return 0, c.update(ctx, id)
	case "kill":
		return 0, c.kill(ctx, id)
	case "delete":
		return 0, c.delete(ctx, id)
	}
	return 0, fmt.Errorf("unknown command %q", name)
}

// --- what the shim offers ---------------------------------------------------------

func (c *command) printVersion() error {
	info, err := c.info(context.Background())
	if err != nil {
		// Kata's and older shims have only -v.
		out, versionErr := exec.Command(c.path, "-v").Output()
		if versionErr != nil {
			return errors.Join(err, c.failure("-v", "", versionErr))
		}
		_, err := os.Stdout.Write(out)
		return err
	}
	fmt.Println(info.GetName(), info.GetVersion().GetVersion())
	return nil
}

// features returns what the shim says of the runtime-spec's features; nil: nothing.
func (c *command) features(ctx context.Context) (*features.Features, error) {
	info, err := c.info(ctx)
	if err != nil || info.GetFeatures() == nil {
		return nil, nil // an old shim, or one that runs no runtime with the command features
	}
	var f features.Features
	if err := json.Unmarshal(info.GetFeatures().GetValue(), &f); err != nil {
		return nil, fmt.Errorf("features of the shim: %w", err)
	}
	return &f, nil
}

func (c *command) printFeatures(ctx context.Context) error {
	f, err := c.features(ctx)
	if err != nil {
		return err
	}
	if f == nil {
		f = &features.Features{}
	}
	return json.NewEncoder(os.Stdout).Encode(f)
}

// gVisorAnnotations begins the names of annotations among the features of gVisor's shim.
const gVisorAnnotations = "dev.gvisor."

// help describes the command wait, as runsc does, if the processes of containers are invisible to
// the node. Shims whose containers have namespaces of the node report them. So does gVisor's, whose
// containers have namespaces in their sandbox.
func (c *command) help(ctx context.Context) error {
	f, err := c.features(ctx)
	if err != nil {
		return err
	}
	if f != nil && f.Linux != nil && slices.Contains(f.Linux.Namespaces, string(specs.PIDNamespace)) && !isGVisor(f) {
		return errors.New("no such command")
	}
	fmt.Println("wait - included in run")
	return nil
}

func isGVisor(f *features.Features) bool {
	for name := range f.Annotations {
		if strings.HasPrefix(name, gVisorAnnotations) {
			return true
		}
	}
	return false
}

// --- tasks ------------------------------------------------------------------------

func (c *command) create(ctx context.Context, id string) (err error) {
	spec, err := readJSON[specs.Spec](filepath.Join(c.bundle, "config.json"))
	if err != nil {
		return err
	}
	failpoint.Reach("task.make-root")
	if err := os.MkdirAll(c.dir, 0o700); err != nil {
		return err
	}
	failpoint.Reach("task.root-made")
	unlock, err := c.lock()
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, unlock()) }()
	failpoint.Reach("task.make-directory")
	if err := os.Mkdir(c.taskDir(id), 0o700); err != nil {
		return err
	}
	failpoint.Reach("task.directory-made")
	t := taskRecord{Bundle: c.bundle}
	if spec.Annotations[typeAnnotation] == typeSandbox {
		return c.createSandbox(ctx, id, &spec, t)
	}
	return c.createContainer(ctx, id, &spec, t)
}

// createSandbox starts the shim. The sandbox's container has no streams.
func (c *command) createSandbox(ctx context.Context, id string, spec *specs.Spec, t taskRecord) (err error) {
	if err := c.saveTask(id, t); err != nil {
		return err
	}
	log, err := openShimLog(c.bundle)
	if err != nil {
		return err
	}
	defer log.explain(&err)
	shim, r, err := c.startShim(ctx, id, c.bundle, shimCgroup(spec.Linux.CgroupsPath, c.systemdCgroup))
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, shim.close()) }()
	if err := c.createTask(ctx, shim, id, spec, t); err != nil {
		return err
	}
	return c.identify(ctx, shim, r)
}

// createContainer creates a task in the shim of its sandbox. If create fails, the launcher calls
// delete.
func (c *command) createContainer(ctx context.Context, id string, spec *specs.Spec, t taskRecord) (err error) {
	shim, r, err := c.connect(ctx)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, shim.close()) }()
	if t.streams, err = makeStreams(c.taskDir(id), spec.Process.Terminal); err != nil {
		return err
	}
	release, err := t.hold()
	if err != nil {
		return err
	}
	defer release()
	var shared []string
	t.Mounts, shared = ownMounts(spec, c.bundle)
	if err := c.saveTask(id, t); err != nil {
		return err
	}
	if err := passMounts(r.PID, slices.Concat(t.Mounts, shared)); err != nil {
		return err
	}
	err = c.createTask(ctx, shim, id, spec, t)
	return errors.Join(err, unmountIn(r.PID, shared))
}

func (c *command) saveTask(id string, t taskRecord) error {
	return writeJSON(filepath.Join(c.taskDir(id), "task.json"), t)
}

func (c *command) readTask(id string) (taskRecord, error) {
	return readJSON[taskRecord](filepath.Join(c.taskDir(id), "task.json"))
}

func (c *command) createTask(ctx context.Context, shim *client, id string, spec *specs.Spec, t taskRecord) error {
	options, err := optionsFor(c.options, spec)
	if err != nil {
		return err
	}
	failpoint.Reach("task.create")
	pid, err := shim.create(ctx, &task.CreateTaskRequest{
		ID: id, Bundle: c.bundle, Options: options,
		Terminal: t.Terminal, Stdin: t.Stdin, Stdout: t.Stdout, Stderr: t.Stderr,
	})
	failpoint.Reach("task.created")
	if err != nil {
		return err
	}
	return os.WriteFile(c.pidFile, []byte(strconv.Itoa(pid)), 0o600)
}

// startTask starts the task of a sandbox, which nobody attends.
func (c *command) startTask(ctx context.Context, id string) (err error) {
	shim, _, err := c.connect(ctx)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, shim.close()) }()
	_, err = shim.start(ctx, id, "")
	return err
}

// runTask starts a task, copies its streams, and writes its exit to verdictFD.
func (c *command) runTask(ctx context.Context, id string) error {
	t, err := c.readTask(id)
	if err != nil {
		return err
	}
	a := &attendant{streams: t.streams, id: id}
	if err := c.attendStart(ctx, a, nil); err != nil {
		return err
	}
	code := c.awaitExit(ctx, a)
	a.finish()
	_, err = fmt.Fprintf(os.NewFile(verdictFD, "verdict"), `{"id": %q, "exitStatus": %d}`+"\n", id, code)
	return err
}

// attendStart starts a process and the copying of its streams, and reports that. process is nil for
// a task.
func (c *command) attendStart(ctx context.Context, a *attendant, process *specs.Process) (err error) {
	if a.client, _, err = c.connect(ctx); err != nil {
		return err
	}
	release, err := a.hold()
	if err != nil {
		return err
	}
	defer release()
	if a.Terminal {
		if a.slave, err = makeTerminal(c.consoleSocket); err != nil {
			return err
		}
	}
	if process != nil {
		err = a.client.addProcess(ctx, &task.ExecProcessRequest{ID: a.id, ExecID: a.exec,
			Terminal: a.Terminal, Stdin: a.Stdin, Stdout: a.Stdout, Stderr: a.Stderr}, process)
	}
	if err != nil {
		return err
	}
	failpoint.Reach("task.start")
	if _, err := a.client.start(ctx, a.id, a.exec); err != nil {
		return err
	}
	failpoint.Reach("task.started")
	if err := a.begin(); err != nil {
		return err
	}
	started := os.NewFile(startedFD, "started")
	_, err = started.WriteString("ok")
	return errors.Join(err, started.Close())
}

// awaitExit returns the exit code of a process. If the shim is lost, its container is removed.
func (c *command) awaitExit(ctx context.Context, a *attendant) (code int) {
	for {
		code, err := a.client.wait(ctx, a.id, a.exec)
		if err == nil {
			return code
		}
		if !errors.Is(err, errUnanswered) {
			return killed // somebody has deleted it
		}
		next, _, err := c.connect(ctx)
		if err != nil {
			if a.exec == "" {
				_ = c.delete(ctx, a.id) // the daemon repeats it
			}
			return killed
		}
		_ = a.client.close() // it is broken
		a.client = next
	}
}

func (c *command) state(ctx context.Context, id string) (err error) {
	shim, _, err := c.connect(ctx)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, shim.close()) }()
	var state task.StateResponse
	if err := shim.call(ctx, callTimeout, "State", &task.StateRequest{ID: id}, &state); err != nil {
		return err
	}
	return json.NewEncoder(os.Stdout).Encode(map[string]any{"id": id, "pid": state.Pid, "status": statusName(&state)})
}

// update changes the limits of a task to those in standard input.
func (c *command) update(ctx context.Context, id string) (err error) {
	resources, err := io.ReadAll(os.Stdin)
	if err != nil {
		return err
	}
	shim, _, err := c.connect(ctx)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, shim.close()) }()
	return shim.update(ctx, id, resources)
}

// --- further processes --------------------------------------------------------------

func execName(pid int) string { return "exec-" + strconv.Itoa(pid) }

// startProcess starts a copy of this program that attends the process. The copy's PID identifies
// the process.
func (c *command) startProcess(ctx context.Context, id string) (err error) {
	process, err := readJSON[specs.Process](c.process)
	if err != nil {
		return err
	}
	r, w, err := os.Pipe()
	if err != nil {
		return err
	}
	defer r.Close()
	said, err := os.CreateTemp(filepath.Dir(c.process), "attend")
	if err != nil {
		return err
	}
	defer said.Close()
	args := append(slices.Clone(c.global), "attend", "--process", c.process, "--console-socket", c.consoleSocket, id)
	cmd := exec.CommandContext(ctx, "/proc/self/exe", args...)
	cmd.Args[0] = os.Args[0]
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	cmd.ExtraFiles = []*os.File{said, w}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: process.Terminal}
	failpoint.Reach("task.start-attendant")
	err = cmd.Start()
	failpoint.Reach("task.attendant-started")
	if err := errors.Join(err, w.Close()); err != nil {
		return err
	}
	answer, err := io.ReadAll(r)
	if err == nil && string(answer) != "ok" {
		err = errors.Join(attendError(said), ignoreExit(cmd.Wait()))
	}
	if err != nil {
		return err
	}
	pid := []byte(strconv.Itoa(cmd.Process.Pid))
	return errors.Join(os.WriteFile(c.internalPIDFile, pid, 0o600), os.WriteFile(c.pidFile, pid, 0o600))
}

// attendError returns the error that attend has written.
func attendError(f *os.File) error {
	text := make([]byte, maxMessage)
	n, _ := f.ReadAt(text, 0)
	if n == 0 {
		return errors.New("the process's attendant ended early")
	}
	return errors.New(string(text[:n]))
}

func ignoreExit(err error) error {
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		return nil
	}
	return err
}

// attend starts a process of a task and attends it. Its exit code is that of the process.
func (c *command) attend(ctx context.Context, id string) (code int, err error) {
	defer func() {
		if err != nil {
			_, _ = os.NewFile(verdictFD, "error").WriteString(err.Error()) // the caller then says that it ended early
		}
	}()
	process, err := readJSON[specs.Process](c.process)
	if err != nil {
		return 0, err
	}
	a := &attendant{id: id, exec: execName(os.Getpid())}
	dir := filepath.Join(c.taskDir(id), a.exec)
	failpoint.Reach("task.make-exec-directory")
	if err := os.Mkdir(dir, 0o700); err != nil {
		return 0, err
	}
	failpoint.Reach("task.exec-directory-made")
	defer func() {
		failpoint.Reach("task.remove-exec-directory")
		err = errors.Join(err, os.RemoveAll(dir))
		failpoint.Reach("task.exec-directory-removed")
	}()
	if a.streams, err = makeStreams(dir, process.Terminal); err != nil {
		return 0, err
	}
	if err = c.attendStart(ctx, a, &process); err == nil {
		code = c.awaitExit(ctx, a)
		a.finish()
	}
	if a.client != nil {
		// A shim keeps a process that did not start, too. A lost shim has no process to delete.
		_ = a.client.delete(ctx, id, a.exec)
	}
	return code, err
}

// --- ends ---------------------------------------------------------------------------

// kill sends a signal. A shim that does not answer to SIGKILL is killed itself, and its container
// with it.
func (c *command) kill(ctx context.Context, id string) (err error) {
	if len(c.args) < 2 {
		return errors.New("kill: no signal")
	}
	signal, err := strconv.ParseUint(c.args[1], 10, 32)
	if err != nil {
		return fmt.Errorf("kill: %w", err)
	}
	process := ""
	if c.processID != 0 {
		process = execName(c.processID)
	}
	shim, r, err := c.connect(ctx)
	if err == nil {
		defer func() { err = errors.Join(err, shim.close()) }()
		err = shim.kill(ctx, id, process, uint32(signal), false)
	}
	switch {
	case isGone(err):
		return nil
	case errors.Is(err, errUnanswered) && unix.Signal(signal) == unix.SIGKILL && process == "":
		return errors.Join(c.killShim(ctx, r), c.deleteByProgram(ctx, id))
	}
	return err
}

// maxDeletes is how often the shim's command delete is called for a task. After a half-done delete
// Kata's has nothing to read, and fails forever. Containerd ignores its errors, too.
const maxDeletes = 2

// deleteByProgram calls the shim's program to remove a task that no shim serves.
func (c *command) deleteByProgram(ctx context.Context, id string) error {
	t, err := c.readTask(id)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil || t.Deletes == maxDeletes {
		return err
	}
	t.Deletes++ // before the call, which may be killed
	if err := c.saveTask(id, t); err != nil {
		return err
	}
	return c.program.delete(ctx, id, t.Bundle)
}

// delete kills and removes a task. With the task of a sandbox it removes all tasks, and ends the
// shim.
func (c *command) delete(ctx context.Context, id string) (err error) {
	if !c.exists(id) {
		return nil
	}
	unlock, err := c.lock()
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, c.removeIdle(), unlock()) }()
	shim, r, err := c.connect(ctx)
	if err != nil && !errors.Is(err, errUnanswered) && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if shim != nil {
		defer func() { err = errors.Join(err, shim.close()) }()
	}
	if r.Sandbox != id {
		return c.deleteTask(ctx, shim, r, id)
	}
	tasks, err := c.tasks()
	if err != nil {
		return err
	}
	for _, other := range append(slices.DeleteFunc(tasks, func(t string) bool { return t == id }), id) {
		err = errors.Join(err, c.deleteTask(ctx, shim, r, other))
	}
	if err != nil {
		return err
	}
	if shim != nil {
		if err := shim.shutdown(ctx, id); err != nil {
			return err
		}
	}
	return c.endShim(ctx, r)
}

// exists returns whether the pod has a shim, or the task a directory.
func (c *command) exists(id string) bool {
	for _, path := range []string{c.recordPath(), c.taskDir(id)} {
		if _, err := os.Lstat(path); !errors.Is(err, fs.ErrNotExist) {
			return true
		}
	}
	return false
}

// removeIdle removes the lock of a pod that has no shim any more.
func (c *command) removeIdle() error {
	if _, err := os.Lstat(c.recordPath()); !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	failpoint.Reach("task.remove-lock")
	err := os.Remove(c.lockPath())
	failpoint.Reach("task.lock-removed")
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

// tasks returns the IDs of the pod's tasks.
func (c *command) tasks() (ids []string, err error) {
	found, err := filepath.Glob(filepath.Join(c.dir, "*", "task.json"))
	for _, path := range found {
		ids = append(ids, filepath.Base(filepath.Dir(path)))
	}
	return ids, err
}

// deleteTask kills and removes a task. shim is nil if the shim is lost.
func (c *command) deleteTask(ctx context.Context, shim *client, r record, id string) error {
	t, err := c.readTask(id)
	if errors.Is(err, fs.ErrNotExist) {
		return c.removeTaskDir(id)
	}
	if err != nil {
		return err
	}
	err = errUnanswered
	if shim != nil {
		err = endTask(ctx, shim, id)
	}
	if errors.Is(err, errUnanswered) {
		// Its children stay zombies while it hangs.
		if err := c.killShim(ctx, r); err != nil {
			return err
		}
	}
	if err != nil && r.Address != "" { // a shim that was not started has no task
		if byProgram := c.deleteByProgram(ctx, id); byProgram != nil {
			return errors.Join(err, byProgram)
		}
	}
	if shim != nil && err == nil && len(t.Mounts) > 0 && r.PID != 0 {
		if err := unmountIn(r.PID, t.Mounts); err != nil {
			return err
		}
	}
	return c.removeTaskDir(id)
}

func (c *command) removeTaskDir(id string) error {
	failpoint.Reach("task.remove-directory")
	err := os.RemoveAll(c.taskDir(id))
	failpoint.Reach("task.directory-removed")
	return err
}

// endTask kills a task, waits for its end and deletes it.
func endTask(ctx context.Context, shim *client, id string) error {
	if err := shim.kill(ctx, id, "", uint32(unix.SIGKILL), true); err != nil && !isGone(err) {
		return err
	}
	waiting, cancel := context.WithTimeout(ctx, endTimeout)
	defer cancel()
	if _, err := shim.wait(waiting, id, ""); err != nil && !isGone(err) {
		return err
	}
	if err := shim.delete(ctx, id, ""); err != nil && !isGone(err) {
		return err
	}
	return nil
}
