package operator

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/moby/term"
	"github.com/spf13/cobra"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/checkpoint/process/archive"
	"berth/cmd/berth/cli"
	"berth/cmd/berth/client"
	"berth/cmd/berth/podrun"
	"berth/internal/cleanup"
	"berth/sandbox/state"
)

// restoreOptions are the flags of berth restore.
type restoreOptions struct {
	identity podIdentity
	uid      string
	cgroup   string // parent cgroup of the pod
	handler  string
	timeout  time.Duration
	runDir   string

	noStart, allowAccess, dryRun bool
}

func restoreCommand(o *Connection) *cobra.Command {
	r := &restoreOptions{}
	cmd := &cobra.Command{
		Use:   "restore FILE",
		Short: "Start a pod from a file of berth checkpoint",
		Long: `Start a pod from a file or directory that "berth checkpoint" has written ("-" reads
standard input). The pod is a new one: it gets a new uid, network and cgroup. Its
processes continue where they were saved. The command prints what it will run, and
then the pod's ID.

The images must be on this node; berth does not pull them. The file must be signed with
the key of this node. Files that CRIU has saved need the daemon's option
checkpoint.restore: "userns" for pods with a user namespace (hostUsers: false), and
"trusted" for others, because CRIU trusts their processes with root on the node. Files of
gVisor need no option.

Files decide what a pod may access, so a file that gives its pod access to the node
(mounts, devices, host network, privileges) is refused without --allow-node-access.`,
		Example: "  berth restore web.tar\n  berth restore web.tar --name web-copy --no-start",
		Args:    cli.Args(1, 1, "name a file"),
	}
	flags := cmd.Flags()
	flags.StringVar(&r.identity.name, "name", "", "name of the pod (default: the saved one)")
	flags.StringVarP(&r.identity.namespace, "namespace", "n", "", "namespace of the pod (default: the saved one)")
	flags.StringVar(&r.uid, "uid", "", "uid of the pod (default: a new one)")
	flags.StringVar(&r.handler, "runtime-handler", "", "runtime handler of the pod (default: the saved one)")
	flags.StringVar(&r.cgroup, "cgroup-parent", "", "cgroup of the pod (default: the daemon's choice, never the saved one)")
	flags.BoolVar(&r.noStart, "no-start", false, "leave the containers created; start them with crictl start")
	flags.BoolVar(&r.allowAccess, "allow-node-access", false, "give the pod the access to the node that it had")
	flags.BoolVar(&r.dryRun, "dry-run", false, "only print what would run")
	cli.DurationVar(flags, &r.timeout, "timeout", 0, "give up after this time; 0: the runtime's limit")
	flags.StringVar(&r.runDir, "run-dir", defaultRunDir, "directory for the pod's files while it exists (hosts, logs)")
	cmd.RunE = o.Connected(func(cmd *cobra.Command, args []string, c *client.Client) error {
		return r.run(cmd.Context(), cmd, c, args[0])
	})
	return cmd
}

func (r *restoreOptions) run(ctx context.Context, cmd *cobra.Command, c *client.Client, path string) (err error) {
	if path == "-" {
		spooled, err := spoolStdin(cmd.InOrStdin())
		if err != nil {
			return err
		}
		defer func() { err = errors.Join(err, os.Remove(spooled)) }()
		path = spooled
	}
	if path, err = filepath.Abs(path); err != nil {
		return err
	}
	settings, err := readSettings(ctx, c)
	if err != nil { // of a runtime that is not berth; RestorePod fails
		settings = restoreSettings{}
	}
	plan, err := r.plan(path, settings.key())
	if err != nil {
		return err
	}
	access := plan.hostAccess()
	if err := plan.print(cmd.ErrOrStderr(), access); err != nil {
		return err
	}
	if err := settings.permit(plan); err != nil || r.dryRun {
		return err
	}
	if err := r.permit(plan, access); err != nil {
		return err
	}
	id, err := r.restore(ctx, c, plan, path)
	if err != nil {
		return err
	}
	_, err = fmt.Fprintln(cmd.OutOrStdout(), id)
	return err
}

// permit refuses what the flags do not allow.
func (r *restoreOptions) permit(plan *restorePlan, access []string) error {
	if r.allowAccess {
		return nil
	}
	if len(access) > 0 {
		return fmt.Errorf("the pod would access this node: %s; use --allow-node-access if you trust the checkpoint",
			strings.Join(access, ", "))
	}
	plan.withoutAnnotations()
	return nil
}

// restoreSettings are options of the daemon that a restore depends on. An older daemon does not
// report checkpoint.restore and has no such limit.
type restoreSettings struct {
	Root, CheckpointRestore string
}

