package runtime

import (
	"context"
	"fmt"
	"os"
	"path/filepath"

	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	specs "github.com/opencontainers/runtime-spec/specs-go"

	"berth/internal/failpoint"
	"berth/internal/rootfs"
	"berth/internal/task"
	"berth/internal/trace"
	"berth/oci/confine"
	"berth/oci/users"
	"berth/sandbox/lsm"
	"berth/sandbox/state"
	"berth/shim"
	"berth/shim/proto"
)

// Launcher starts pauses and containers.
type Launcher struct {
	Node       Node
	Roots      Roots
	Users      *Users
	AppArmor   *lsm.AppArmor
	SELinux    lsm.SELinux
	Sources    *Sources
	Launchers  *shim.Launchers
	PauseDir   string // the root filesystem of the embedded pause
	MaxLogLine int    // bytes before a log line is split as partial
	Tasks      *task.Runner
}

// Pause starts the process that holds the pod's namespaces. The namespaces exist.
func (k Launcher) Pause(ctx context.Context, pod *state.Pod) (*proto.Started, error) {
	ctx, span := trace.Nest(ctx, "pause")
	defer span.End()
	image, idMap := pod.PauseImage, k.idMap(pod)
	root := k.Roots.Pause(k.PauseDir, idMap, pod.Labels.Mount)
	k.AppArmor.Ensure(ctx)
	var files UserFiles
	var config *ocispec.ImageConfig
	var imageUser string
	var err error
	if image != nil {
		// The layer is writable because the launcher makes mount points in it. The usual pause
		// image holds only its program.
		if root, err = k.Roots.Writable(pod.ID, image, idMap, pod.Labels.Mount, 0); err != nil {
			return nil, fmt.Errorf("pause image: %w", err)
		}
		if files, err = k.Users.Of(image.ID, root); err != nil {
			return nil, err
		}
		config, imageUser = &image.Config, image.Config.User
	}
	user, err := users.Resolve(files.Passwd, files.Group,
		users.SandboxRequest(pod.Config.GetLinux().GetSecurityContext(), imageUser))
	if err != nil {
		return nil, err
	}
	spec, err := k.Node.Pause(pod, user, config)
	if err != nil {
		return nil, err
	}
	dir := k.Node.Dirs.Shim(pod.ID)
	failpoint.Reach("pause.make-directory")
	if err := os.MkdirAll(filepath.Join(dir, "rootfs"), 0o700); err != nil {
		return nil, fmt.Errorf("make shim directory of pod %s: %w", pod.ID, err)
	}
	failpoint.Reach("pause.directory-made")
	defer k.Tasks.Begin("the launch of its pause", "pod "+pod.ID)()
	started, err := k.Launchers.Launch(ctx, &proto.Launch{ID: pod.ID, Dir: dir, Spec: spec,
		Rootfs: root, RootPlace: k.rootPlace(root), SystemdCgroup: k.Node.SystemdCgroup, Pause: true,
		BuiltIn: image == nil, Runtime: pod.Runtime.Program()})
	if err != nil {
		return nil, fmt.Errorf("start pause of pod %s: %w", pod.ID, err)
	}
	return started, nil
}

// Root is the writable root filesystem of a container.
func (k Launcher) Root(ctx context.Context, pod *state.Pod, c *state.Container) (rootfs.Spec, error) {
	defer trace.Begin(ctx, "root filesystem").End()
	return k.Roots.Writable(c.ID, &c.Image, k.idMap(pod), c.Labels.Mount, c.Project)
}

// User finds out who a container runs as. root is its root filesystem.
func (k Launcher) User(ctx context.Context, c *state.Container, root rootfs.Spec) (users.User, error) {
	defer trace.Begin(ctx, "users").End()
	files, err := k.Users.Of(c.Image.ID, root)
	if err != nil {
		return users.User{}, err
	}
	request := users.ContainerRequest(c.Config.GetLinux().GetSecurityContext(), c.Image.Config.User)
	return users.Resolve(files.Passwd, files.Group, request)
}

