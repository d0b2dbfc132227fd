// Package reset provides the command `berth reset`, which removes everything that berth has on a
// node besides its programs and its configuration.
package reset

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"strings"
	"time"

	"github.com/moby/term"
	"github.com/spf13/cobra"

	"berth/cmd/berth/cli"
	"berth/cmd/config"
)

// options holds the command's own flags. The other flags belong to the configuration.
type options struct {
	dryRun, yes, stop bool
	grace             time.Duration
}

// Command returns the command `berth reset`.
func Command() *cobra.Command {
	var o options
	cmd := &cobra.Command{
		Use:     "reset",
		Aliases: []string{"uninstall"},
		Short:   "Remove all pods, images, networks and state from this node",
		Long: `Remove everything that berth created on this node: pods with their containers, images, the built-in
network's bridge and nftables table, mounts, the AppArmor profile, and the directories
root and state of the configuration. Programs and configuration files stay. Volumes,
logs and CNI configurations belong to others and stay, too.

The command prints a list and asks for confirmation. Containers get SIGTERM and
the grace period. If a pod cannot be removed, its state stays, and the command can be
repeated.

Drain the node and stop kubelet first. A daemon must not run: stop it with "systemctl
stop berth.socket berth.service", or let --stop-daemon stop it.`,
		Args: cli.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			cfg, _, err := config.Load(cmd.Flags())
			if err != nil {
				return err
			}
			if os.Geteuid() != 0 {
				return errors.New("berth reset must run as root")
			}
			ctx, stop := cli.Interruptible(cmd.Context())
			defer stop()
			return cli.InterruptStatus(ctx, o.run(ctx, cfg, cmd.InOrStdin(), cmd.OutOrStdout()))
		},
	}
	flags := cmd.Flags()
	config.AddFlags(flags)
	flags.BoolVar(&o.dryRun, "dry-run", false, "print what would be removed, and change nothing")
	flags.BoolVarP(&o.yes, "yes", "y", false, "do not ask for confirmation")
	flags.BoolVar(&o.stop, "stop-daemon", false, "stop a running daemon first, and the sockets of systemd that would start it")
	cli.DurationVar(flags, &o.grace, "grace-period", 10*time.Second, "time for containers to exit after SIGTERM")
	return cmd
}

// run prints a list of berth's parts on the node. It removes the listed things, unless this is a
// dry run.
func (o *options) run(ctx context.Context, cfg *config.Config, in io.Reader, out io.Writer) error {
	found, err := survey(cfg)
	if err != nil {
		return err
	}
	pid, err := daemonOf(cfg)
	if err != nil {
		return err
	}
	if err := found.print(out, pid); err != nil {
		return err
	}
	switch {
	case o.dryRun, found.empty():
		return nil
	case pid != 0 && !o.stop:
		return fmt.Errorf("berth is running (process %d): stop it first with "+
			"\"systemctl stop berth.socket berth.service\", or use --stop-daemon", pid)
	}
	if err := o.confirm(in, out); err != nil {
		return err
	}
	if o.stop {
		if err := stopDaemon(ctx, pid, cfg.Listen); err != nil {
			return err
		}
	}
	log := slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelWarn}))
	if err := remove(ctx, cfg, o.grace, log); err != nil {
		return err
	}
	return o.report(cfg, out)
}

// confirm asks for confirmation, unless --yes was given.
func (o *options) confirm(in io.Reader, out io.Writer) error {
	if o.yes {
		return nil
	}
	if file, ok := in.(*os.File); !ok || !term.IsTerminal(file.Fd()) {
		return errors.New("standard input is not a terminal: confirm the removal with --yes")
	}
	if _, err := fmt.Fprint(out, "Remove all of this? [y/N] "); err != nil {
		return err
	}
	answer, err := bufio.NewReader(in).ReadString('\n')
	if err != nil {
		return fmt.Errorf("read the answer: %w", err)
	}
	switch strings.ToLower(strings.TrimSpace(answer)) {
	case "y", "yes":
		return nil
	}
	return errors.New("not confirmed, nothing was removed")
}

// report checks that nothing is left.
func (o *options) report(cfg *config.Config, out io.Writer) error {
	left, err := survey(cfg)
	if err != nil {
		return err
	}
	if !left.empty() {
		return fmt.Errorf("not removed: %s", strings.Join(left.lines(), "; "))
	}
	_, err = fmt.Fprintln(out, "Removed.")
	return err
}
