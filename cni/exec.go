package cni

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/containernetworking/cni/libcni"
	"github.com/containernetworking/cni/pkg/invoke"
	"github.com/containernetworking/cni/pkg/types"
	"github.com/containernetworking/cni/pkg/version"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"

	"berth/internal/capture"
	"berth/internal/errdefs"
	"berth/internal/failpoint"
	"berth/internal/trace"
)

const (
	maxStdout  = 1 << 20  // bytes of a result
	maxStderr  = 16 << 10 // bytes of stderr that are kept
	maxExcerpt = 512      // bytes of a plugin's text in an error

	// stdinDelay bounds the write of a plugin's remaining stdin after its exit. Then only a child
	// of the plugin can still read it.
	stdinDelay = 500 * time.Millisecond

	// A plugin file that is open for writing cannot be executed (ETXTBSY).
	busyWait    = 100 * time.Millisecond
	busyRetries = 50
)

// errVerbUnknown means that a plugin does not implement a CNI_COMMAND.
var errVerbUnknown = errors.New("verb not supported")

// runner executes plugins for libcni (invoke.Exec). Unlike libcni's implementation it also kills
// the plugin's children and limits the output that it keeps. It reads the output up to the plugin's
// exit, and does not wait for children that continue to print.
type runner struct {
	version.PluginDecoder
	log     *slog.Logger
	runs    *runs
	builtIn map[string]BuiltIn
	ran     func(plugin, verb string, took time.Duration, err error) // nil: none
}

var _ invoke.Exec = (*runner)(nil)

// FindInPath returns the path of a plugin, or FailedPrecondition if none of the directories has it.
func (r *runner) FindInPath(plugin string, dirs []string) (string, error) {
	if r.builtIn[plugin] != nil {
		return builtInPath + plugin, nil
	}
	path, err := invoke.FindInPath(plugin, dirs)
	if err != nil {
		return "", errdefs.FailedPrecondition("CNI plugin %q is not installed in %s", plugin, strings.Join(dirs, " or "))
	}
	return path, nil
}

// ExecPlugin runs a plugin and returns its stdout. If ctx ends first, it kills the plugin and its
// children, and returns DeadlineExceeded or Canceled. If the plugin has reported a failure, the
// error wraps a *types.Error. Its code follows the specification's error code: Unavailable for "try
// again", FailedPrecondition for a bad configuration, otherwise Internal.
func (r *runner) ExecPlugin(ctx context.Context, path string, stdin []byte, environ []string) ([]byte, error) {
	began := time.Now()
	plugin, ok := strings.CutPrefix(path, builtInPath)
	var out []byte
	var err error
	if ok {
		out, err = r.call(ctx, plugin, stdin, environ)
	} else {
		plugin = filepath.Base(path)
		out, err = r.exec(ctx, path, stdin, environ)
	}
	if r.ran != nil && !errors.Is(err, errVerbUnknown) {
		r.ran(plugin, getenv(environ, "CNI_COMMAND"), time.Since(began), err)
	}
	return out, err
}

// exec implements ExecPlugin for a program.
func (r *runner) exec(ctx context.Context, path string, stdin []byte, environ []string) ([]byte, error) {
	run := &pluginRun{path: path, verb: getenv(environ, "CNI_COMMAND"), stdin: stdin, env: withoutServiceVars(environ)}
	defer trace.Begin(ctx, run.name()).End()
	noted, err := r.runs.begin(run.verb + " " + path + " " + getenv(environ, "CNI_CONTAINERID"))
	if err != nil && run.verb == "ADD" {
		return nil, err
	}
	if err != nil { // DEL must run on a full disk, because it may free space
		r.log.Warn("run CNI plugin without a note and a cgroup", "plugin", path, "verb", run.verb, "error", err)
	}
	defer func() { r.runs.end(noted, !run.killed) }()
	run.start = func(cmd *exec.Cmd) error {
		err := r.runs.start(noted, cmd)
		failpoint.Reach("cni.started")
		return err
	}
	for attempt := 0; ; attempt++ {
		failpoint.Reach("cni.exec")
		err := run.exec(ctx)
		failpoint.Reach("cni.executed")
		if !errors.Is(err, unix.ETXTBSY) || attempt == busyRetries {
			r.logStderr(run)
			return run.outcome(ctx, err)
		}
		r.log.Debug("wait for the CNI plugin's file: it is open for writing", "plugin", path)
		select {
		case <-ctx.Done():
			return run.outcome(ctx, err)
		case <-time.After(busyWait):
		}
	}
}

