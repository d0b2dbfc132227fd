package main

import "github.com/spf13/cobra"

// addOperatorCommands adds the subcommands that talk to a running daemon.
func addOperatorCommands(*cobra.Command) {}
