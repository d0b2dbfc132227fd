package runtime

import (
	"context"
	"fmt"
	"os"
	"path/filepath"

	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	specs "github.com/opencontainers/runtime-spec/specs-go"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/internal/failpoint"
	"berth/internal/nri"
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

// Launcher is what is needed to launch.
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

// Container is what a container is launched from.
type LaunchContainer struct {
	Rec         *state.ContainerRecord // what does not change after the container was published is read
	Config      *runtimeapi.ContainerConfig
	Resources   *runtimeapi.LinuxContainerResources
	Limits      *nri.Limits            // added to these by plugins
	TargetPIDNS func() (string, error) // the PID namespace to join; empty: as the config says
}

// Pause starts the process that holds the pod's namespaces, which there are. image replaces the embedded pause; nil: none.
func (k Launcher) Pause(ctx context.Context, pod SpecPod, image *state.Image) (*proto.Started, error) {
	ctx, span := trace.Nest(ctx, "pause")
	defer span.End()
	idMap, err := k.idMap(pod.ID, pod.Config)
	if err != nil {
		return nil, err
	}
	root := k.Roots.Pause(k.PauseDir, idMap, pod.Labels.Mount)
	k.AppArmor.Ensure(ctx)
	var files UserFiles
	var config *ocispec.ImageConfig
	var imageUser string
	if image != nil {
		// Writable, because the usual pause image is nothing but its program: the
		// folders to mount on have to be made.
		if root, err = k.Roots.Writable(pod.ID, image, idMap, pod.Labels.Mount, 0); err != nil {
			return nil, fmt.Errorf("pause image: %w", err)
		}
		if files, err = k.Users.Of(image.ID, root); err != nil {
			return nil, err
		}
		config, imageUser = &image.Config, image.Config.User
	}
	user, err := users.Resolve(files.Passwd, files.Group, users.SandboxRequest(pod.Config.GetLinux().GetSecurityContext(), imageUser))
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
		Rootfs: root, RootPlace: k.rootPlace(root), SystemdCgroup: k.Node.SystemdCgroup, Pause: true, BuiltIn: image == nil, Runtime: pod.Runtime.Program()})
	if err != nil {
		return nil, fmt.Errorf("start pause of pod %s: %w", pod.ID, err)
	}
	return started, nil
}

// Root is the writable root filesystem of a container.
func (k Launcher) Root(ctx context.Context, pod SpecPod, c LaunchContainer) (rootfs.Spec, error) {
	defer trace.Begin(ctx, "root filesystem").End()
	idMap, err := k.idMap(pod.ID, pod.Config)
	if err != nil {
		return rootfs.Spec{}, err
	}
	return k.Roots.Writable(c.Rec.ID, &c.Rec.Image, idMap, c.Rec.SELinux.Mount, c.Rec.Project)
}

// User finds out who a container runs as. root is its root filesystem.
func (k Launcher) User(ctx context.Context, c LaunchContainer, root rootfs.Spec) (users.User, error) {
	defer trace.Begin(ctx, "users").End()
	files, err := k.Users.Of(c.Rec.Image.ID, root)
	if err != nil {
		return users.User{}, err
	}
	request := users.ContainerRequest(c.Config.GetLinux().GetSecurityContext(), c.Rec.Image.Config.User)
	return users.Resolve(files.Passwd, files.Group, request)
}

// Spec describes a container to its launcher. It looks at the sources of mounts, and ends with ctx where a volume hangs.
func (k Launcher) Spec(ctx context.Context, pod SpecPod, c LaunchContainer) (*specs.Spec, error) {
	defer trace.Begin(ctx, "describe").End()
	var spec *specs.Spec
	err := k.aside(ctx, c, "describe", func(c LaunchContainer) (err error) { spec, err = k.describe(pod, c); return err })
	if err != nil { // spec may be written still
		return nil, err
	}
	return spec, nil
}