// builtInPath is the prefix of a built-in plugin's path.
const builtInPath = "built-in:"

// call implements ExecPlugin for a built-in plugin.
func (r *runner) call(ctx context.Context, plugin string, stdin []byte, environ []string) ([]byte, error) {
	defer trace.Begin(ctx, plugin).End()
	out, err := r.builtIn[plugin](ctx, stdin, environ)
	if err == nil {
		return out, nil
	}
	if failure, ok := errors.AsType[*types.Error](err); ok {
		return nil, errdefs.New(codeOf(failure), "CNI plugin %s: %w", plugin, failure)
	}
	return nil, errdefs.Internal("CNI plugin %s: %w", plugin, err)
}

func (r *runner) logStderr(run *pluginRun) {
	if len(run.stderr) > 0 {
		r.log.Debug("CNI plugin wrote to stderr", "plugin", run.path, "verb", run.verb, "stderr", string(run.stderr))
	}
}

// pluginRun is one execution of a plugin.
type pluginRun struct {
	path, verb     string
	stdin          []byte
	env            []string
	start          func(*exec.Cmd) error // starts the plugin in its cgroup
	stdout, stderr []byte                // at most maxStdout and maxStderr bytes
	printed        int                   // total bytes of stdout
	killed         bool                  // by a signal
}

// exec starts the plugin and waits for it. If the daemon is killed meanwhile, the plugin continues,
// and the next daemon waits for it (runs.endAll).
func (p *pluginRun) exec(ctx context.Context) error {
	stdout, err := capture.New(maxStdout)
	if err != nil {
		return err
	}
	stderr, err := capture.New(maxStderr)
	if err != nil {
		return errors.Join(err, stdout.End())
	}
	err = p.execInto(ctx, stdout, stderr)
	err = errors.Join(err, stdout.End(), stderr.End())
	p.stdout, p.printed, p.stderr = stdout.Bytes(), stdout.Total(), stderr.Bytes()
	return err
}

func (p *pluginRun) execInto(ctx context.Context, stdout, stderr *capture.Output) error {
	cmd := exec.CommandContext(ctx, p.path)
	cmd.Env = p.env
	cmd.Stdin = bytes.NewReader(p.stdin)
	cmd.Stdout, cmd.Stderr = stdout.File(), stderr.File()
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return unix.Kill(-cmd.Process.Pid, unix.SIGKILL) }
	cmd.WaitDelay = stdinDelay

	if err := p.start(cmd); err != nil {
		return err
	}
	err := errors.Join(stdout.Started(), stderr.Started())
	ended := cmd.Wait()
	// nil: unknown exit status
	p.killed = cmd.ProcessState == nil || cmd.ProcessState.Sys().(syscall.WaitStatus).Signaled()
	if errors.Is(ended, exec.ErrWaitDelay) && cmd.ProcessState.Success() {
		ended = nil
	}
	return errors.Join(ended, err)
}

// outcome maps the exit of the plugin to a result or an error for libcni.
func (p *pluginRun) outcome(ctx context.Context, err error) ([]byte, error) {
	switch {
	case err == nil:
		return p.result()
	case ctx.Err() != nil:
		return nil, errdefs.New(errdefs.Code(ctx.Err()), "CNI plugin %s did not finish in time and was killed: %w",
			p.name(), ctx.Err())
	}
	if _, exited := errors.AsType[*exec.ExitError](err); !exited {
		return nil, errdefs.Internal("CNI plugin %s: %w", p.path, err)
	}
	failure := p.failure(err)
	if p.verb == "DEL" && failure.Code == types.ErrUnknownContainer {
		return nil, nil // CNI section 5: no cleanup needed; libcni continues with the rest of the chain
	}
	if failure.Code == types.ErrInvalidEnvironmentVariables && strings.HasPrefix(failure.Msg, "unknown CNI_COMMAND") {
		return nil, fmt.Errorf("CNI plugin %s: %w", p.name(), errVerbUnknown)
	}
	return nil, errdefs.New(codeOf(failure), "CNI plugin %s: %w", p.name(), failure)
}

