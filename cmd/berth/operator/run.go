package operator

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"slices"
	"time"

	"github.com/spf13/cobra"
	corev1 "k8s.io/api/core/v1"

	"berth/cmd/berth/cli"
	"berth/cmd/berth/client"
	"berth/cmd/berth/podrun"
	"berth/cmd/berth/podyaml"
	"berth/cmd/config"
)

const (
	defaultRunDir      = "/var/lib/berth/" + config.RunDir
	defaultSeccompRoot = "/var/lib/kubelet/seccomp"

	maxManifest = 4 << 20 // in bytes, more than the API server accepts
)

// runOptions are the flags of berth run.
type runOptions struct {
	config      podrun.Config
	seccompRoot string
	pull        string
}

// pullPolicies are the values of --pull, which docker and podman have, too.
var pullPolicies = map[string]corev1.PullPolicy{
	"always": corev1.PullAlways, "missing": corev1.PullIfNotPresent, "never": corev1.PullNever,
}

func runCommand(o *Connection) *cobra.Command {
	r := &runOptions{}
	cmd := &cobra.Command{
		Use:   "run FILE.yaml",
		Short: "Run the Pods of a file on this node",
		Long: `Run the Pods of a file on this node, without a kubelet ("-" reads stdin).

The file has Pods, and the ConfigMaps and Secrets that their variables name. berth
pulls the images, runs the init containers, and then the containers. It prints
their output, each line after the container's name. When all have ended, or after
the grace period on Ctrl-C (at once on a second Ctrl-C), berth removes the pods and
exits with the code of the container that failed first.

berth refuses each field that needs a kubelet, such as probes and restart policies,
by its path.`,
		Args: cli.Args(1, 1, "name a file"),
		RunE: func(cmd *cobra.Command, args []string) error { return r.run(o, cmd, args) },
	}
	cmd.SetFlagErrorFunc(flagStatus)
	flags := cmd.Flags()
	flags.BoolVarP(&r.config.Detach, "detach", "d", false, "print the pods' IDs once their containers run, and exit")
	flags.StringVar(&r.config.Dir, "run-dir", defaultRunDir, "directory for the pods' files while they exist (volumes, hosts, logs)")
	flags.StringVar(&r.config.CgroupParent, "cgroup-parent", "", "parent cgroup of the pods (default: the daemon's choice)")
	flags.StringVar(&r.pull, "pull", "", "pull images always, missing ones or never (default: the manifest's imagePullPolicy)")
	cli.Complete(cmd, "pull", slices.Sorted(maps.Keys(pullPolicies))...)
	flags.StringVar(&r.config.Handler, "runtime-handler", "", "runtime handler of the pods")
	flags.StringVar(&r.seccompRoot, "seccomp-root", defaultSeccompRoot, "directory of Localhost seccomp profiles")
	return cmd
}

func (r *runOptions) run(o *Connection, cmd *cobra.Command, args []string) error {
	r.config.Report = func(format string, args ...any) { cmd.PrintErrf("berth: "+format+"\n", args...) }
	policy, known := pullPolicies[r.pull]
	if r.config.Pull = policy; r.pull != "" && !known {
		return execStatus(fmt.Errorf("--pull: want always, missing or never, not %q", r.pull))
	}
	manifest, err := parseManifest(cmd, args[0])
	if err != nil {
		return &cli.ExitStatus{Code: codeFailed, Cause: err}
	}
	return execStatus(o.dialed(func(cmd *cobra.Command, _ []string, c *client.Client) error {
		return r.runManifest(cmd, c, manifest)
	})(cmd, args))
}

func (r *runOptions) runManifest(cmd *cobra.Command, c *client.Client, manifest *podyaml.Manifest) (err error) {
	if r.config.Host, err = podrun.DetectHost(r.seccompRoot); err != nil {
		return execStatus(err)
	}
	r.config.Stdout, r.config.Stderr = cmd.OutOrStdout(), cmd.ErrOrStderr()
	ctx, now, stop := cli.TwoStageInterruptible(cmd.Context())
	defer stop()
	defer announceStop(ctx, &r.config, podrun.GracePeriod(manifest))()
	if err := refuseTwice(ctx, c, manifest); err != nil {
		return runStatus(err)
	}
	ids, err := podrun.Run(ctx, now, c, manifest, r.config)
	for _, id := range ids {
		if _, printErr := fmt.Fprintln(cmd.OutOrStdout(), id); printErr != nil {
			return printErr
		}
	}
	return runStatus(err)
}

// refuseTwice refuses a manifest whose pods run already.
func refuseTwice(ctx context.Context, c *client.Client, manifest *podyaml.Manifest) error {
	pods, err := c.Pods(ctx)
	if err != nil {
		return err
	}
	for _, pod := range pods {
		for _, wanted := range manifest.Pods {
			if meta := pod.GetMetadata(); meta.GetName() == wanted.Name && meta.GetNamespace() == wanted.Namespace {
				return fmt.Errorf("pod %s exists already; remove it with: berth rm --force %s",
					client.PodTitle(pod), client.ShortID(pod.GetId()))
			}
		}
	}
	return nil
}

func parseManifest(cmd *cobra.Command, name string) (*podyaml.Manifest, error) {
	text, err := readManifest(cmd, name)
	if err != nil {
		return nil, err
	}
	manifest, err := podyaml.Parse(text)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	return manifest, nil
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
// the signal that ended the run. An interrupt was reported when it arrived.
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
func announceStop(ctx context.Context, config *podrun.Config, grace time.Duration) (stop func() bool) {
	return context.AfterFunc(ctx, func() {
		var interrupt *cli.Interrupted
		if errors.As(context.Cause(ctx), &interrupt) {
			config.Report("stopping, up to %d s; Ctrl-C again kills", int(grace.Seconds()))
		}
	})
}
