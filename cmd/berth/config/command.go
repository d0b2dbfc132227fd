package config

import (
	"github.com/spf13/cobra"
)

// Command returns the command `berth config`.
func Command() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "config",
		Short: "Help with the configuration file",
		Args:  cobra.NoArgs,
		// Without RunE cobra prints the help for a misspelt subcommand and succeeds.
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	cmd.AddCommand(&cobra.Command{
		Use:   "default",
		Short: "Print a configuration file with every option, its default and its meaning",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			_, err := cmd.OutOrStdout().Write([]byte(DefaultTOML()))
			return err
		},
	})
	return cmd
}
