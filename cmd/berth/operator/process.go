package operator

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/cmd/berth/client"
	"berth/internal/errdefs"
	"berth/internal/pidfd"
)

// process is the main process of a running container, seen from the host.
type process struct {
	container string   // name for error texts
	pid       int      // valid while the process has not exited
	file      *os.File // pidfd
}

// openProcess opens the main process of a container. It needs the process ID in the runtime's
// verbose status, which berth, containerd and CRI-O report. The caller must call close.
//
// A sandboxing runtime such as runsc reports a process of its own outside of the sandbox. That
// process is in the host's mount namespace and is refused, because its root is the host's.
func openProcess(ctx context.Context, c *client.Client, container *runtimeapi.Container) (p *process, err error) {
	if err := checkRunning(ctx, c, container); err != nil {
		return nil, err
	}
	name := client.ContainerName(container)
	pid, err := mainPID(ctx, c, container)
	if err != nil {
		return nil, err
	}
	file, err := pidfd.Open(pid)
	if err != nil {
		return nil, fmt.Errorf("open process %d of container %s: %w", pid, name, err)
	}
	p = &process{container: name, pid: pid, file: file}
	defer func() {
		if err != nil {
			err = errors.Join(err, p.close())
		}
	}()
	// The process ID was valid before and after the pidfd was opened, so it was not reused between.
	if again, err := mainPID(ctx, c, container); err != nil || again != pid {
		return nil, errors.Join(errdefs.FailedPrecondition("container %s has exited", name), err)
	}
	same, err := sameMountNamespace(pid)
	if err != nil {
		return nil, fmt.Errorf("mount namespace of container %s: %w", name, err)
	}
	if same {
		return nil, errdefs.FailedPrecondition(
			"container %s runs in a sandbox whose processes and files the host cannot see; use berth exec", name)
	}
	return p, nil
}

func (p *process) close() error { return p.file.Close() }

// alive returns an error if the process has exited. Its process ID may then belong to another
// process.
func (p *process) alive() error {
	ended, err := pidfd.Exited(p.file)
	if err == nil && ended {
		err = errdefs.FailedPrecondition("container %s has exited", p.container)
	}
	return err
}

// mainPID asks the runtime for the ID of a container's main process.
func mainPID(ctx context.Context, c *client.Client, container *runtimeapi.Container) (int, error) {
	reply, err := c.ContainerStatus(ctx, &runtimeapi.ContainerStatusRequest{ContainerId: container.GetId(), Verbose: true})
	if err != nil {
		return 0, fmt.Errorf("status of container %s: %w", client.ShortID(container.GetId()), err)
	}
	var info struct {
		PID int `json:"pid"`
	}
	if err := json.Unmarshal([]byte(reply.GetInfo()["info"]), &info); err != nil || info.PID < 1 {
		return 0, errdefs.FailedPrecondition("the runtime does not report the process of container %s",
			client.ContainerName(container))
	}
	return info.PID, nil
}

// sameMountNamespace reports whether a process is in the mount namespace of this program or of the
// host's init.
func sameMountNamespace(pid int) (bool, error) {
	var st unix.Stat_t
	if err := unix.Stat("/proc/"+strconv.Itoa(pid)+"/ns/mnt", &st); err != nil {
		return false, err
	}
	for _, other := range []string{"/proc/self/ns/mnt", "/proc/1/ns/mnt"} {
		var host unix.Stat_t
		if err := unix.Stat(other, &host); err != nil {
			return false, err
		}
		if host.Dev == st.Dev && host.Ino == st.Ino {
			return true, nil
		}
	}
	return false, nil
}

// checkRunning returns an error that names the container's state if it does not run.
func checkRunning(ctx context.Context, c *client.Client, container *runtimeapi.Container) error {
	row := newContainerRow(container)
	switch container.GetState() {
	case runtimeapi.ContainerState_CONTAINER_RUNNING:
		return nil
	case runtimeapi.ContainerState_CONTAINER_EXITED:
		if err := row.addExit(ctx, c); err != nil {
			return err
		}
	}
	state := row.State
	if row.ExitCode != nil {
		state = fmt.Sprintf("%s %d", row.State, *row.ExitCode)
	}
	return errdefs.FailedPrecondition("container %s is not running (%s)", client.ContainerName(container), state)
}