// Spec builds the runtime-spec of a container. targetPIDNS finds the PID namespace to join; "" is
// the config's. Spec calls it after the waits for volumes. It inspects the sources of mounts and
// returns ctx's error when a volume hangs.
func (k Launcher) Spec(
	ctx context.Context, pod *state.Pod, c *state.Container, targetPIDNS func() (string, error),
) (*specs.Spec, error) {
	defer trace.Begin(ctx, "describe").End()
	var spec *specs.Spec
	err := k.detached(ctx, c, "describe", func() (err error) { spec, err = k.describe(pod, c, targetPIDNS); return err })
	if err != nil { // another goroutine may still write spec
		return nil, err
	}
	return spec, nil
}

// describe may hang with a volume.
func (k Launcher) describe(
	pod *state.Pod, c *state.Container, targetPIDNS func() (string, error),
) (*specs.Spec, error) {
	defer k.Tasks.Begin("the sources of its mounts", c.String())()
	target, err := targetPIDNS() // late, after the waits for volumes: the target may have ended meanwhile
	if err != nil {
		return nil, err
	}
	return k.Node.Container(pod, c, k.Roots.VolumePlaces(c.ID, c.Volumes), target)
}

// Validate builds the runtime-spec of a container and refuses the same specs as a launch. It makes
// missing mount sources and sets their SELinux labels. Validate returns ctx's error when a volume
// hangs. It starts no further step then.
func (k Launcher) Validate(
	ctx context.Context, pod *state.Pod, c *state.Container, targetPIDNS func() (string, error),
) (*specs.Spec, error) {
	defer trace.Begin(ctx, "look at mounts").End()
	if err := k.Roots.CheckVolumes(c.ID, c.Config, c.Volumes); err != nil {
		return nil, err
	}
	var spec *specs.Spec
	var toLabel []string
	err := k.detached(ctx, c, "look at the mounts of", func() (err error) {
		if err = state.MakeSources(ctx, c.Config); err != nil {
			return err
		}
		if spec, err = k.describe(pod, c, targetPIDNS); err != nil {
			return err
		}
		if err = k.checkMounts(pod.ID, pod.Runtime, spec); err != nil {
			return err
		}
		toLabel, err = lsm.MountsToLabel(c.Config, c.Labels)
		return err
	})
	if err != nil { // another goroutine may still write the results
		return nil, err
	}
	if err := k.labelMounts(ctx, toLabel, c.Labels); err != nil {
		return nil, err
	}
	return spec, nil
}

// labelMounts labels the files of mounts that request it. A volume may hold millions of files on a
// server that does not answer. When ctx ends, the current volume is finished in the background. A
// retry of the creation waits for that and starts again.
func (k Launcher) labelMounts(ctx context.Context, sources []string, labels confine.Labels) error {
	for _, source := range sources {
		if err := k.Sources.alone(ctx, "label", source, func() error {
			return k.SELinux.LabelMount(source, labels)
		}); err != nil {
			return err
		}
	}
	return nil
}

// Start starts a container of a pod that runs. targetPIDNS is as for Spec.
func (k Launcher) Start(
	ctx context.Context, pod *state.Pod, c *state.Container, targetPIDNS func() (string, error),
) (*proto.Started, error) {
	root, err := k.Root(ctx, pod, c)
	if err != nil {
		return nil, err
	}
	volumes, err := k.Roots.HoldVolumes(c.ID, c.Config, c.Volumes)
	if err != nil {
		return nil, err
	}
	k.AppArmor.Ensure(ctx)
	spec, err := k.Spec(ctx, pod, c, targetPIDNS)
	if err != nil {
		return nil, err
	}
	dir := k.Node.Dirs.Shim(c.ID)
	failpoint.Reach("container.make-directory")
	if err := os.MkdirAll(filepath.Join(dir, "rootfs"), 0o700); err != nil {
		return nil, fmt.Errorf("make shim directory of container %s: %w", c.ID, err)
	}
	failpoint.Reach("container.directory-made")
	defer k.Tasks.Begin("its launch", "container "+c.ID)()
	return k.Launchers.Launch(ctx, &proto.Launch{
		ID: c.ID, Dir: dir, Spec: spec, Rootfs: root, RootPlace: k.rootPlace(root), Volumes: ShownAs(root, volumes),
		SystemdCgroup: k.Node.SystemdCgroup,
		LogPath:       c.LogPath, LogDir: pod.Config.GetLogDirectory(), MaxLogLine: k.MaxLogLine,
		Stdin: c.Config.GetStdin(), StdinOnce: c.Config.GetStdinOnce(), Terminal: c.Config.GetTty(),
		Runtime: pod.Runtime.Program(),
	})
}
