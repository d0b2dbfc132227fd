package operator

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"time"

	"github.com/moby/term"
	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/checkpoint/process/archive"
	"berth/cmd/berth/cli"
	"berth/cmd/berth/client"
	"berth/cmd/berth/podrun"
)

// checkpointOptions are the flags of berth checkpoint.
type checkpointOptions struct {
	output  string
	timeout time.Duration
	force   bool
	remove  bool
	runDir  string
}

func checkpointCommand(o *Connection) *cobra.Command {
	options := &checkpointOptions{}
	cmd := &cobra.Command{
		Use:   "checkpoint NAME -o FILE",
		Short: "Save running processes of a pod or container to a file",
		Long: `Save a running container, or all running containers of a pod, to a file: memory, open
files, the changed files of the root filesystem, and /dev/shm. The processes stop for
the time that this takes, and continue. "berth restore" starts them from the file.

The file belongs to root and contains the memory of the processes, with all secrets in
it. Volumes are not part of it. Established TCP connections are closed in the copy.

If FILE is an empty directory, the files of a pod are written to it directly. "-"
writes to standard output. docs/checkpoint.md lists what cannot be saved.`,
		Example: "  berth checkpoint web -o web.tar\n  berth checkpoint web/app -o app.tar\n" +
			"  berth checkpoint web --rm -o - | ssh node2 berth restore -",
		Args: cli.Args(1, 1, "name a container or pod"),
	}
	flags := cmd.Flags()
	flags.StringVarP(&options.output, "output", "o", "", "file to create, an empty directory, or - for standard output")
	cli.DurationVar(flags, &options.timeout, "timeout", 0, "give up after this time; 0: the runtime's limit")
	flags.BoolVarP(&options.force, "force", "f", false, "replace an existing file")
	flags.BoolVar(&options.remove, "rm", false, "afterwards kill and remove the pod or container")
	flags.StringVar(&options.runDir, "run-dir", defaultRunDir, "directory in which berth run keeps pods' files")
	cmd.ValidArgsFunction = o.completeNames(containerNames, podNames)
	cmd.RunE = o.Connected(func(cmd *cobra.Command, args []string, c *client.Client) error {
		// If the reader of a pipe leaves, the temporary copy must be removed, and the saved pod
		// must stay.
		pipes := make(chan os.Signal, 1)
		signal.Notify(pipes, unix.SIGPIPE)
		defer signal.Stop(pipes)
		return options.run(cmd.Context(), cmd, c, args[0])
	})
	return cmd
}

func (s *checkpointOptions) run(ctx context.Context, cmd *cobra.Command, c *client.Client, ref string) error {
	if s.output == "" {
		return errors.New("name a file: berth checkpoint " + ref + " -o FILE")
	}
	container, pod, err := c.Find(ctx, ref)
	if err != nil {
		return err
	}
	within, cancel := ctx, context.CancelFunc(func() {})
	if s.timeout > 0 {
		within, cancel = context.WithTimeout(ctx, s.timeout)
	}
	defer cancel()
	if pod != nil {
		err = s.savePod(within, cmd, c, pod)
	} else {
		err = s.saveContainer(within, cmd, c, container)
	}
	if err != nil || !s.remove {
		return err
	}
	if err := s.syncOutput(cmd.OutOrStdout()); err != nil {
		return err
	}
	return s.removeSaved(ctx, c, container, pod)
}

// syncOutput makes the output survive a power cut. A pipe cannot be synced. Its reader has taken
// all bytes.
func (s *checkpointOptions) syncOutput(stdout io.Writer) error {
	if s.output == "-" {
		f, ok := stdout.(*os.File)
		if !ok {
			return nil
		}
		if err := f.Sync(); err != nil && !errors.Is(err, unix.EINVAL) {
			return fmt.Errorf("write checkpoint: %w", err)
		}
		return nil
	}
	file, err := os.Open(s.output)
	if err != nil {
		return err
	}
	defer file.Close() // it was only read
	// syncfs also writes the directory that has the name of the file.
	if err := unix.Syncfs(int(file.Fd())); err != nil {
		return fmt.Errorf("write checkpoint %s: %w", s.output, os.NewSyscallError("syncfs", err))
	}
	return nil
}

// saveContainer writes the archive of a container.
func (s *checkpointOptions) saveContainer(
	ctx context.Context, cmd *cobra.Command, c *client.Client, container *runtimeapi.Container,
) error {
	return s.writeFile(cmd.OutOrStdout(), func(dir string) error {
		request := &runtimeapi.CheckpointContainerRequest{ContainerId: container.GetId(),
			Location: filepath.Join(dir, partialFile), Timeout: int64((s.timeout + time.Second - 1) / time.Second)}
		if _, err := c.CheckpointContainer(ctx, request); err != nil {
			return client.Explain("checkpoint container "+client.ContainerName(container), err)
		}
		return nil
	})
}