// addContainerFlag adds --container. The shell completes it with the containers of the pod.
func (o *Connection) addContainerFlag(cmd *cobra.Command) *string {
	name := cmd.Flags().StringP("container", "c", "", "container of the pod")
	// It fails only for an unknown flag.
	_ = cmd.RegisterFlagCompletionFunc("container", func(cmd *cobra.Command, args []string, typed string) (
		[]string, cobra.ShellCompDirective) {
		if len(args) == 0 {
			return nil, cobra.ShellCompDirectiveNoFileComp
		}
		return o.completeNames(containersOfPod(args[0]))(cmd, nil, typed)
	})
	return name
}

// findContainer returns the container that ref identifies. ref may identify a pod. Then name
// selects one of its containers, and may be empty if the pod has only one.
func findContainer(ctx context.Context, c *client.Client, ref, name string) (*runtimeapi.Container, error) {
	return findAmong(ctx, c, ref, name, func(*runtimeapi.Container) bool { return true })
}

// findRunning is findContainer for commands that need a running container. Exited containers, such
// as init containers, do not make the name of a pod ambiguous.
func findRunning(ctx context.Context, c *client.Client, ref, name string) (*runtimeapi.Container, error) {
	container, err := findAmong(ctx, c, ref, name, func(c *runtimeapi.Container) bool {
		return c.GetState() == runtimeapi.ContainerState_CONTAINER_RUNNING
	})
	if err != nil {
		return nil, err
	}
	return container, checkRunning(ctx, c, container)
}

// findAmong prefers the containers of a pod that satisfy prefer.
func findAmong(ctx context.Context, c *client.Client, ref, name string, prefer func(*runtimeapi.Container) bool) (
	*runtimeapi.Container, error) {
	container, pod, err := findEither(ctx, c, ref, name)
	if err != nil || pod == nil {
		return container, err
	}
	all, err := c.ContainersOf(ctx, pod.GetId())
	if err != nil {
		return nil, err
	}
	newest, preferred := map[string]*runtimeapi.Container{}, map[string]*runtimeapi.Container{}
	for _, container := range all { // newest first
		n := container.GetMetadata().GetName()
		if newest[n] != nil {
			continue
		}
		newest[n] = container
		if prefer(container) {
			preferred[n] = container
		}
	}
	if name == "" && len(preferred) > 0 {
		newest = preferred
	}
	names := slices.Sorted(maps.Keys(newest))
	switch {
	case name != "" && newest[name] != nil:
		return newest[name], nil
	case len(names) == 0:
		return nil, errdefs.NotFound("pod %s has no container", client.PodTitle(pod))
	case name != "":
		return nil, errdefs.NotFound("pod %s has no container %q, but %s", client.PodTitle(pod), name, strings.Join(names, ", "))
	case len(names) > 1:
		return nil, errdefs.InvalidArgument("pod %s has several containers; choose one with -c: %s",
			client.PodTitle(pod), strings.Join(names, ", "))
	}
	return newest[names[0]], nil
}

// previousOf returns the previous attempt of a container. kubelet keeps it after a restart.
func previousOf(ctx context.Context, c *client.Client, container *runtimeapi.Container) (*runtimeapi.Container, error) {
	all, err := c.ContainersOf(ctx, container.GetPodSandboxId())
	if err != nil {
		return nil, err
	}
	meta := container.GetMetadata()
	for _, other := range all { // newest first
		if other.GetMetadata().GetName() == meta.GetName() && other.GetMetadata().GetAttempt() < meta.GetAttempt() {
			return other, nil
		}
	}
	return nil, errdefs.NotFound("container %s has no previous attempt", client.ContainerName(container))
}

// findEither finds a container or pod. With the name of a container, ref must be a pod.
func findEither(ctx context.Context, c *client.Client, ref, name string) (
	*runtimeapi.Container, *runtimeapi.PodSandbox, error) {
	if name == "" {
		return c.FindForContainer(ctx, ref)
	}
	pod, err := c.FindPod(ctx, ref)
	return nil, pod, err
}
