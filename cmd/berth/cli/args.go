package cli

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// Args returns a check for the number of a command's arguments. need says what the command needs,
// for example "name a container". If most is 0, there is no limit.
func Args(least, most int, need string) cobra.PositionalArgs {
	return func(cmd *cobra.Command, args []string) error {
		switch {
		case len(args) < least:
			return fmt.Errorf("%s: %s", need, usage(cmd))
		case most > 0 && len(args) > most:
			return fmt.Errorf("unexpected argument %q: %s", args[most], usage(cmd))
		}
		return nil
	}
}

// NoArgs refuses arguments.
func NoArgs(cmd *cobra.Command, args []string) error {
	if len(args) > 0 {
		return fmt.Errorf("unexpected argument %q: %s takes none", args[0], cmd.CommandPath())
	}
	return nil
}

// Group is the body of a command that only has subcommands. Without arguments it prints its help.
func Group(cmd *cobra.Command, args []string) error {
	if len(args) == 0 {
		return cmd.Help()
	}
	return unknownCommand(cmd, args[0])
}

// unknownCommand names similar commands, or the help. A name of three letters may have one wrong
// letter.
func unknownCommand(cmd *cobra.Command, name string) error {
	cmd.SuggestionsMinimumDistance = max(1, min(2, len(name)/3))
	if similar := cmd.SuggestionsFor(name); len(similar) > 0 {
		slices.Sort(similar)
		return fmt.Errorf("unknown command %q: did you mean %s?", cmd.CommandPath()+" "+name, strings.Join(similar, " or "))
	}
	return fmt.Errorf("unknown command %q: see %s --help", cmd.CommandPath()+" "+name, cmd.CommandPath())
}

// FlagError explains an error in a command's flags.
func FlagError(cmd *cobra.Command, err error) error {
	if err == nil || errors.Is(err, pflag.ErrHelp) {
		return err
	}
	return fmt.Errorf("%w: see %s --help", err, cmd.CommandPath())
}

// usage returns a command's usage line without the placeholder of its flags.
func usage(cmd *cobra.Command) string {
	return strings.TrimSuffix(cmd.UseLine(), " [flags]")
}