// describe may hang with a volume.
func (k Launcher) describe(pod SpecPod, c LaunchContainer) (*specs.Spec, error) {
	defer k.Tasks.Begin("the sources of its mounts", "container "+c.Rec.ID)()
	target, err := c.TargetPIDNS()
	if err != nil {
		return nil, err
	}
	return k.Node.Container(pod, SpecContainer{ID: c.Rec.ID, Config: c.Config, Image: &c.Rec.Image.Config,
		User: c.Rec.User, Labels: c.Rec.SELinux, Volumes: k.Roots.VolumePlaces(c.Rec.ID, c.Rec.Volumes),
		TargetPIDNS: target, Resources: c.Resources, Limits: c.Limits, Adjustment: c.Rec.Adjustment})
}

// Prove describes a container, and refuses what a launch would. Its mounts have sources afterwards, and these their SELinux labels. It
// ends with ctx where a volume hangs; nothing is begun then that was not.
func (k Launcher) Prove(ctx context.Context, pod SpecPod, c LaunchContainer) (*specs.Spec, error) {
	defer trace.Begin(ctx, "look at mounts").End()
	if err := k.Roots.CheckVolumes(c.Rec.ID, c.Config, c.Rec.Volumes); err != nil {
		return nil, err
	}
	var spec *specs.Spec
	var toLabel []string
	err := k.aside(ctx, c, "look at the mounts of", func(c LaunchContainer) (err error) {
		if err = state.MakeSources(ctx, c.Config); err != nil {
			return err
		}
		if spec, err = k.describe(pod, c); err != nil {
			return err
		}
		if err = k.checkMounts(pod.ID, pod.Runtime, spec); err != nil {
			return err
		}
		toLabel, err = lsm.MountsToLabel(c.Config, c.Rec.SELinux)
		return err
	})
	if err != nil { // the others may be written still
		return nil, err
	}
	if err := k.labelMounts(ctx, toLabel, c.Rec.SELinux); err != nil {
		return nil, err
	}
	return spec, nil
}

// labelMounts labels the files of mounts that ask for it: all of a volume's, of which there may be millions, on a server that may not
// answer. When ctx ends the one that is at work goes on; a container that is created again waits for it, and begins anew.
func (k Launcher) labelMounts(ctx context.Context, sources []string, labels confine.Labels) error {
	for _, source := range sources {
		if err := k.Sources.alone(ctx, "label", source, func() error { return k.SELinux.LabelMount(source, labels) }); err != nil {
			return err
		}
	}
	return nil
}

// Container starts a container of a pod that runs.
func (k Launcher) Container(ctx context.Context, pod SpecPod, c LaunchContainer) (*proto.Started, error) {
	root, err := k.Root(ctx, pod, c)
	if err != nil {
		return nil, err
	}
	volumes, err := k.Roots.HoldVolumes(c.Rec.ID, c.Config, c.Rec.Volumes)
	if err != nil {
		return nil, err
	}
	k.AppArmor.Ensure(ctx)
	spec, err := k.Spec(ctx, pod, c)
	if err != nil {
		return nil, err
	}
	dir := k.Node.Dirs.Shim(c.Rec.ID)
	failpoint.Reach("container.make-directory")
	if err := os.MkdirAll(filepath.Join(dir, "rootfs"), 0o700); err != nil {
		return nil, fmt.Errorf("make shim directory of container %s: %w", c.Rec.ID, err)
	}
	failpoint.Reach("container.directory-made")
	defer k.Tasks.Begin("its launch", "container "+c.Rec.ID)()
	return k.Launchers.Launch(ctx, &proto.Launch{
		ID: c.Rec.ID, Dir: dir, Spec: spec, Rootfs: root, RootPlace: k.rootPlace(root), Volumes: ShownAs(root, volumes),
		SystemdCgroup: k.Node.SystemdCgroup,
		LogPath:       c.Rec.LogPath, LogDir: pod.Config.GetLogDirectory(), MaxLogLine: k.MaxLogLine,
		Stdin: c.Config.GetStdin(), StdinOnce: c.Config.GetStdinOnce(), Terminal: c.Config.GetTty(), Runtime: pod.Runtime.Program(),
	})
}