func (p *pluginRun) name() string { return filepath.Base(p.path) }

// result returns the output of a successful run. libcni uses it for ADD and VERSION only.
func (p *pluginRun) result() ([]byte, error) {
	if p.printed > maxStdout {
		return nil, errdefs.Internal("CNI plugin %s printed a result of %d bytes, the limit is %d",
			p.name(), p.printed, maxStdout)
	}
	if p.verb == "ADD" {
		if err := checkResult(p.stdout); err != nil {
			return nil, errdefs.Internal("CNI plugin %s succeeded but its result is invalid: %w; it printed %s",
				p.name(), err, excerpt(p.stdout))
		}
	}
	return p.stdout, nil
}

// failure returns the error that the plugin printed. If the plugin printed no error, the returned
// error quotes the output.
func (p *pluginRun) failure(exit error) *types.Error {
	e := &types.Error{}
	if err := json.Unmarshal(p.stdout, e); err != nil || (e.Code == 0 && e.Msg == "") {
		return &types.Error{Code: types.ErrInternal, Msg: fmt.Sprintf("%v, without a CNI error; stdout %s, stderr %s",
			exit, excerpt(p.stdout), excerpt(p.stderr))}
	}
	e.Msg, e.Details = oneLine(e.Msg), oneLine(e.Details)
	return e
}

func codeOf(e *types.Error) codes.Code {
	switch e.Code {
	case types.ErrTryAgainLater, types.ErrPluginNotAvailable, types.ErrLimitedConnectivity:
		return codes.Unavailable
	case types.ErrIncompatibleCNIVersion, types.ErrUnsupportedField, types.ErrInvalidNetworkConfig:
		return codes.FailedPrecondition
	}
	return codes.Internal
}

// runVerb runs a verb for a network instead of a pod (STATUS, GC), with one plugin of the list. It
// returns errVerbUnknown if the plugin does not implement the verb.
func (n *Network) runVerb(ctx context.Context, list *libcni.NetworkConfigList, plugin *libcni.PluginConfig,
	verb string, extra map[string]any) error {
	defer n.cfg.Waits.Begin("CNI "+verb, "network "+list.Name)()
	path, err := n.plugins.FindInPath(plugin.Network.Type, n.dirs.Load().bin)
	if err != nil {
		return err
	}
	inject := map[string]any{"name": list.Name, "cniVersion": list.CNIVersion}
	maps.Copy(inject, extra)
	conf, err := libcni.InjectConf(plugin, inject)
	if err != nil {
		return errdefs.FailedPrecondition("CNI plugin %s: configuration for %s: %w", plugin.Network.Type, verb, err)
	}
	args := &invoke.Args{Command: verb, Path: strings.Join(n.dirs.Load().bin, string(filepath.ListSeparator))}
	return invoke.ExecPluginWithoutResult(ctx, path, conf.Bytes, args, n.plugins)
}

// withoutServiceVars drops the service manager's variables. If it got these variables, a plugin
// could report berth's readiness or take its listening sockets.
func withoutServiceVars(environ []string) []string {
	var out []string
	for _, kv := range environ {
		name, _, _ := strings.Cut(kv, "=")
		switch name {
		case "NOTIFY_SOCKET", "WATCHDOG_PID", "WATCHDOG_USEC", "LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES", "LISTEN_PIDFDID":
		default:
			out = append(out, kv)
		}
	}
	return out
}

func getenv(environ []string, name string) string {
	for _, kv := range environ {
		if v, ok := strings.CutPrefix(kv, name+"="); ok {
			return v
		}
	}
	return ""
}

// excerpt quotes the beginning of a plugin's output for an error.
func excerpt(b []byte) string {
	if len(b) > maxExcerpt {
		return fmt.Sprintf("%q and %d bytes more", b[:maxExcerpt], len(b)-maxExcerpt)
	}
	return fmt.Sprintf("%q", b)
}

// oneLine makes a plugin's text safe for an error: it removes control characters and limits the
// length.
func oneLine(s string) string {
	s = strings.Map(func(r rune) rune {
		if r < ' ' || r == 0x7f {
			return ' '
		}
		return r
	}, strings.ToValidUTF8(s, "?"))
	if len(s) > maxExcerpt {
		s = strings.ToValidUTF8(s[:maxExcerpt], "") + "…"
	}
	return s
}
