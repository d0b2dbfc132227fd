package check

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"berth/checkpoint/record"
	"berth/cmd/berth/check/nodecheck"
	"berth/cmd/berth/check/statecheck"
	"berth/cmd/berth/cli"
	"berth/cmd/berthd/daemon"
	"berth/cmd/config"
	"berth/image"
	"berth/internal/version"
	"berth/sandbox/state"
	"berth/shim"
)

// UpgradeCommand returns the command `berth upgrade`.
func UpgradeCommand() *cobra.Command {
	var checks bool
	cmd := &cobra.Command{
		Use:   "upgrade --check [NEW]",
		Short: "Check whether another version can take over this node",
		Long: `Check whether another version of berth can take over this node without harm: its
programs, the configuration, the records of pods, containers and images, the monitors
that run, and the kernel. NEW is the directory of its programs, or its berthd. Its own
berth makes the check; without NEW this one does. The check changes nothing. It prints
what does not fit, and fails if a daemon of that version would not start or serve.
After the restart, "berth check --state" shows that it has taken over.`,
		Example: "  berth upgrade --check ./berth-0.4/bin",
		Args:    cli.Args(0, 1, ""),
		RunE: func(cmd *cobra.Command, args []string) error {
			if !checks {
				return errors.New("an upgrade replaces the programs and restarts the daemon: give --check to check one")
			}
			ctx, stop := cli.Interruptible(cmd.Context())
			defer stop()
			if len(args) == 1 {
				return checkBy(ctx, cmd, args[0])
			}
			return checkUpgrade(ctx, cmd)
		},
	}
	config.AddFlags(cmd.Flags())
	cmd.Flags().BoolVar(&checks, "check", false, "check, and change nothing")
	return cmd
}

// upgradeTimeout bounds the check of another version, whose programs may hang.
const upgradeTimeout = 2 * time.Minute

// cancelTimeout is the time for the end of a canceled check.
const cancelTimeout = 10 * time.Second

// checkBy runs the check of the version at path, with the flags of this command.
func checkBy(ctx context.Context, cmd *cobra.Command, path string) error {
	if info, err := os.Stat(path); err != nil {
		return fmt.Errorf("find the programs of the other version: %w", err)
	} else if !info.IsDir() {
		path = filepath.Dir(path)
	}
	program, err := filepath.Abs(filepath.Join(path, "berth"))
	if err != nil {
		return fmt.Errorf("find the programs of the other version: %w", err)
	}
	args := []string{cmd.Name()}
	cmd.Flags().Visit(func(f *pflag.Flag) { args = append(args, "--"+f.Name+"="+f.Value.String()) })
	ctx, cancel := context.WithTimeout(ctx, upgradeTimeout)
	defer cancel()
	other := exec.CommandContext(ctx, program, args...)
	other.Stdout, other.Stderr = cmd.OutOrStdout(), cmd.ErrOrStderr()
	// It undoes what its probes made.
	other.Cancel = func() error { return other.Process.Signal(syscall.SIGTERM) }
	other.WaitDelay = cancelTimeout
	if err := other.Run(); err != nil {
		return fmt.Errorf("check by %s: %w", program, errors.Join(err, ctx.Err()))
	}
	return nil
}

// dependsOnVersion reports whether a problem of the node may be one for the new version only.
func dependsOnVersion(subject string) bool {
	return subject == "kernel" || subject == "root and state" || strings.HasPrefix(subject, "berth-")
}

// checkUpgrade checks whether the version of this program can take over the node.
func checkUpgrade(ctx context.Context, cmd *cobra.Command) error {
	cfg, warnings, err := config.Load(cmd.Flags())
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, upgradeTimeout)
	defer cancel()
	checked := configured{Config: cfg}
	if !cmd.Flags().Changed("config") { // the daemon may have flags of its own
		if checked, err = askDaemon(ctx, cmd.Flags(), checked); err != nil {
			return err
		}
	}
	next := cfg
	if checked.Config != cfg {
		if next, warnings, err = afterRestart(cmd.Flags(), checked.Config); err != nil {
			return err
		}
	}
	cfg = checked.Config
	findings := []nodecheck.Finding{checkDaemon(ctx), checkConfiguration(next, warnings)}
	for _, check := range []func(*config.Config) (nodecheck.Finding, error){checkRecords, checkLaunches} {
		finding, err := check(cfg)
		if err != nil {
			return err
		}
		findings = append(findings, finding)
	}
	n, err := nodeOf(cfg)
	if err != nil {
		return err
	}
	for _, f := range nodecheck.Run(ctx, n) {
		if f.Level == nodecheck.Failure && !dependsOnVersion(f.Subject) {
			f.Level = nodecheck.Warning // the running version has the same problem
		}
		findings = append(findings, f)
	}
	if ctx.Err() != nil {
		return cli.InterruptStatus(ctx, ctx.Err())
	}
	if _, err := fmt.Fprintf(cmd.OutOrStdout(), "berth %s\n", version.Full()); err != nil {
		return err
	}
	if err := printFindings(cmd.OutOrStdout(), findings, display{}); err != nil {
		return err
	}
	if nodecheck.Worst(findings) == nodecheck.Failure {
		return &cli.ExitStatus{Code: 1}
	}
	return nil
}

