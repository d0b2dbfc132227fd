// Package check provides the command `berth check`.
package check

import (
	"context"
	"fmt"
	"io"
	"os"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"berth/cmd/berth/check/nodecheck"
	"berth/cmd/berth/check/statecheck"
	"berth/cmd/berth/cli"
	"berth/cmd/berth/client"
	"berth/cmd/config"
	"berth/cmd/node"
	"berth/cni/berthnet"
	"berth/internal/host"
)

// Command returns the command `berth check`.
func Command() *cobra.Command {
	var o options
	cmd := &cobra.Command{
		Use:   "check",
		Short: "Check the node, or with --state berth's records",
		Long: `Check whether this node can run berth and kubelet's pods: kernel features, cgroups,
directories, mount propagation, programs, sockets of other runtimes, features that
networks need, and the CNI network. The check changes nothing and needs no daemon.
It prints problems and a summary, with --verbose everything that it checked. The exit
code is 0 without a problem, 3 with warnings only, and 1 if no pod could run. Without
a CNI network, pods on the host's network run.

With --state, compare berth's records with this machine and print each difference:
processes, shims, network namespaces, addresses, layers, mounts, file descriptors,
records, with --bytes the content of layers, and CRI's lists. The check changes
nothing, works with and without a running daemon, and fails on a difference.

With --registry HOST, contact the host and its mirrors in the order in which a pull
does, and print DNS, TCP, TLS and authentication. With --registry HOST/REPOSITORY[:TAG]
also fetch the manifest, and test range requests and the speed. It fails if the last
host, the registry itself, fails.

If a daemon serves on the socket (--listen), the check uses its configuration and
flags, else the configuration file. With --config the node is checked for that file.`,
		Args: cli.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return run(cmd, o) },
	}
	config.AddFlags(cmd.Flags())
	o.show.addFlags(cmd)
	cmd.Flags().BoolVar(&o.bytes, "bytes", false, "with --state: also compare the content of every layer")
	cmd.Flags().StringVar(&o.registry, "registry", "", "check a registry (HOST) or an image in it (HOST/REPOSITORY[:TAG]) instead")
	state := cmd.Flags().Lookup(stateFlag)
	state.NoOptDefVal, state.Usage = noDirectory, "compare records with the machine instead; --state=DIR sets another state directory than the configured one"
	return cmd
}

// options are the command's own options.
type options struct {
	show     display
	bytes    bool   // also compare the content of layers
	registry string // check this registry instead
}

// run executes the check that the flags choose.
func run(cmd *cobra.Command, o options) error {
	ofState := takeStateFlag(cmd.Flags())
	cfg, _, err := config.Load(cmd.Flags())
	if err != nil {
		return err
	}
	ctx, stop := cli.Interruptible(cmd.Context()) // so that tests of the node are undone
	defer stop()
	checked := configured{cfg, "of a daemon started now: none answers at " + cfg.Listen}
	if ofState || !cmd.Flags().Changed("config") {
		if checked, err = askDaemon(ctx, cmd.Flags(), checked); err != nil {
			return err
		}
	}
	switch {
	case o.registry != "":
		return checkRegistry(ctx, cmd, checked.Config, o.registry, o.show.asJSON())
	case ofState:
		return checkState(ctx, cmd, checked.Config, o.bytes, o.show.asJSON())
	default:
		return checkNode(ctx, cmd, checked, o.show)
	}
}

// checkNode checks the node for a configuration.
func checkNode(ctx context.Context, cmd *cobra.Command, checked configured, show display) error {
	checkedNode, err := nodeOf(checked.Config)
	if err != nil {
		return err
	}
	checkedNode.Source = checked.source
	findings := nodecheck.Run(ctx, checkedNode)
	if ctx.Err() != nil {
		return cli.InterruptStatus(ctx, ctx.Err())
	}
	if err := printFindings(cmd.OutOrStdout(), findings, show); err != nil {
		return err
	}
	return statusOf(nodecheck.Worst(findings))
}

// stateFlag is the daemon's option for its state directory. In this command it also selects the
// check of the state.
const (
	stateFlag   = "state"
	noDirectory = "configured" // its value without an argument
)

// takeStateFlag reports whether --state was given. If the flag has no directory, it is not passed
// to the configuration.
func takeStateFlag(flags *pflag.FlagSet) bool {
	f := flags.Lookup(stateFlag)
	given := f.Changed
	f.Changed = given && f.Value.String() != noDirectory
	return given
}

// configured is a configuration with its origin.
type configured struct {
	*config.Config
	source string
}

// askTimeout bounds the wait for the daemon's answer. The daemon answers from memory.
const askTimeout = 5 * time.Second

