package main

import (
	"github.com/spf13/cobra"

	"berth/internal/config"
)

func newConfigCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "config",
		Short: "Help with the configuration file",
		Args:  cobra.NoArgs,
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
