package operator

import (
	"context"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/cmd/berth/cli"
	"berth/cmd/berth/client"
)

// Exit codes of exec and run for failures that are not the command's, as in podman and docker.
const (
	codeFailed        = 125 // berth or the runtime failed
	codeNotExecutable = 126
	codeNotFound      = 127
)

func execCommand(o *Connection) *cobra.Command {
	e := &execution{}
	cmd := &cobra.Command{
		Use:   "exec NAME [--] COMMAND [ARG…]",
		Short: "Run a command in a container and exit with its code",
		Long: `Run a command in a container, print its output, and exit with its code. NAME may be a
pod; -c selects one of several containers.

The exit code is 125 if the command could not be started because of berth or the
runtime, 126 if it is not executable, 127 if it or its directory does not exist, and 128
plus the number of the signal that killed it.

If the connection ends, berth kills the command and all processes it started, so
timeout(1) limits its time. Other runtimes may let it run on. CRI has no fields for --user, --workdir and --env, so they
need berth as the runtime. They change no capabilities.`,
		Example: "  berth exec -it web sh\n  berth exec web -c app -- ls -l /\n  tar c . | berth exec -i web tar x -C /data",
		Args:    cobra.ArbitraryArgs, // checked after the flags behind the name
	}
	cmd.SetFlagErrorFunc(flagStatus)
	flags := cmd.Flags()
	e.container = o.addContainerFlag(cmd)
	e.addFlags(cmd)
	e.options.addFlags(flags)
	flags.SetInterspersed(false) // flags after the container belong to the command
	cmd.ValidArgsFunction = completeFirst(o.completeNames(runningNames, podNames))
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		args, err := splitExec(cmd, args)
		if err != nil {
			return execStatus(err)
		}
		return execStatus(o.Connected(e.run)(cmd, args))
	}
	return cmd
}

// splitExec returns the container and the command. It removes "--", and parses flags between the
// container and "--", as kubectl does: exec web -c app -- ls.
func splitExec(cmd *cobra.Command, args []string) ([]string, error) {
	if len(args) > 1 && strings.HasPrefix(args[1], "-") {
		end := slices.Index(args, "--")
		if end < 0 {
			return nil, fmt.Errorf("%s: put flags before the name, or -- before the command", args[1])
		}
		if err := cmd.Flags().Parse(args[1:end]); err != nil {
			return nil, cli.FlagError(cmd, err)
		}
		if rest := cmd.Flags().Args(); len(rest) > 0 {
			return nil, fmt.Errorf("unexpected argument %q before --", rest[0])
		}
		args = append([]string{args[0]}, args[end+1:]...)
	}
	return args, cli.Args(2, 0, "name a container and a command")(cmd, args)
}

// execution is one run of exec.
type execution struct {
	session
	container *string // of the pod
	options   execOptions
}

func (e *execution) run(cmd *cobra.Command, args []string, c *client.Client) error {
	container, err := findRunning(cmd.Context(), c, args[0], *e.container)
	if err != nil {
		return err
	}
	if e.terminal && e.stdin && !isTerminal(cmd.InOrStdin()) {
		cmd.PrintErrln("berth: warning: standard input is not a terminal; leave out -t for a pipe or file")
	}
	err = e.session.run(cmd.Context(), cmd, func(ctx context.Context) (string, error) {
		return e.options.url(ctx, c, container, &runtimeapi.ExecRequest{ContainerId: container.GetId(), Cmd: args[1:],
			Tty: e.terminal, Stdin: e.stdin, Stdout: true, Stderr: !e.terminal})
	})
	var exit *cli.ExitStatus
	if err == nil || errors.As(err, &exit) {
		return err // the exit status of the command needs no explanation
	}
	return client.Explain("exec in container "+client.ContainerName(container), err)
}

// Texts of errors of libcontainer, runc, crun and runsc about the program itself or its directory.
// CRI has no codes for these errors. As in podman and docker, a missing directory counts as a
// missing program.
var (
	notFound = regexp.MustCompile(`(?i)executable file .*not found|error finding executable |` +
		`(exec: "|open executable|chdir |failed to load ).*: (no such file or directory|not a directory)`)
	notExecutable = regexp.MustCompile(`(?i)(exec: "|exec /|open executable|chdir |failed to load ).*` +
		`: (permission denied|operation not permitted|is a directory|exec format error)`)
)

// execStatus converts a failure to run the command to an exit code.
func execStatus(err error) error {
	var status *cli.ExitStatus
	if err == nil || errors.As(err, &status) {
		return err
	}
	code := codeFailed
	switch text := err.Error(); {
	case notFound.MatchString(text):
		code = codeNotFound
	case notExecutable.MatchString(text):
		code = codeNotExecutable
	}
	return &cli.ExitStatus{Code: code, Cause: err}
}

// flagStatus is cli.FlagError with the exit code of a failure of berth.
func flagStatus(cmd *cobra.Command, err error) error {
	if err = cli.FlagError(cmd, err); errors.Is(err, pflag.ErrHelp) {
		return err
	}
	return execStatus(err)
}
