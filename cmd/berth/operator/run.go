package operator

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"

	"github.com/spf13/cobra"

	"berth/cmd/berth/cli"
	"berth/cmd/berth/client"
	"berth/cmd/berth/podrun"
	"berth/cmd/berth/podyaml"
)

const (
	defaultRunDir      = "/var/lib/berth/run"
	defaultSeccompRoot = "/var/lib/kubelet/seccomp"

	maxManifest = 4 << 20 // in bytes, more than the API server accepts
)

func runCommand(o *connection) *cobra.Command {
	var config podrun.Config
	var seccompRoot string
	cmd := &cobra.Command{
		Use:   "run POD.yaml",
		Short: "Run a Kubernetes Pod manifest without a kubelet",
		Long: `Run a Kubernetes Pod manifest without a kubelet ("-" reads it from stdin).

berth pulls the images, runs the init containers in order, and then starts the
containers in order, as kubelet does. It refuses a manifest with fields that it
cannot honour, and names these fields. It prints the output of all containers,
each line after the container's name. When all have ended, or after the grace
period on Ctrl-C (at once on a second Ctrl-C), berth removes everything and exits
with the code of the container that failed first.

By default the seccomp profile is RuntimeDefault, and the pod resolves names as
this host does. With hostUsers: false the pod gets 65536 IDs between 1879048192
and 2147352575 that no other pod of the runtime uses.`,
		Args: cli.Args(1, 1, "name a manifest"),
	}
	flags := cmd.Flags()
	flags.BoolVarP(&config.Detach, "detach", "d", false, "print the pod's ID once its containers run, and exit")
	flags.StringVar(&config.Dir, "run-dir", defaultRunDir,
		"directory for the pod's files while it exists: volumes, hosts, logs")
	flags.StringVar(&config.LogDir, "log-dir", "", "keep logs below this directory, in the layout of /var/log/pods")
	flags.StringVar(&config.CgroupParent, "cgroup-parent", "", "parent cgroup of the pod (default: the daemon's choice)")
	flags.StringVar(&config.Handler, "runtime-handler", "", "runtime handler of the pod")
	flags.StringVar(&seccompRoot, "seccomp-root", defaultSeccompRoot, "directory of Localhost seccomp profiles")
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		manifest, err := readManifest(cmd, args[0])
		if err != nil {
			return &cli.ExitStatus{Code: codeFailed, Cause: err}
		}
		pod, err := podyaml.Parse(manifest, podyaml.Mode{Detached: config.Detach})
		if err != nil {
			return &cli.ExitStatus{Code: codeFailed, Cause: fmt.Errorf("%s: %w", args[0], err)}
		}
		return o.connected(func(cmd *cobra.Command, _ []string, c *client.Client) error {
			if config.Host, err = podrun.DetectHost(cmd.Context(), c, seccompRoot); err != nil {
				return execStatus(err)
			}
			config.Stdout, config.Stderr = cmd.OutOrStdout(), cmd.ErrOrStderr()
			config.Report = func(format string, args ...any) { cmd.PrintErrf("berth: "+format+"\n", args...) }
			config.Backoff = podrun.KubeletBackoff
			ctx, now, stop := cli.TwoStageInterruptible(cmd.Context())
			defer stop()
			defer announceStop(ctx, &config, *pod.Spec.TerminationGracePeriodSeconds)()
			result, err := podrun.Run(ctx, now, c, pod, config)
			if err == nil && config.Detach {
				_, err = fmt.Fprintln(cmd.OutOrStdout(), result.PodID)
			}
			return runStatus(err)
		})(cmd, args)
	}
	return cmd
}

// readManifest reads a file, or stdin for the name "-".
func readManifest(cmd *cobra.Command, name string) (manifest []byte, err error) {
	in := cmd.InOrStdin()
	if name != "-" {
		file, err := os.Open(name)
		if err != nil {
			return nil, err
		}
		defer func() { _ = file.Close() }() // read only
		in = file
	}
	manifest, err = io.ReadAll(io.LimitReader(in, maxManifest+1))
	if err != nil {
		return nil, fmt.Errorf("read %s: %w", name, err)
	}
	if len(manifest) > maxManifest {
		return nil, fmt.Errorf("read %s: larger than %d bytes, which no manifest is", name, maxManifest)
	}
	return manifest, nil
}

// runStatus returns the ExitStatus of a failed run: the failed container's exit code, or 128 plus
// the signal that ended the run.
func runStatus(err error) error {
	var failed *podrun.ContainerFailed
	var interrupt *cli.Interrupted
	switch {
	case errors.As(err, &failed):
		return &cli.ExitStatus{Code: failed.Code, Cause: err}
	case errors.As(err, &interrupt) && err.Error() == interrupt.Error():
		return interrupt.Status(nil) // announceStop has reported it
	case errors.As(err, &interrupt):
		return interrupt.Status(err)
	}
	return execStatus(err)
}

// announceStop reports the first interrupt of a run, because the containers' grace period may be
// long. The caller calls stop when the run ends.
func announceStop(ctx context.Context, config *podrun.Config, grace int64) (stop func() bool) {
	return context.AfterFunc(ctx, func() {
		var interrupt *cli.Interrupted
		if errors.As(context.Cause(ctx), &interrupt) {
			config.Report("stopping, up to %d s; Ctrl-C again kills", grace)
		}
	})
}
