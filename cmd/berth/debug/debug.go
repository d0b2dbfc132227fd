// Package debug provides the command `berth debug bundle`, which collects data for a bug report.
//
// # Contract
//
// The command also works if the daemon hangs or does not run. Each part has a time limit. A part
// that fails leaves a note in the summary. The command changes nothing on the node.
//
// The bundle has no credentials. It contains only text that is known to be harmless. This includes
// numbers, fields with a fixed form, names of the node's objects, and words that berth's programs
// contain. The command reads no file with credentials, and no environment, command line or
// annotation of a container.
package debug

import (
	"context"
	"fmt"
	"io"
	"os"
	"time"

	"github.com/spf13/cobra"

	"berth/cmd/berth/cli"
	"berth/cmd/config"
)

// Command returns the command `berth debug`.
func Command() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "debug",
		Short: "Collect data for a bug report",
		Args:  cobra.ArbitraryArgs,
		RunE:  cli.Group,
	}
	cmd.AddCommand(bundleCommand())
	return cmd
}

// partTimeout is the default time limit of a part.
const partTimeout = 20 * time.Second

func bundleCommand() *cobra.Command {
	var output, logFile string
	var timeout time.Duration
	cmd := &cobra.Command{
		Use:   "bundle",
		Short: "Write a tar.gz file with data for a bug report",
		Long: `Write a tar.gz file with data for a bug report: configuration, checks of the node
and of berth's records, status, traces of pod starts, goroutines, memory profile,
metrics, log, versions, kernel, mounts and cgroups. It also works if the daemon
hangs or does not run. SUMMARY.txt in the file lists the parts that failed.

The file contains what is known to be harmless: numbers, addresses, names of pods
and images, known options, and words of berth's own messages. REMOVED stands for
everything else. Environment, arguments and annotations of containers are left out.
Review the file before you publish it.`,
		Args: cli.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			ctx, stop := cli.Interruptible(cmd.Context())
			defer stop()
			n := newNode(ctx, cmd.Flags(), logFile)
			name := fmt.Sprintf("berth-debug-%s-%s", hostName(), time.Now().UTC().Format("20060102T150405Z"))
			w, done, err := create(output, name, cmd.OutOrStdout())
			if err != nil {
				return err
			}
			results := collect(ctx, n.parts(), timeout)
			if ctx.Err() != nil {
				return cli.InterruptStatus(ctx, done(ctx.Err()))
			}
			if err := done(n.mask.write(w, name, results)); err != nil {
				return err
			}
			report(cmd.ErrOrStderr(), results)
			return nil
		},
	}
	config.AddFlags(cmd.Flags())
	cmd.Flags().StringVarP(&output, "output", "o", "", "file to write, or - for standard output (default berth-debug-HOST-TIME.tar.gz)")
	cli.DurationVar(cmd.Flags(), &timeout, "limit", partTimeout, "time limit of each part")
	cmd.Flags().StringVar(&logFile, "log", "", "log file of the daemon; empty: the journal of berth.service")
	return cmd
}

func hostName() string {
	name, err := os.Hostname()
	if err != nil {
		return "node"
	}
	return name
}

// create opens the output. done closes it, and removes the file after an error.
func create(output, name string, stdout io.Writer) (_ io.Writer, done func(error) error, err error) {
	if output == "-" {
		return stdout, func(err error) error { return err }, nil
	}
	if output == "" {
		output = name + ".tar.gz"
	}
	f, err := os.OpenFile(output, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return nil, nil, fmt.Errorf("create bundle: %w", err)
	}
	return f, func(err error) error {
		if closeErr := f.Close(); err == nil {
			err = closeErr
		}
		if err != nil {
			_ = os.Remove(output) // the first error matters
			return fmt.Errorf("write bundle %s: %w", output, err)
		}
		_, err = fmt.Fprintln(stdout, output)
		return err
	}, nil
}

// report prints the parts that failed.
func report(w io.Writer, results []result) {
	for _, r := range results {
		if r.err != nil {
			fmt.Fprintf(w, "%s: %v\n", r.name, r.err)
		}
	}
}

// part is a file of the bundle.
type part struct {
	name    string
	collect collector
}

// collector returns what may be published. It may return partial content with an error.
type collector func(ctx context.Context) (clean, error)

// cleaner makes content publishable.
type cleaner func(content []byte) (clean, error)