// savePod writes the archive of a pod: a directory, or a tar of it.
func (s *checkpointOptions) savePod(
	ctx context.Context, cmd *cobra.Command, c *client.Client, pod *runtimeapi.PodSandbox,
) error {
	ids, err := runningContainers(ctx, c, pod)
	if err != nil {
		return err
	}
	save := func(dir string) error {
		request := &runtimeapi.CheckpointPodRequest{PodSandboxId: pod.GetId(), OutputPath: dir, ContainerIds: ids}
		if _, err := c.CheckpointPod(ctx, request); err != nil {
			return client.Explain("checkpoint pod "+client.PodTitle(pod), err)
		}
		return nil
	}
	if info, err := os.Stat(s.output); err == nil && info.IsDir() {
		dir, err := filepath.Abs(s.output)
		if err != nil {
			return err
		}
		return save(dir)
	}
	return s.writeFile(cmd.OutOrStdout(), func(dir string) error {
		files := filepath.Join(dir, "pod")
		if err := os.Mkdir(files, 0o700); err != nil {
			return err
		}
		if err := save(files); err != nil {
			return err
		}
		return packDir(ctx, files, filepath.Join(dir, partialFile))
	})
}

// runningContainers returns the IDs of a pod's running containers.
func runningContainers(ctx context.Context, c *client.Client, pod *runtimeapi.PodSandbox) ([]string, error) {
	all, err := c.ContainersOf(ctx, pod.GetId())
	if err != nil {
		return nil, err
	}
	var ids []string
	for _, container := range all {
		if container.GetState() == runtimeapi.ContainerState_CONTAINER_RUNNING {
			ids = append(ids, container.GetId())
		}
	}
	if len(ids) == 0 {
		return nil, fmt.Errorf("pod %s has no running container", client.PodTitle(pod))
	}
	return ids, nil
}

// partialFile is the name of an archive in its temporary directory.
const partialFile = "checkpoint.tar"

// writeFile calls write, which creates partialFile in a temporary directory beside the output, and
// moves the result to the output. After an error nothing is left.
func (s *checkpointOptions) writeFile(stdout io.Writer, write func(dir string) error) (err error) {
	if err := s.checkOutput(stdout); err != nil {
		return err
	}
	parent := os.TempDir()
	if s.output != "-" {
		if parent, err = filepath.Abs(filepath.Dir(s.output)); err != nil {
			return err
		}
	}
	dir, err := os.MkdirTemp(parent, ".berth-checkpoint-*")
	if err != nil {
		return fmt.Errorf("create directory for checkpoint: %w", err)
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	if err := write(dir); err != nil {
		return err
	}
	partial := filepath.Join(dir, partialFile)
	if s.output == "-" {
		return copyTo(stdout, partial)
	}
	flags := uint(unix.RENAME_NOREPLACE)
	if s.force {
		flags = 0
	}
	if err := unix.Renameat2(unix.AT_FDCWD, partial, unix.AT_FDCWD, s.output, flags); err != nil {
		return &os.LinkError{Op: "rename", Old: partial, New: s.output, Err: err}
	}
	return nil
}

// checkOutput refuses an output that cannot be written, before anything is frozen.
func (s *checkpointOptions) checkOutput(stdout io.Writer) error {
	if s.output == "-" {
		if f, ok := stdout.(*os.File); ok && term.IsTerminal(f.Fd()) {
			return errors.New("a checkpoint is not written to a terminal; name a file with -o")
		}
		return nil
	}
	info, err := os.Lstat(s.output)
	switch {
	case errors.Is(err, os.ErrNotExist):
		return nil
	case err != nil:
		return err
	case info.IsDir():
		return fmt.Errorf("%s is a directory; only a pod can be written to one", s.output)
	case !s.force:
		return fmt.Errorf("%s exists; use --force to replace it", s.output)
	}
	return nil
}

// packDir writes the archive in dir to a new file as a tar, and syncs it.
func packDir(ctx context.Context, dir, path string) (err error) {
	from, err := os.Open(dir)
	if err != nil {
		return err
	}
	defer from.Close() // it was only read
	to, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, to.Close()) }()
	if err := archive.Pack(ctx, from, to); err != nil {
		return err
	}
	return to.Sync()
}

// copyTo writes a file to a stream.
func copyTo(to io.Writer, path string) error {
	file, err := os.Open(path)
	if err != nil {
		return err
	}
	defer file.Close() // it was only read
	if _, err := io.Copy(to, file); err != nil {
		return fmt.Errorf("write checkpoint: %w", err)
	}
	return nil
}

// removeSaved kills and removes what was saved. A stop signal would let the processes do things
// that the copy does again.
func (s *checkpointOptions) removeSaved(
	ctx context.Context, c *client.Client, container *runtimeapi.Container, pod *runtimeapi.PodSandbox,
) error {
	if pod == nil {
		return c.Remove(ctx, container.GetId())
	}
	if err := c.StopPod(ctx, pod.GetId()); err != nil {
		return err
	}
	if err := c.RemovePod(ctx, pod.GetId()); err != nil {
		return err
	}
	return podrun.RemoveFiles(s.runDir, pod.GetMetadata().GetUid())
}