// askDaemon returns the configuration of the running daemon, including its flags and the flags of
// this command. It returns loaded if no daemon is at the socket, or if the daemon uses other
// directories.
func askDaemon(ctx context.Context, flags *pflag.FlagSet, loaded configured) (configured, error) {
	asking, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	c, err := client.Dial(asking, loaded.Listen)
	if err != nil {
		return loaded, nil
	}
	defer c.Close() // no call is in progress
	told, err := c.Settings(asking)
	if err != nil {
		loaded.source = fmt.Sprintf("of a daemon started now: the process at %s does not report its own: %v",
			loaded.Listen, err)
		return loaded, nil
	}
	running, err := config.LoadReported(flags, told)
	if err != nil {
		return loaded, err
	}
	own, err := config.LoadReported(pflag.NewFlagSet("", pflag.ContinueOnError), told)
	if err != nil {
		return loaded, err
	}
	if running.Root != own.Root || running.State != own.State {
		loaded.source = fmt.Sprintf("of a daemon started now: the one at %s uses the directories %s and %s", loaded.Listen,
			own.Root, own.State)
		return loaded, nil
	}
	running.Listen = loaded.Listen // systemd may have passed the socket
	return configured{running, "of the daemon that serves on " + loaded.Listen}, nil
}

// checkState compares records with the machine.
func checkState(ctx context.Context, cmd *cobra.Command, cfg *config.Config, bytes, asJSON bool) error {
	node, err := statecheck.NodeOf(cfg)
	if err != nil {
		return err
	}
	node.Bytes = bytes
	report, err := statecheck.Run(ctx, node)
	if ctx.Err() != nil {
		return cli.InterruptStatus(ctx, ctx.Err())
	}
	if err != nil {
		return err
	}
	if err := printReport(cmd.OutOrStdout(), report, asJSON); err != nil {
		return err
	}
	if len(report.Differences) > 0 {
		return &cli.ExitStatus{Code: 1}
	}
	return nil
}

func printReport(w io.Writer, r *statecheck.Report, asJSON bool) error {
	if asJSON {
		return cli.PrintJSON(w, r)
	}
	for _, d := range r.Differences {
		if _, err := fmt.Fprintln(w, d); err != nil {
			return err
		}
	}
	for _, p := range r.Pending {
		if _, err := fmt.Fprintln(w, "pending:", p); err != nil {
			return err
		}
	}
	for _, s := range r.Skipped {
		if _, err := fmt.Fprintln(w, "not compared:", s); err != nil {
			return err
		}
	}
	if r.Daemon != 0 {
		// Of an older version if a restart is due.
		program, err := os.Readlink(fmt.Sprintf("/proc/%d/exe", r.Daemon))
		if err == nil {
			_, err = fmt.Fprintf(w, "the daemon is process %d, %s\n", r.Daemon, program)
		}
		if err != nil {
			return fmt.Errorf("print the daemon: %w", err)
		}
	}
	_, err := fmt.Fprintf(w, "%d pods, %d containers, %d images: %d differences\n",
		r.Pods, r.Containers, r.Images, len(r.Differences))
	return err
}

// nodeOf returns the settings that a daemon would start with. The checks find other obstacles, such
// as sockets and directories in use.
func nodeOf(cfg *config.Config) (*nodecheck.Node, error) {
	facts, err := host.Detect("/")
	if err != nil {
		return nil, err
	}
	systemd, err := node.SystemdCgroup(cfg.CgroupDriver, facts.CgroupV2)
	if err != nil {
		systemd = true // as configured; the checks report the error
	}
	n := &nodecheck.Node{Config: cfg, Facts: facts, SystemdCgroup: systemd}
	if n.Network, err = node.NetworkConfig(cfg, &berthnet.Plugin{Passive: true}); err != nil {
		return nil, err
	}
	n.Shim, n.ShimError = node.FindShim(cfg.ShimPath)
	n.Unpack, n.UnpackError = node.FindUnpack(cfg.UnpackPath)
	n.Stream, n.StreamError = node.FindStream(cfg.StreamPath)
	return n, nil
}

// display is how results are printed.
type display struct {
	json    bool
	verbose bool
	output  cli.Output
}

func (d *display) addFlags(cmd *cobra.Command) {
	d.output.AddFlag(cmd, "text")
	cmd.Flags().BoolVar(&d.json, "json", false, "the same as --output json")
	cmd.Flags().BoolVarP(&d.verbose, "verbose", "v", false, "also print what needs no fix")
}

func (d *display) asJSON() bool { return d.json || d.output.JSON() }

// warningCode is the exit code of a check that found warnings only.
const warningCode = 3

// statusOf returns the exit status for the worst finding.
func statusOf(worst nodecheck.Level) error {
	switch worst {
	case nodecheck.Failure:
		return &cli.ExitStatus{Code: 1}
	case nodecheck.Warning:
		return &cli.ExitStatus{Code: warningCode}
	default:
		return nil
	}
}

// printFindings prints the findings. The text ends with a summary.
func printFindings(w io.Writer, findings []nodecheck.Finding, show display) error {
	if show.asJSON() {
		return cli.PrintJSON(w, findings)
	}
	count := map[nodecheck.Level]int{}
	for _, f := range findings {
		count[f.Level]++
		if f.Level == nodecheck.OK && !show.verbose {
			continue
		}
		if _, err := fmt.Fprintf(w, "%-8s %s: %s\n", f.Level, f.Subject, f.Found); err != nil {
			return err
		}
		if f.Fix == "" {
			continue
		}
		if _, err := fmt.Fprintf(w, "%8s → %s\n", "", f.Fix); err != nil {
			return err
		}
	}
	_, err := fmt.Fprintf(w, "%d checks: %d ok, %d warnings, %d failures\n", len(findings),
		count[nodecheck.OK], count[nodecheck.Warning], count[nodecheck.Failure])
	return err
}
