package sandbox

import (
	"context"
	"iter"
	"os"
	"sync/atomic"
	"time"

	"github.com/opencontainers/go-digest"
	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/checkpoint/process/archive"
	"berth/checkpoint/record"
	"berth/cni"
	"berth/image"
	"berth/internal/rootfs"
	"berth/oci"
	"berth/oci/users"
	"berth/sandbox/runtime"
	"berth/sandbox/state"
	"berth/shim"
	"berth/shim/proto"
)

// The manager commands the host through these interfaces only. Tests replace them with fakes, so
// that each failure of each step can be tested without root.

// Starter starts the processes of pods and containers. runtime.Launcher implements it and documents
// the methods.
type Starter interface {
	PlanPause(ctx context.Context, pod *state.Pod) (proto.PauseKind, *specs.Spec, error)
	Pause(ctx context.Context, pod *state.Pod, planned *specs.Spec) (*proto.Started, error)
	Root(ctx context.Context, pod *state.Pod, c *state.Container) (rootfs.Spec, error)
	User(ctx context.Context, c *state.Container, root rootfs.Spec) (users.User, error)
	MakeVolumes(ctx context.Context, c *state.Container, root rootfs.Spec) ([]oci.AnonymousVolume, error)
	Validate(ctx context.Context, pod *state.Pod, c *state.Container,
		targetPIDNS func() (string, error)) (*specs.Spec, error)
	RuntimeSpec(ctx context.Context, pod *state.Pod, c *state.Container,
		targetPIDNS func() (string, error)) (*specs.Spec, error)
	Start(ctx context.Context, pod *state.Pod, c *state.Container, planned *specs.Spec,
		targetPIDNS func() (string, error)) (*proto.Started, error)
	Describe(ctx context.Context, pod *state.Pod, c *state.Container,
		targetPIDNS func() (string, error), describing *atomic.Bool) (*specs.Spec, error)
}

// Processes finds, watches and removes the processes of launched containers and pods.
// runtime.Processes implements it and documents the methods.
type Processes interface {
	Find(ctx context.Context, id string) (*runtime.Running, proto.PIDs, error)
	AwaitEnd(process *os.File, object string) bool
	AwaitMonitor(run *runtime.Running, object string) bool
	ReadExit(ctx context.Context, id string, startedAt time.Time) (exit state.Exit, lost bool, err error)
	LogLost(id string)
	End(ctx context.Context, process *os.File) error
	KillLeftBehind(ctx context.Context, id, cgroupsPath string) error
	Remove(ctx context.Context, id, cgroupsPath string) error
	RemoveByID(ctx context.Context, id string) error
	RemoveRoot(podID string) error
}

// Stopper stops containers and finds out how they ended. *runtime.Stopper implements it and
// documents the methods.
type Stopper interface {
	Stop(ctx context.Context, c runtime.StopTarget, run *runtime.Running, signal unix.Signal, timeout time.Duration) error
	Kill(ctx context.Context, c runtime.StopTarget) error
	Settle(c runtime.StopTarget, startedAt time.Time) (exit state.Exit, settled bool)
	SettleLost(c runtime.StopTarget, exit state.Exit) (_ state.Exit, settled bool)
}

// Dumper freezes containers and dumps their processes, or saves the sandbox of a pod.
// runtime.Dumper implements it and documents the methods.
type Dumper interface {
	Prepare(ctx context.Context, id string, dir *os.File) (runtime.Dump, error)
	Freeze(ctx context.Context, id, cgroupsPath string, timeout time.Duration) (runtime.Frozen, error)
	SaveSandbox(ctx context.Context, pod *state.PodSpec, c *state.ContainerSpec, dir *os.File) error
	Thaw(cgroupsPath string) error
	EndLeft(cgroupsPath func(id string) string) error
}

// Images finds images and holds their layers. *image.Store implements it and documents the methods.
type Images interface {
	Get(ref string) (*image.Image, error)
	Verify(ctx context.Context, img *image.Image, written, namespace string) error
	Hold(id string, layers []digest.Digest) (rootfs.Spec, error)
	Release(id string) error
	LayersOf(img *image.Image) []image.LayerUse
	Keep(layers []digest.Digest) []*os.File
	Complete(layers []digest.Digest) bool
	Usable(layers []digest.Digest) error
}

// Volumes finds and holds image volumes and the image of a pause. runtime.Roots implements it and
// documents the methods.
type Volumes interface {
	FindVolumes(ctx context.Context, namespace string, config *runtimeapi.ContainerConfig) ([]state.Volume, error)
	HoldVolumes(id string, config *runtimeapi.ContainerConfig, volumes []state.Volume) ([]proto.Volume, error)
	ReleaseVolumes(id string, volumes []state.Volume) error
	PauseImage(ctx context.Context, reference string) (*state.Image, error)
}

// Network attaches pods to the node's network. *podenv.Networks implements it and documents the
// methods.
type Network interface {
	Status(ctx context.Context) error
	SetPodCIDR(ctx context.Context, cidr string) error
	Load() (damaged []record.Damaged, err error)
	Plan(spec *state.PodSpec) (cni.Attachment, [][]cni.IPRange, error)
	Attach(ctx context.Context, spec *state.PodSpec, attachment *cni.Attachment) (ips []string, err error)
	Detach(ctx context.Context, spec *state.PodSpec, attachment cni.Attachment) error
	Forget(id string) error
	OnChange(call func())
	Collect(ctx context.Context, attached iter.Seq[*state.PodSpec])
	Leave()
}

// Environment makes and removes a pod's files, mounts and namespaces. podenv.Provisioner implements
// it and documents the methods.
type Environment interface {
	Make(ctx context.Context, spec *state.PodSpec) error
	FinishFiles(ctx context.Context, spec *state.PodSpec, ips []string) error
	RemoveNetNS(path string) error
	RemoveMounts(podID string) error
	Remove(podID string) error
	Unrecorded(known func(id string) bool) (map[string]bool, error)
	RemoveUnrecorded(ctx context.Context, id string) error
}

// Restores prepares what pods and containers get from a checkpoint. runtime.Restores implements it
// and documents the methods.
type Restores interface {
	Import(ctx context.Context, path, podID string) (*archive.Archive, error)
	Compare(ctx context.Context, a *archive.Archive, c *state.Container, runtimeSpec *specs.Spec) error
	FillLayer(ctx context.Context, c *state.Container, root rootfs.Spec) error
	FillShm(ctx context.Context, podID, name string) error
}

// Records stores durable records. *state.Records implements it and documents the methods.
type Records interface {
	WritePod(spec *state.PodSpec, status *state.PodStatus) error
	WriteContainer(spec *state.ContainerSpec, status *state.ContainerStatus) error
	RemovePod(id string) error
	RemoveContainer(id string) error
	LoadPods(add func(*state.PodSpec, state.PodStatus)) ([]record.Damaged, error)
	LoadContainers(add func(*state.ContainerSpec, state.ContainerStatus)) ([]record.Damaged, error)
}

// Trash removes directory trees in the background. *trash.Trash implements it.
type Trash interface {
	Discard(path string) error
	Since() (wait func(ctx context.Context))
	Run(ctx context.Context)
}

// Pool keeps idle launchers. *shim.Launchers implements it and documents the methods.
type Pool interface {
	Expect()
	ExpectPause(kind proto.PauseKind)
	Counts() shim.Counts
	Close() error
}
