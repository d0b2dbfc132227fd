package commands

import (
	"fmt"
	"io"

	"github.com/spf13/cobra"

	"berth/cmd/berth/cli"
	"berth/cmd/berthd/daemon"
	"berth/cmd/config"
)

// configCommand returns the command `berth config`.
func configCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "config",
		Short: "Check and show the configuration",
		Args:  cobra.ArbitraryArgs,
		// If RunE is not set, cobra prints the help for a misspelled subcommand and succeeds.
		RunE: cli.Group,
	}
	cmd.AddCommand(defaultConfigCommand(), checkConfigCommand(), showConfigCommand())
	return cmd
}

func defaultConfigCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "default",
		Short: "Print a configuration file with every option, its default and its meaning",
		Args:  cli.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			_, err := io.WriteString(cmd.OutOrStdout(), config.DefaultTOML())
			return err
		},
	}
}

func checkConfigCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "check",
		Short: "Check the configuration files without a daemon",
		Long: `Check the configuration file, the files of its directory (config.d) and the given
flags of the daemon, and the files that they name. Print warnings about obsolete
keys. Fail with the file and line of each error. As root, also fail if pods run that
belong to another root or state directory.`,
		Args: cli.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			c, warnings, err := config.Load(cmd.Flags())
			if err != nil {
				return err
			}
			for _, w := range warnings {
				fmt.Fprintln(cmd.ErrOrStderr(), "warning:", w)
			}
			if err := daemon.Check(c); err != nil {
				return err
			}
			_, err = fmt.Fprintln(cmd.OutOrStdout(), "the configuration is valid")
			return err
		},
	}
	config.AddFlags(cmd.Flags())
	return cmd
}

func showConfigCommand() *cobra.Command {
	var all bool
	cmd := &cobra.Command{
		Use:   "show",
		Short: "Print the configuration that files and flags result in",
		Long: `Print the configuration that results from the configuration file, the files of its
directory (config.d) and the given flags of the daemon, as one TOML file. It has
only the options that differ from their defaults.`,
		Args: cli.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			c, _, err := config.Load(cmd.Flags())
			if err != nil {
				return err
			}
			_, err = io.WriteString(cmd.OutOrStdout(), c.TOML(all))
			return err
		},
	}
	config.AddFlags(cmd.Flags())
	cmd.Flags().BoolVarP(&all, "all", "a", false, "print all options")
	return cmd
}
