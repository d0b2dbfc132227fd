package main

import (
	"github.com/spf13/cobra"

	"berth/cmd/berth/config"
)

func newConfigCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "config",
		Short: "Help with the configuration file",
		Args:  cobra.NoArgs,
		// Without it cobra prints the help for a misspelt subcommand too, and succeeds.
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	cmd.AddCommand(&cobra.Command{
		Use:   "default",
		Short: "Print a configuration file with every option, its default and its meaning",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			_, err := cmd.OutOrStdout().Write([]byte(config.DefaultTOML()))
			return err
		},
	})
	return cmd
}