// finding returns a failure if there is a problem.
func finding(subject, problem, fix, found string) nodecheck.Finding {
	if problem != "" {
		return nodecheck.Finding{Subject: subject, Level: nodecheck.Failure, Found: problem, Fix: fix}
	}
	return nodecheck.Finding{Subject: subject, Level: nodecheck.OK, Found: found}
}

// checkDaemon executes the daemon beside this program, which must have the same version.
func checkDaemon(ctx context.Context) nodecheck.Finding {
	const subject, fix = "programs", "install all programs of one version in one directory"
	self, err := os.Executable()
	if err != nil {
		return finding(subject, err.Error(), fix, "")
	}
	program := filepath.Join(filepath.Dir(self), daemon.Program)
	out, err := exec.CommandContext(ctx, program, "--version").Output()
	if err != nil {
		return finding(subject, fmt.Sprintf("execute %s: %v", program, err), fix, "")
	}
	text, want := strings.TrimSpace(string(out)), daemon.Program+" version "+version.Full()
	if text != want {
		return finding(subject, fmt.Sprintf("%s is %q, this program is %q", program, text, version.Full()), fix, "")
	}
	return finding(subject, "", "", text)
}

// afterRestart returns the configuration that the running daemon would have after a restart.
// It consists of the daemon's files, which may have changed since its start, and the daemon's
// flags. Flags given here take precedence. The warnings are those of [config.Load].
func afterRestart(flags *pflag.FlagSet, running *config.Config) (*config.Config, []string, error) {
	args, err := daemonArguments(running)
	if err != nil {
		return nil, nil, fmt.Errorf("read the flags of the daemon: %w", err)
	}
	own := pflag.NewFlagSet(daemon.Program, pflag.ContinueOnError)
	config.AddFlags(own)
	if err := own.Parse(args); err != nil {
		return nil, nil, fmt.Errorf("the daemon's arguments: %w", err)
	}
	flags.Visit(func(given *pflag.Flag) {
		if f := own.Lookup(given.Name); f != nil {
			*f = *given
		}
	})
	return config.Load(own)
}

// daemonArguments returns the arguments of the daemon's process. They are empty if it has ended.
func daemonArguments(running *config.Config) ([]string, error) {
	pid, err := statecheck.Daemon(running.Root)
	if err != nil || pid == 0 {
		return nil, err
	}
	line, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
	if err != nil {
		return nil, err
	}
	return strings.Split(strings.TrimSuffix(string(line), "\x00"), "\x00")[1:], nil
}

// checkConfiguration reports what a daemon refuses at its start.
func checkConfiguration(cfg *config.Config, warnings []string) nodecheck.Finding {
	const subject = "configuration"
	if err := daemon.Check(cfg); err != nil {
		return finding(subject, err.Error(), "correct the configuration before the upgrade", "")
	}
	if len(warnings) > 0 {
		return nodecheck.Finding{Subject: subject, Level: nodecheck.Warning, Found: strings.Join(warnings, "; "),
			Fix: "write the new keys into the file"}
	}
	return finding(subject, "", "", "accepted")
}

// checkRecords reports records that a daemon of this version cannot read.
func checkRecords(cfg *config.Config) (nodecheck.Finding, error) {
	const subject = "records"
	found, err := state.Inspect(cfg.Root, cfg.State)
	if err != nil {
		return nodecheck.Finding{}, err
	}
	images, survey, err := image.ReadRecords(filepath.Join(cfg.Root, "images"))
	if err != nil {
		return nodecheck.Finding{}, err
	}
	var newer []string
	var damaged []record.Damaged
	for _, s := range append(found.Surveys, survey) {
		newer, damaged = append(newer, s.Newer...), append(damaged, s.Damaged...)
	}
	switch {
	case len(newer) > 0:
		return finding(subject, fmt.Sprintf("%d records were written by a newer berth, such as %s", len(newer), newer[0]),
			"use that version, or remove all pods first: see docs/operations.md", ""), nil
	case len(damaged) > 0:
		return finding(subject, fmt.Sprintf("%d records are damaged, such as %s: %v", len(damaged), damaged[0].Path,
			damaged[0].Err), "restore them, or remove their pods first: a daemon that starts removes these pods", ""), nil
	}
	return finding(subject, "", "", fmt.Sprintf("%d pods, %d containers and %d images can be read", len(found.Pods),
		len(found.Containers), len(images))), nil
}

// checkLaunches reports pods and containers whose monitors this version does not understand.
func checkLaunches(cfg *config.Config) (nodecheck.Finding, error) {
	const subject = "monitors"
	dirs := state.Dirs{Root: cfg.Root, State: cfg.State}
	entries, err := os.ReadDir(dirs.Shim(""))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nodecheck.Finding{}, fmt.Errorf("list monitors: %w", err)
	}
	for _, e := range entries {
		if _, err := shim.ReadShim(dirs.Shim(e.Name())); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return finding(subject, err.Error(), "remove that pod first", ""), nil
		}
	}
	return finding(subject, "", "", fmt.Sprintf("%d launches can be read", len(entries))), nil
}
