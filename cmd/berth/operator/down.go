package operator

import (
	"context"
	"errors"
	"fmt"
	"os"

	"github.com/spf13/cobra"
	corev1 "k8s.io/api/core/v1"

	"berth/cmd/berth/cli"
	"berth/cmd/berth/client"
	"berth/cmd/berth/podrun"
	"berth/cmd/berth/podyaml"
)

func downCommand(o *Connection) *cobra.Command {
	var files []string
	var runDir string
	var volumes bool
	cmd := &cobra.Command{
		Use:   "down MANIFEST.yaml|NAME…",
		Short: "Remove what berth run created",
		Long: `Stop and remove the pods that "berth run" created from a manifest ("-" reads
stdin), or the pods of a name: POD, NAMESPACE/POD, a workload's name, or KIND/NAME.

An argument is a manifest if a file of that name exists. The data of
PersistentVolumeClaims stays, unless --volumes is set; it needs a manifest.`,
	}
	cmd.Flags().StringArrayVarP(&files, "filename", "f", nil, "manifest whose pods are removed (can be repeated)")
	cmd.Flags().StringVar(&runDir, "run-dir", defaultRunDir, "directory in which berth run keeps pods' files")
	cmd.Flags().BoolVar(&volumes, "volumes", false, "also remove the data of the manifest's claims")
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		var names []string
		for _, arg := range args {
			if _, err := os.Stat(arg); err == nil || arg == "-" {
				files = append(files, arg)
			} else {
				names = append(names, arg)
			}
		}
		if len(files)+len(names) == 0 {
			return errors.New("name a manifest or a pod: berth down MANIFEST.yaml|NAME…")
		}
		manifest := &podyaml.Manifest{}
		if len(files) > 0 {
			var err error
			if manifest, err = parseManifests(cmd, files, podyaml.Mode{}); err != nil {
				return err
			}
		}
		if volumes && len(files) == 0 {
			return errors.New("--volumes needs a manifest: berth down --volumes MANIFEST.yaml")
		}
		return o.connected(func(cmd *cobra.Command, _ []string, c *client.Client) error {
			ctx, stop := cli.Interruptible(cmd.Context())
			defer stop()
			d := &downRun{cmd: cmd, client: c, dir: runDir}
			err := errors.Join(each(names, func(name string) error { return d.byName(ctx, name) }), d.byManifest(ctx, manifest))
			if err == nil && volumes {
				err = podrun.RemoveClaims(runDir, manifest)
			}
			return cli.InterruptStatus(ctx, err)
		})(cmd, args)
	}
	return cmd
}

// downRun is one run of berth down.
type downRun struct {
	cmd    *cobra.Command
	client *client.Client
	dir    string
}

func (d *downRun) byName(ctx context.Context, name string) error {
	removed, err := d.remove(ctx, podrun.Named(name))
	if err == nil && removed == 0 {
		return fmt.Errorf("berth run created no pod named %s", name)
	}
	return err
}

func (d *downRun) byManifest(ctx context.Context, m *podyaml.Manifest) error {
	var errs []error
	for _, w := range m.Workloads {
		_, err := d.remove(ctx, podrun.OfWorkload(w))
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// remove removes the selected pods and prints their names. It returns their number.
func (d *downRun) remove(ctx context.Context, match func(*corev1.Pod) bool) (int, error) {
	names, err := podrun.Down(ctx, d.client, d.dir, match, fromManifest)
	for _, name := range names {
		if _, err := fmt.Fprintln(d.cmd.OutOrStdout(), name); err != nil {
			return 0, err
		}
	}
	return len(names), err
}
