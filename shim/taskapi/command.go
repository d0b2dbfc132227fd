package taskapi

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"

	task "github.com/containerd/containerd/api/runtime/task/v3"
	"golang.org/x/sys/unix"
)

// The annotation that distinguishes the sandbox of a pod from its other containers.
const (
	typeAnnotation = "io.kubernetes.cri.container-type"
	typeSandbox    = "sandbox"
)

// Descriptors that commands get.
const (
	listenFD  = 3 // watch: the socket for events
	verdictFD = 3 // run: it receives the exit
	startedFD = 4 // run: it receives "ok" when the process has started
	attendFD  = 3 // attend: it receives "ok", or an error
)

// killed is the exit code of a container whose shim was lost.
const killed = 128 + int(unix.SIGKILL)

// command is one call of the program.
type command struct {
	pod
	systemdCgroup bool
	watches       bool     // somebody receives the shim's events
	visible       bool     // the node sees the processes of containers
	args          []string // after the global options
	global        []string // for a copy of this program

	// Options of the commands.
	bundle, pidFile, internalPIDFile, consoleSocket, process string
	processID                                                int
}

// task is what the state directory has of one task.
type taskRecord struct {
	streams
	Bundle string `json:"bundle"`
	// Mounts are paths below Bundle on which a mount may lie in the shim's mount namespace.
	Mounts []string `json:"mounts,omitempty"`
	// Created: the shim has answered to Create. Without that it may still make the container.
	Created bool `json:"created,omitempty"`
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
	global.BoolVar(&c.visible, "visible", false, "")
	global.BoolVar(&c.watches, "watch", false, "")
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
	case "watch":
		return 0, c.watch(ctx)
	case "state":
		return 0, c.state(ctx, id)
	case "usage":
		return 0, c.usage(ctx, id)
	case "update":
		return 0, c.update(ctx, id)
	case "kill":
		return 0, c.kill(ctx, id)
	case "delete":
		return 0, c.delete(ctx, id)
	}
	return 0, fmt.Errorf("unknown command %q", name)
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
