package operator

import (
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

	maxManifest = 4 << 20 // bytes; the API server takes less
)

func runCommand(o *connection) *cobra.Command {
	var config podrun.Config
	var seccompRoot string
	cmd := &cobra.Command{
		Use:   "run POD.yaml",
		Short: "Run a Kubernetes Pod manifest without a kubelet",
		Long: `Run a Kubernetes Pod manifest without a kubelet ("-" reads it from stdin).

Images are pulled, init containers run in order, then the containers start in
order, as kubelet would do it. What the manifest sets and cannot be honoured is
refused by name before anything starts. The output of all containers is printed,
each line led by the container's name. When all have ended for good, or on Ctrl-C
after the grace period (at once on the second Ctrl-C), everything is removed, and
berth exits with the code of the container that failed first.

Where the manifest says nothing, the seccomp profile is RuntimeDefault and the
pod resolves names as this host does. With hostUsers: false the pod gets 65536 of
the IDs from 1879048192 to 2147352575, which no other pod of the runtime has.`,
		Args: cobra.ExactArgs(1),
	}
	flags := cmd.Flags()
	flags.BoolVarP(&config.Detach, "detach", "d", false, "print the pod's ID once its containers run, and leave it running")
	flags.StringVar(&config.Dir, "run-dir", defaultRunDir, "where the pod's files are while it exists: volumes, hosts, logs")
	flags.StringVar(&config.LogDir, "log-dir", "", "keep the logs, below this directory, in the layout of /var/log/pods")
	flags.StringVar(&config.CgroupParent, "cgroup-parent", "", "cgroup to put the pod into (default: the daemon's choice)")
	flags.StringVar(&config.Handler, "runtime-handler", "", "runtime handler to use")
	flags.StringVar(&seccompRoot, "seccomp-root", defaultSeccompRoot, "where Localhost seccomp profiles are")
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		manifest, err := readManifest(cmd, args[0])
		if err != nil {
			return err
		}
		pod, err := podyaml.Parse(manifest, podyaml.Mode{Detached: config.Detach})
		if err != nil {
			return fmt.Errorf("%s: %w", args[0], err)
		}
		return o.connected(func(cmd *cobra.Command, _ []string, c *client.Client) error {
			if config.Host, err = podrun.DetectHost(cmd.Context(), c, seccompRoot); err != nil {
				return err
			}
			config.Stdout, config.Stderr = cmd.OutOrStdout(), cmd.ErrOrStderr()
			config.Report = func(format string, args ...any) { cmd.PrintErrf("berth: "+format+"\n", args...) }
			config.Backoff = podrun.KubeletBackoff
			ctx, now, stop := cli.TwoStageInterruptible(cmd.Context())
			defer stop()
			result, err := podrun.Run(ctx, now, c, pod, config)
			if err == nil && config.Detach {
				_, err = fmt.Fprintln(cmd.OutOrStdout(), result.PodID)
			}
			return runStatus(err)
		})(cmd, args)
	}
	return cmd
}

// readManifest reads a file, or stdin if its name is "-".
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
		return nil, fmt.Errorf("read %s: more than %d bytes, no manifest is that large", name, maxManifest)
	}
	return manifest, nil
}

// runStatus gives the error of a run its exit code: the failed container's, or
// 128 and the signal that ended the run.
func runStatus(err error) error {
	var failed *podrun.ContainerFailed
	var interrupt *cli.Interrupted
	switch {
	case errors.As(err, &failed):
		return &cli.ExitStatus{Code: failed.Code, Cause: err}
	case errors.As(err, &interrupt):
		return interrupt.Status(err)
	}
	return err
}
