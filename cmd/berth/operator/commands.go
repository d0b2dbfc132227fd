// Package operator provides the commands that talk to a daemon, or to another CRI runtime, over its
// socket. They use only CRI where they can. cp, top and kill also use the host's /proc. trace and
// exec's options --user, --workdir and --env need berth.
package operator

import (
	"fmt"
	"os"

	"github.com/go-logr/logr"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"k8s.io/klog/v2"

	"berth/cmd/berth/client"
)

// connection is the socket that all commands of this package connect to.
type connection struct{ socket string }

// Commands returns the commands that talk to a daemon.
func Commands() []*cobra.Command {
	o := &connection{}
	commands := []*cobra.Command{
		runCommand(o), psCommand(o), podsCommand(o), inspectCommand(o), logsCommand(o), execCommand(o), attachCommand(o),
		cpCommand(o), portForwardCommand(o), topCommand(o), statsCommand(o), eventsCommand(o), killCommand(o),
		stopCommand(o), rmCommand(o), downCommand(o), imagesCommand(o), pullCommand(o),
		dfCommand(o), infoCommand(o), versionCommand(o), checkpointCommand(o), restoreCommand(o),
		traceCommand(o),
	}
	for _, cmd := range commands {
		short := "s"
		if cmd.Flags().ShorthandLookup(short) != nil { // kill's --signal
			short = ""
		}
		cmd.Flags().StringVarP(&o.socket, "socket", short, defaultSocket(),
			"CRI socket of the runtime; also --runtime-endpoint (environment: BERTH_SOCKET, CONTAINER_RUNTIME_ENDPOINT)")
		cmd.Flags().SetNormalizeFunc(crictlNames)
		cmd.SilenceUsage, cmd.SilenceErrors = true, true
	}
	return commands
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

// connected returns a command's body that connects to the runtime and then calls run.
func (o *connection) connected(
	run func(cmd *cobra.Command, args []string, c *client.Client) error) func(*cobra.Command, []string) error {
	return func(cmd *cobra.Command, args []string) error {
		c, err := client.Dial(cmd.Context(), o.socket)
		if err != nil {
			return err
		}
		err = run(cmd, args, c)
		if closeErr := c.Close(); err == nil && closeErr != nil {
			err = fmt.Errorf("close connection to %s: %w", o.socket, closeErr)
		}
		return err
	}
}
