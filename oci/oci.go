// Package oci builds a runtime-spec (github.com/opencontainers/runtime-spec) for libcontainer from
// a CRI config, an image's config and facts about the host.
//
// The functions keep no state and write nothing. They query host paths (whether a mount source
// exists, which device is at /dev/fuse) through the [Files] interface. Specs are complete except
// for Root.Path, which the launcher sets. [SandboxSpec] is for the pause of a pod, [ContainerSpec]
// for a container, and [ExecProcess] for an exec in it.
//
// # Rules
//
//   - Annotations and image labels never reach a spec, because libcontainer and systemd interpret
//     some of them (CVE-2024-3154, CVE-2026-53488). Annotations for block I/O and RDT classes,
//     which containerd supports, therefore have no effect.
//   - Requests that berth cannot fulfil are refused by name. As in containerd and CRI-O, some
//     settings are ignored in this case, because kubelet sends them to every host. These are limits
//     of swap and hugepages, SELinux options, and the default AppArmor profile, on a kernel without
//     the feature.
//   - Invalid input is InvalidArgument and names the field or value. A missing feature of the host
//     is FailedPrecondition. Internal means that the caller has omitted a value.
//   - The caller adds CDI devices. Files of the host describe them, and their edits apply to a
//     complete spec.
//   - HOME is always set, from the user that [users.Resolve] found, so that libcontainer never
//     parses the container's /etc/passwd.
//   - A VOLUME of an image is a separate directory for each container, as in containerd.
//     [PlaceVolumes] decides where. It is writable even if the root is read-only.
//
// # Errors that kubelet interprets
//
// The text of an error begins with RROUnsupported if the kernel cannot make a recursive read-only
// mount (k8s.io/cri-api/pkg/errors, KEP-3857). It begins with ImageVolumeMountFailed if an image
// volume cannot be mounted (KEP-4639).
package oci

import (
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"github.com/opencontainers/runtime-spec/specs-go"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/internal/host"
	"berth/internal/userns"
	"berth/oci/confine"
	"berth/oci/users"
)

// Host contains the features of the node. [host.Detect] returns it.
type Host = host.Facts

// Files queries host paths. [host.Files] implements it.
type Files interface {
	confine.Files
	// Resolve follows all symbolic links. errdefs.IsBadPath reports errors that the path causes.
	Resolve(path string) (string, error)
	// Propagation returns the propagation of the mount that contains path, which has no symbolic
	// links.
	Propagation(path string) (host.Propagation, error)
	// Devices returns the device at path, or all devices below a directory. The error is
	// host.ErrNotDevice if path is neither a device nor a directory, and fs.ErrNotExist if it does
	// not exist.
	Devices(path string) ([]host.Device, error)
}

// Pod contains the properties of a pod for the specs of its pause and containers.
type Pod struct {
	ID           string
	Config       *runtimeapi.PodSandboxConfig
	CgroupParent string // see CgroupsPath

	NetNS    string // path of its network namespace; ignored if the pod uses the node's network
	PausePID int    // containers join the other namespaces of this process

	// Mappings are the pod's ID mappings, from UserNamespace. If it is nil, the pod uses the node's
	// user namespace. UserNS is the path of the namespace, required with Mappings.
	Mappings *userns.Mappings
	UserNS   string

	// Host paths of the pod's files, mounted into its containers at /etc/resolv.conf,
	// /etc/hostname, /etc/hosts and /dev/shm. An empty path is not mounted. Shm is required unless
	// the pod uses the node's IPC namespace.
	ResolvConf, Hostname, Hosts, Shm string
	// OwnsFiles means that root of the pod's user namespace owns the first three files. Otherwise
	// the host's root owns the files, and they are mounted with the namespace's ID mappings.
	OwnsFiles bool
}

// ContainerInput is the input of [ContainerSpec].
type ContainerInput struct {
	ID     string
	Pod    Pod
	Config *runtimeapi.ContainerConfig
	// Resources are the limits after an update. If it is nil, the limits in Config count.
	Resources     *runtimeapi.LinuxContainerResources
	Image         *ocispec.ImageConfig // nil: an image without configuration
	User          users.User           // from users.Resolve with users.ContainerRequest
	Labels        confine.Labels       // from confine.NewLabels
	Host          Host
	Files         Files
	SystemdCgroup bool
	// TargetPIDNS is the path of the PID namespace to join if the CRI config has
	// NamespaceMode_TARGET.
	TargetPIDNS string
	// ImageVolumes are the mount points of image volumes (KEP-4639), by their index in
	// Config.Mounts. The launcher mounts them and resolves image_sub_path.
	ImageVolumes map[int]string
	// Volumes are the anonymous volumes, from PlaceVolumes. VolumesDir is the host directory that
	// contains the directories of Volumes. The caller makes them.
	Volumes    []AnonymousVolume
	VolumesDir string
	// DeviceOwnership sets the owner of Config's devices to run_as_user and run_as_group, so that a
	// process without root privileges can use them.
	DeviceOwnership bool

	WithoutHostDevices bool // a privileged container gets no devices of the host
	Defaults           Defaults
}

// Defaults apply to all containers of the node.
type Defaults struct {
	Env     []string // NAME=VALUE; variables of the image and of the CRI config replace them
	Rlimits []specs.POSIXRlimit
	Seccomp confine.SeccompDefaults
}

// SandboxInput is the input of [SandboxSpec].
type SandboxInput struct {
	Pod           Pod
	Image         *ocispec.ImageConfig // of image.pause; nil: the embedded pause, at PausePath of its root
	User          users.User           // from users.Resolve with users.SandboxRequest
	Labels        confine.Labels       // from confine.NewLabels
	Host          Host
	Files         Files
	SystemdCgroup bool
	Seccomp       confine.SeccompDefaults
	CPUs          string // CPUs on which the pause runs; empty: on all
}

// PausePath is the path of the embedded pause in its root filesystem.
const PausePath = "/pause"

func (p Pod) options() *runtimeapi.NamespaceOption {
	return p.Config.GetLinux().GetSecurityContext().GetNamespaceOptions()
}

func (p Pod) hostNetwork() bool { return p.options().GetNetwork() == runtimeapi.NamespaceMode_NODE }

func (p Pod) hostIPC() bool { return p.options().GetIpc() == runtimeapi.NamespaceMode_NODE }

func (p Pod) hostPID() bool { return p.options().GetPid() == runtimeapi.NamespaceMode_NODE }

func (in ContainerInput) security() *runtimeapi.LinuxContainerSecurityContext {
	return in.Config.GetLinux().GetSecurityContext()
}

func (in ContainerInput) resources() *runtimeapi.LinuxContainerResources {
	if in.Resources != nil {
		return in.Resources
	}
	return in.Config.GetLinux().GetResources()
}
