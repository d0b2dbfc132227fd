package commands

import (
	"fmt"
	"os"
	"path/filepath"
	"syscall"

	"github.com/spf13/cobra"

	"berth/cmd/berthd/daemon"
	"berth/cmd/config"
)

// serveCommand returns the command `berth serve`, which was the daemon up to release 0.2. Units and
// scripts may still start it.
func serveCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "serve",
		Short: "Run the daemon: the same as berthd",
		Long: `Execute the program berthd, which is in the same directory as berth, with the same
arguments and environment. The process ID stays the same.`,
		DisableFlagParsing: true, // berthd parses them
		RunE:               func(_ *cobra.Command, args []string) error { return execDaemon(args) },
	}
	config.AddFlags(cmd.Flags()) // for the help and the completion of shells
	return cmd
}

// execDaemon replaces this process by the daemon. It does not search PATH, because a daemon of
// another version could be there.
func execDaemon(args []string) error {
	self, err := os.Executable()
	if err != nil {
		return fmt.Errorf("find %s: %w", daemon.Program, err)
	}
	program := filepath.Join(filepath.Dir(self), daemon.Program)
	// Exec restores the limit of open files, which Go's runtime has raised.
	if err := syscall.Exec(program, append([]string{daemon.Program}, args...), os.Environ()); err != nil {
		return fmt.Errorf("execute the daemon %s, which must be beside berth: %w", program, err)
	}
	return nil
}