// readSettings asks the daemon for its options.
func readSettings(ctx context.Context, c *client.Client) (s restoreSettings, err error) {
	reported, err := c.Settings(ctx)
	if err != nil {
		return s, err
	}
	if err := json.Unmarshal(reported, &s); err != nil {
		return s, fmt.Errorf("read the configuration of the daemon: %w", err)
	}
	return s, nil
}

// key returns the key with which the daemon signs checkpoints. If it fails, every checkpoint counts
// as one of another node.
func (s restoreSettings) key() *archive.Key {
	if s.Root == "" {
		return nil
	}
	key, err := archive.ReadKey(s.Root)
	if err != nil {
		return nil
	}
	return key
}

// permit refuses checkpoints that the daemon would refuse.
func (s restoreSettings) permit(plan *restorePlan) error {
	if plan.manifest.Runtime == "" && s.CheckpointRestore != "" {
		if err := state.RestoreMode(s.CheckpointRestore).Permit(plan.mapped()); err != nil {
			return err
		}
	}
	if plan.signer != archive.ThisNode {
		return fmt.Errorf("the checkpoint is signed by %s, and berth restores only what is signed with the key of this node", plan.signer)
	}
	return nil
}

// plan reads the archive and makes a plan of the restore.
func (r *restoreOptions) plan(path string, key *archive.Key) (*restorePlan, error) {
	from, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer from.Close() // it was only read
	a, err := archive.ReadManifest(from, key)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("%s has no %s, so berth did not write it; restore it with a RestorePod call that describes the pod",
			path, archive.ManifestFile)
	}
	if err != nil {
		return nil, fmt.Errorf("read %s: %w", path, err)
	}
	plan, err := newRestorePlan(&a.Manifest, r.identity)
	if err != nil {
		return nil, err
	}
	plan.sandbox.Linux.CgroupParent = r.cgroup
	plan.permitPrivileged()
	plan.signer, plan.handler = a.Signer, cmp.Or(r.handler, plan.handler)
	return plan, nil
}

// restore makes the pod and starts its containers. After an error it removes everything.
func (r *restoreOptions) restore(
	ctx context.Context, c *client.Client, plan *restorePlan, path string,
) (id string, err error) {
	if r.timeout > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, r.timeout)
		defer cancel()
	}
	undo := cleanup.New()
	defer undo.Run(&err)
	meta := plan.sandbox.GetMetadata()
	files, err := podrun.MakeRestored(r.runDir, r.uid, meta.GetNamespace(), meta.GetName(), plan.names())
	if err != nil {
		return "", err
	}
	undo.Add("remove the files of the pod", files.Remove)
	plan.use(files)
	request := &runtimeapi.RestorePodRequest{CheckpointPath: path, Config: plan.sandbox,
		RuntimeHandler: plan.handler, ContainerConfigs: plan.containers}
	reply, err := c.RestorePod(ctx, request)
	if err != nil {
		return "", client.Explain("restore pod "+meta.GetNamespace()+"/"+meta.GetName(), err)
	}
	id = reply.GetPodSandboxId()
	undo.Add("remove the pod", func() error { return c.RemovePod(context.WithoutCancel(ctx), id) })
	if err := r.start(ctx, c, plan, files, reply); err != nil {
		return "", err
	}
	undo.Release()
	return id, nil
}

// start starts the containers in the order of the archive.
func (r *restoreOptions) start(ctx context.Context, c *client.Client, plan *restorePlan, files *podrun.Restored,
	reply *runtimeapi.RestorePodResponse) error {
	status, err := c.PodState(ctx, reply.GetPodSandboxId())
	if err != nil {
		return err
	}
	network := plan.sandbox.GetLinux().GetSecurityContext().GetNamespaceOptions().GetNetwork()
	err = files.WriteHosts(plan.sandbox.GetHostname(), client.PodIPs(status), network == runtimeapi.NamespaceMode_NODE)
	if err != nil || r.noStart {
		return err
	}
	for _, restored := range reply.GetRestoredContainers() {
		request := &runtimeapi.StartContainerRequest{ContainerId: restored.GetContainerId()}
		if _, err := c.StartContainer(ctx, request); err != nil {
			return client.Explain("start container "+restored.GetName(), err)
		}
	}
	return nil
}

// spoolStdin copies standard input to a temporary file, which the caller removes. A tar is read
// twice.
func spoolStdin(in io.Reader) (path string, err error) {
	if f, ok := in.(*os.File); ok && term.IsTerminal(f.Fd()) {
		return "", errors.New("standard input is a terminal; name a file, or pipe a checkpoint in")
	}
	file, err := os.CreateTemp("", "berth-restore-*.tar")
	if err != nil {
		return "", err
	}
	_, err = io.Copy(file, in)
	if err := errors.Join(err, file.Close()); err != nil {
		return "", errors.Join(fmt.Errorf("read standard input: %w", err), os.Remove(file.Name()))
	}
	return file.Name(), nil
}
