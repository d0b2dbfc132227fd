package runtime

import (
	"context"
	"fmt"
	"log/slog"
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
	Node       state.Node
	Roots      Roots
	Users      *Users
	AppArmor   profiles
	SELinux    lsm.SELinux
	Sources    *Sources
	Launchers  *shim.Launchers
	PauseDir   string // root filesystem of the embedded pause
	MaxLogLine int    // maximum bytes of a log line; longer lines are split as partial
	Tasks      *task.Runner
	Log        *slog.Logger

	Unpacker      Unpacker // of the content of anonymous volumes
	IgnoreVolumes bool     // containers get no anonymous volumes
}

// Pause starts the pod's pause in its existing namespaces. planned is the runtime-spec that
// PlanPause has returned.
func (k Launcher) Pause(ctx context.Context, pod *state.Pod, planned *specs.Spec) (*proto.Started, error) {
	ctx, span := trace.Nest(ctx, "pause")
	defer span.End()
	root := k.embeddedRoot(pod)
	if pod.PauseImage != nil {
		var err error
		if root, planned, err = k.planImage(ctx, pod); err != nil {
			return nil, err
		}
	}
	request := k.pauseLaunch(pod, root, planned)
	failpoint.Reach("pause.make-directory")
	if err := os.MkdirAll(filepath.Join(request.Dir, "rootfs"), 0o700); err != nil {
		return nil, fmt.Errorf("make shim directory of pod %s: %w", pod.ID, err)
	}
	failpoint.Reach("pause.directory-made")
	defer k.Tasks.Begin("pause launch", "pod "+pod.ID)()
	started, err := k.Launchers.Launch(ctx, request)
	if err != nil {
		return nil, fmt.Errorf("start pause of pod %s: %w", pod.ID, err)
	}
	return started, nil
}

// PlanPause decides how the pod's pause is created, and builds its runtime-spec. For a pause image
// the spec is nil, because the image's users are not known yet. PlanPause refuses a pod whose
// embedded pause cannot be described. It does not change the host.
func (k Launcher) PlanPause(ctx context.Context, pod *state.Pod) (proto.PauseKind, *specs.Spec, error) {
	if pod.PauseImage != nil {
		return proto.ContainerPause, nil, nil
	}
	spec, err := k.describePause(ctx, pod, UserFiles{})
	if err != nil {
		return "", nil, err
	}
	if k.pauseLaunch(pod, k.embeddedRoot(pod), spec).FitsPlainPause() {
		return proto.PlainPause, spec, nil
	}
	return proto.ContainerPause, spec, nil
}

// planImage makes the root filesystem of a pause image, reads its user files, and builds the
// runtime-spec. The image gets a writable layer because the launcher makes mount points in it. The
// usual pause image contains only its program.
func (k Launcher) planImage(ctx context.Context, pod *state.Pod) (rootfs.Spec, *specs.Spec, error) {
	root, err := k.Roots.Writable(pod.ID, pod.PauseImage, k.idMap(pod), pod.Labels.Mount, 0)
	if err != nil {
		return root, nil, fmt.Errorf("make root filesystem of pause image: %w", err)
	}
	files, err := k.Users.Of(pod.PauseImage.ID, root)
	if err != nil {
		return root, nil, err
	}
	spec, err := k.describePause(ctx, pod, files)
	return root, spec, err
}

func (k Launcher) embeddedRoot(pod *state.Pod) rootfs.Spec {
	return k.Roots.Pause(k.PauseDir, k.idMap(pod), pod.Labels.Mount, pod.Runtime.NeedsOverlay())
}

// describePause builds the runtime-spec of the pod's pause. files are the user files of the pause
// image.
func (k Launcher) describePause(ctx context.Context, pod *state.Pod, files UserFiles) (*specs.Spec, error) {
	var config *ocispec.ImageConfig
	var imageUser string
	if image := pod.PauseImage; image != nil {
		config, imageUser = &image.Config, image.Config.User
	}
	user, err := users.Resolve(files.Passwd, files.Group,
		users.SandboxRequest(pod.Config.GetLinux().GetSecurityContext(), imageUser))
	if err != nil {
		return nil, err
	}
	return k.pauseSpec(ctx, pod, user, config)
}

// pauseLaunch returns the launch request of the pod's pause.
func (k Launcher) pauseLaunch(pod *state.Pod, root rootfs.Spec, spec *specs.Spec) *proto.Launch {
	return &proto.Launch{
		ID:            pod.ID,
		Dir:           k.Node.Shim(pod.ID),
		Spec:          spec,
		Rootfs:        root,
		RootPlace:     k.rootPlace(root),
		SystemdCgroup: k.Node.SystemdCgroup,
		Pause:         pod.Pause,
		Runtime:       pod.Runtime.Program(),
		Restore:       k.restoreSandbox(pod, pod.Restore),
	}
}

// Root makes the writable root filesystem of a container.
func (k Launcher) Root(ctx context.Context, pod *state.Pod, c *state.Container) (rootfs.Spec, error) {
	defer trace.Begin(ctx, "root filesystem").End()
	return k.Roots.Writable(c.ID, &c.Image, k.idMap(pod), c.Labels.Mount, c.Project)
}

