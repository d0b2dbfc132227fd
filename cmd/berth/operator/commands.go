// Package operator provides the commands that talk to a daemon, or to another CRI runtime, over its
// socket. They use only CRI where they can. cp also uses the host's /proc. trace and
// exec's options --user, --workdir and --env need berth.
package operator

import (
	"fmt"
	"os"

	"github.com/go-logr/logr"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"k8s.io/klog/v2"

	"berth/cmd/berth/cli"
	"berth/cmd/berth/client"
)

// Connection is the socket that commands connect to.
type Connection struct{ Socket string }

// AddFlag adds --socket to flags of cmd, and crictl's name for it to cmd and its subcommands.
func (o *Connection) AddFlag(cmd *cobra.Command, flags *pflag.FlagSet) {
	flags.StringVarP(&o.Socket, "socket", "s", defaultSocket(),
		"CRI socket of the runtime; also --runtime-endpoint (environment: BERTH_SOCKET, CONTAINER_RUNTIME_ENDPOINT)")
	cmd.SetGlobalNormalizationFunc(crictlNames)
}

// Commands returns the commands that talk to a daemon.
func Commands() []*cobra.Command {
	o := &Connection{}
	commands := []*cobra.Command{
		runCommand(o), psCommand(o), logsCommand(o), execCommand(o), cpCommand(o), rmCommand(o), imagesCommand(o),
		pullCommand(o), versionCommand(o), checkpointCommand(o), restoreCommand(o), traceCommand(o),
	}
	for _, cmd := range commands {
		o.AddFlag(cmd, cmd.Flags())
		cmd.SilenceUsage, cmd.SilenceErrors = true, true
	}
	return commands
}

// ImageCommands returns the commands `ls` and `pull` for the group `berth image`, which adds the
// flags of o. They are `berth images` and `berth pull`.
func ImageCommands(o *Connection) []*cobra.Command {
	ls := imagesCommand(o)
	ls.Use, ls.Aliases = "ls", []string{"list"}
	return []*cobra.Command{ls, pullCommand(o)}
}

// crictlNames accepts crictl's name of --socket.
func crictlNames(_ *pflag.FlagSet, name string) pflag.NormalizedName {
	if name == "runtime-endpoint" {
		name = "socket"
	}
	return pflag.NormalizedName(name)
}

// SilenceLibraries drops the messages that libraries such as k8s.io/client-go log through klog to
// standard error, where they would mix with the command's output. The libraries also return these
// errors.
func SilenceLibraries() {
	klog.SetLoggerWithOptions(logr.Discard(), klog.ContextualLogger(true))
}

func defaultSocket() string {
	for _, name := range []string{"BERTH_SOCKET", "CONTAINER_RUNTIME_ENDPOINT"} {
		if s := os.Getenv(name); s != "" {
			return s
		}
	}
	return client.DefaultSocket
}

// Connected returns a command's body that connects to the runtime and then calls run. An interrupt
// cancels the context of the command.
func (o *Connection) Connected(
	run func(cmd *cobra.Command, args []string, c *client.Client) error) func(*cobra.Command, []string) error {
	return o.dialed(func(cmd *cobra.Command, args []string, c *client.Client) error {
		ctx, stop := cli.Interruptible(cmd.Context())
		defer stop()
		cmd.SetContext(ctx)
		return cli.InterruptStatus(ctx, run(cmd, args, c))
	})
}

// dialed is Connected for a command that handles interrupts itself.
func (o *Connection) dialed(
	run func(cmd *cobra.Command, args []string, c *client.Client) error) func(*cobra.Command, []string) error {
	return func(cmd *cobra.Command, args []string) error {
		c, err := client.Dial(cmd.Context(), o.Socket)
		if err != nil {
			return err
		}
		err = run(cmd, args, c)
		if closeErr := c.Close(); err == nil && closeErr != nil {
			err = fmt.Errorf("close connection to %s: %w", o.Socket, closeErr)
		}
		return err
	}
}
