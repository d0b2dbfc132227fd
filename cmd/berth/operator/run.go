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
	"berth/cmd/berth/config"
	"berth/cmd/berth/podrun"
	"berth/cmd/berth/podyaml"
)

const (
	defaultRunDir      = "/var/lib/berth/" + config.RunDir
	defaultSeccompRoot = "/var/lib/kubelet/seccomp"

	maxManifest = 4 << 20 // in bytes, more than the API server accepts
)

// runOptions are the flags of berth run.
type runOptions struct {
	config      podrun.Config
	files       []string
	seccompRoot string
	strict      bool
	replace     bool
	pull        string
}

// pullPolicies are the values of --pull, which docker and podman have, too.
var pullPolicies = map[string]corev1.PullPolicy{
	"always": corev1.PullAlways, "missing": corev1.PullIfNotPresent, "never": corev1.PullNever,
}

func runCommand(o *Connection) *cobra.Command {
	r := &runOptions{}
	cmd := &cobra.Command{
		Use:   "run MANIFEST.yaml…",
		Short: "Run Kubernetes manifests without a cluster",
		Long: `Run the pods of Kubernetes manifests without a cluster ("-" reads stdin).

A manifest can have several documents: Pods, Deployments, StatefulSets, DaemonSets
(one replica each), Jobs and CronJobs (run once), and their ConfigMaps, Secrets and
PersistentVolumeClaims. An export of "kubectl get -o yaml" works, too. Other kinds
and scheduling fields are ignored with a warning. berth refuses other fields that
it cannot honour, and names these fields.

berth pulls the images, starts the containers in kubelet's order, and runs their
probes. It prints the output of all containers, each line after the container's
name. When all have ended, or after the grace period on Ctrl-C (at once on a second
Ctrl-C), berth removes the pods and exits with the code of the container that
failed first. The data of PersistentVolumeClaims stays (see "berth down").

By default the seccomp profile is RuntimeDefault, and pods resolve names as this
host does. With hostUsers: false a pod gets 65536 IDs between 1879048192 and
2147352575 that no other pod of the runtime uses.`,
		RunE: func(cmd *cobra.Command, args []string) error { return r.run(o, cmd, args) },
	}
	cmd.SetFlagErrorFunc(flagStatus)
	flags := cmd.Flags()
	flags.StringArrayVarP(&r.files, "filename", "f", nil, "manifest to run (can be repeated)")
	flags.BoolVarP(&r.config.Detach, "detach", "d", false, "print the pods' IDs once their containers run, and exit")
	flags.BoolVar(&r.strict, "strict", false, "refuse what is otherwise ignored with a warning")
	flags.BoolVar(&r.replace, "replace", false, "first remove the pods that the manifests created earlier")
	flags.StringVar(&r.config.Dir, "run-dir", defaultRunDir,
		"directory for the pods' files while they exist (volumes, hosts, logs), and for the data of claims")
	flags.StringVar(&r.config.LogDir, "log-dir", "", "keep logs below this directory, in the layout of /var/log/pods")
	flags.StringVar(&r.config.CgroupParent, "cgroup-parent", "", "parent cgroup of the pods (default: the daemon's choice)")
	flags.StringVar(&r.pull, "pull", "", "pull images always, missing ones or never (default: the manifest's imagePullPolicy)")
	complete(cmd, "pull", slices.Sorted(maps.Keys(pullPolicies))...)
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
	mode := podyaml.Mode{Detached: r.config.Detach, Strict: r.strict}
	manifest, err := parseManifests(cmd, append(r.files, args...), mode)
	if err != nil {
		return &cli.ExitStatus{Code: codeFailed, Cause: err}
	}
	for _, warning := range manifest.Warnings {
		r.config.Report("warning: %s", warning)
	}
	if len(manifest.Workloads) == 0 {
		return nil // all have 0 replicas
	}
	return execStatus(o.connected(func(cmd *cobra.Command, _ []string, c *client.Client) error {
		return r.runManifest(cmd, c, manifest)
	})(cmd, args))
}

func (r *runOptions) runManifest(cmd *cobra.Command, c *client.Client, manifest *podyaml.Manifest) (err error) {
	if r.config.Host, err = podrun.DetectHost(cmd.Context(), c, r.seccompRoot); err != nil {
		return execStatus(err)
	}
	r.config.Stdout, r.config.Stderr = cmd.OutOrStdout(), cmd.ErrOrStderr()
	r.config.Backoff = podrun.KubeletBackoff
	ctx, now, stop := cli.TwoStageInterruptible(cmd.Context())
	defer stop()
	defer announceStop(ctx, &r.config, podrun.GracePeriod(manifest))()
	if err := r.makeRoom(ctx, c, manifest); err != nil {
		return runStatus(err)
	}
	results, err := podrun.RunAll(ctx, now, c, manifest, r.config)
	for _, result := range results {
		if _, printErr := fmt.Fprintln(cmd.OutOrStdout(), result.PodID); printErr != nil {
			return printErr
		}
	}
	return runStatus(err)
}

// makeRoom removes the manifest's pods of an earlier run, or refuses the run if it may not.
func (r *runOptions) makeRoom(ctx context.Context, c *client.Client, manifest *podyaml.Manifest) error {
	for _, w := range manifest.Workloads {
		if r.replace {
			names, err := podrun.Down(ctx, c, r.config.Dir, podrun.OfWorkload(w), fromManifest)
			for _, name := range names {
				r.config.Report("removed pod %s", name)
			}
			if err != nil {
				return err
			}
			continue
		}
		found, err := podrun.Find(ctx, c, r.config.Dir, podrun.OfWorkload(w))
		if err != nil {
			return err
		}
		for _, pod := range found {
			if pod.Sandbox != nil {
				return fmt.Errorf("pod %s exists already; use --replace, or remove it with: berth down %s",
					pod.Manifest.Name, pod.Manifest.Name)
			}
		}
	}
	return nil
}

// parseManifests parses several files as one manifest.
func parseManifests(cmd *cobra.Command, names []string, mode podyaml.Mode) (*podyaml.Manifest, error) {
	if len(names) == 0 {
		return nil, fmt.Errorf("name a manifest: berth %s MANIFEST.yaml", cmd.Name())
	}
	var text []byte
	for _, name := range names {
		content, err := readManifest(cmd, name)
		if err != nil {
			return nil, err
		}
		text = append(append(text, content...), "\n---\n"...)
	}
	manifest, err := podyaml.Parse(text, mode)
	if err != nil && len(names) == 1 {
		err = fmt.Errorf("%s: %w", names[0], err)
	}
	return manifest, err
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
// the signal that ended the run. An interrupt was reported when it came.
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