// User resolves the user of a container, whose root filesystem is root.
func (k Launcher) User(ctx context.Context, c *state.Container, root rootfs.Spec) (users.User, error) {
	defer trace.Begin(ctx, "users").End()
	files, err := k.Users.Of(c.Image.ID, root)
	if err != nil {
		return users.User{}, err
	}
	request := users.ContainerRequest(c.Config.GetLinux().GetSecurityContext(), c.Image.Config.User)
	return users.Resolve(files.Passwd, files.Group, request)
}

// RuntimeSpec builds the runtime-spec of a container. targetPIDNS returns the path of the PID
// namespace to join, or "" for the config's. RuntimeSpec calls it after the waits for volumes. It
// inspects the sources of mounts, and returns ctx's error if a volume hangs.
func (k Launcher) RuntimeSpec(
	ctx context.Context, pod *state.Pod, c *state.Container, targetPIDNS func() (string, error),
) (*specs.Spec, error) {
	defer trace.Begin(ctx, "describe").End()
	var spec *specs.Spec
	err := k.detached(ctx, c, "describe", func() (err error) {
		spec, err = k.describe(ctx, pod, c, targetPIDNS)
		return err
	})
	if err != nil { // another goroutine may still write spec
		return nil, err
	}
	return spec, nil
}

// describe builds the runtime-spec. It blocks while a volume hangs.
func (k Launcher) describe(
	ctx context.Context, pod *state.Pod, c *state.Container, targetPIDNS func() (string, error),
) (*specs.Spec, error) {
	defer k.Tasks.Begin("mount sources", c.String())()
	target, err := targetPIDNS() // after the waits for volumes, because the target may exit meanwhile
	if err != nil {
		return nil, err
	}
	return k.containerSpec(ctx, pod, c, k.Roots.VolumePlaces(c.ID, c.Volumes), target)
}

// Validate builds the runtime-spec of a container and refuses the same specs as a launch. It
// creates missing mount sources and sets their SELinux labels. If a volume hangs, Validate returns
// ctx's error and starts no further step.
func (k Launcher) Validate(
	ctx context.Context, pod *state.Pod, c *state.Container, targetPIDNS func() (string, error),
) (*specs.Spec, error) {
	defer trace.Begin(ctx, "inspect mounts").End()
	if err := k.Roots.CheckVolumes(c.ID, c.Config, c.Volumes); err != nil {
		return nil, err
	}
	var spec *specs.Spec
	var toLabel []string
	err := k.detached(ctx, c, "inspect the mounts of", func() (err error) {
		if err = state.MakeSources(ctx, c.Config); err != nil {
			return err
		}
		if spec, err = k.describe(ctx, pod, c, targetPIDNS); err != nil {
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

// labelMounts sets the labels of mounts that request it. A volume may hold millions of files on a
// server that does not answer. When ctx ends, the current volume is finished in the background. A
// retry of the creation waits for the labelling, and then labels the volume again.
func (k Launcher) labelMounts(ctx context.Context, sources []string, labels confine.Labels) error {
	for _, source := range sources {
		if err := k.Sources.exclusive(ctx, "label", source, func() error {
			return k.SELinux.LabelMount(source, labels)
		}); err != nil {
			return err
		}
	}
	return nil
}

// Start starts a container of a running pod. planned is the runtime-spec from Validate or Spec. If
// it is nil, Start builds it like Spec.
func (k Launcher) Start(
	ctx context.Context, pod *state.Pod, c *state.Container, planned *specs.Spec, targetPIDNS func() (string, error),
) (*proto.Started, error) {
	root, err := k.Root(ctx, pod, c)
	if err != nil {
		return nil, err
	}
	volumes, err := k.Roots.HoldVolumes(c.ID, c.Config, c.Volumes)
	if err != nil {
		return nil, err
	}
	spec, err := k.launchSpec(ctx, pod, c, planned, targetPIDNS)
	if err != nil {
		return nil, err
	}
	var restore *proto.Restore
	if c.Restore != nil || pod.Restore != nil {
		if restore, err = k.restore(ctx, pod, c); err != nil {
			return nil, err
		}
	}
	dir := k.Node.Shim(c.ID)
	failpoint.Reach("container.make-directory")
	if err := os.MkdirAll(filepath.Join(dir, "rootfs"), 0o700); err != nil {
		return nil, fmt.Errorf("make shim directory of container %s: %w", c.ID, err)
	}
	failpoint.Reach("container.directory-made")
	defer k.Tasks.Begin("container launch", "container "+c.ID)()
	return k.Launchers.Launch(ctx, &proto.Launch{
		ID: c.ID, Dir: dir, Spec: spec, Rootfs: root, RootPlace: k.rootPlace(root), Volumes: WithMapping(root, volumes),
		SystemdCgroup: k.Node.SystemdCgroup,
		LogPath:       c.LogPath, LogDir: pod.Config.GetLogDirectory(), MaxLogLine: k.MaxLogLine,
		Stdin: c.Config.GetStdin(), StdinOnce: c.Config.GetStdinOnce(), Terminal: c.Config.GetTty(),
		Runtime: pod.Runtime.Program(), Restore: restore,
	})
}
