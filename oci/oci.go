// Package oci turns what Kubernetes asks for into what libcontainer runs: from a
// CRI config, an image's config and the facts of the host it builds a runtime-spec
// (github.com/opencontainers/runtime-spec).
//
// The functions keep no state and write nothing. What they must know about host
// paths (does a mount source exist, which device is /dev/fuse) they ask through
// the Files interface. Specs come out complete but for Root.Path, which the
// launcher sets.
//
// # Rules
//
//   - Annotations and image labels never reach a spec: libcontainer and systemd
//     read some of them as commands (CVE-2024-3154, CVE-2026-53488). So the annotations
//     for block I/O and RDT classes, which containerd reads, do nothing.
//   - What berth cannot honour it refuses by name. Passed over, as containerd and CRI-O do,
//     because kubelet sends them to every host: limits of swap and hugepages, SELinux
//     options and the default AppArmor profile where the kernel has no such thing.
//   - Bad input is InvalidArgument and names the field or value. What the host lacks is
//     FailedPrecondition. Internal means that the caller left out something.
//   - CDI devices are left to the caller: what they are stands in files of the host, and
//     they are put into a spec that is complete (internal/cdi).
//   - HOME is always set here, from the user that users.Resolve found, so that libcontainer
//     never parses the container's own /etc/passwd.
//   - A VOLUME of an image is a plain directory of the container's writable layer, with
//     the content the image has there, and goes away with the container. With a read-only
//     root it is read-only, as it is with CRI-O.
//
// # Errors of kubelet's interest
//
// A recursive read-only mount that the kernel can't make is an error whose text
// begins with RROUnsupported (k8s.io/cri-api/pkg/errors, KEP-3857), an image volume that
// can't be had one that begins with ImageVolumeMountFailed (KEP-4639).
package oci

import (
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/internal/host"
	"berth/oci/confine"
	"berth/oci/users"
)

// Host is what the machine offers; host.Detect finds it out.
type Host = host.Facts

// Files answers questions about host paths; host.Files is the real one.
type Files interface {
	confine.Files
	// Resolve follows all symbolic links. Errors that are the path's fault are known to errdefs.IsBadPath.
	Resolve(path string) (string, error)
	// Propagation looks up the mount that holds a path free of symbolic links.
	Propagation(path string) (host.Propagation, error)
	// Devices returns the device at path, or all devices below a directory.
	// host.ErrNotDevice if path is neither, fs.ErrNotExist if it does not exist.
	Devices(path string) ([]host.Device, error)
}

// Pod is what a container's spec takes from its pod, and pause's from its own.
type Pod struct {
	ID           string
	Config       *runtimeapi.PodSandboxConfig
	CgroupParent string // see CgroupsPath

	// Paths of the pod's namespaces. Where the pod is on the node's namespace they
	// are ignored. Else an empty one means, for a container, the namespace of
	// PausePID (not for NetNS, which is required), and for pause a new namespace.
	NetNS, IPCNS, UTSNS, PIDNS string
	PausePID                   int

	// UserNS is the path of the pod's user namespace, required if UserNamespace returns mappings.
	UserNS string

	// Host paths of the pod's files, mounted into its containers at /etc/resolv.conf,
	// /etc/hostname, /etc/hosts, /dev/shm. Empty: not mounted; Shm is required unless
	// the pod is on the node's IPC namespace.
	ResolvConf, Hostname, Hosts, Shm string
	// OwnsFiles tells that the first three belong to the pod's root on the host, which is another
	// user there if the pod has a user namespace. Else they are the host's root's, and mounted with
	// the namespace's mappings.
	OwnsFiles bool
}

// ContainerInput is what ContainerSpec builds a spec from.
type ContainerInput struct {
	ID     string
	Pod    Pod
	Config *runtimeapi.ContainerConfig
	// Resources are the current ones if an update has changed them since Config; nil: Config's.
	Resources     *runtimeapi.LinuxContainerResources
	Image         *ocispec.ImageConfig // nil: an image that configures nothing
	User          users.User           // from users.Resolve with users.ContainerRequest
	Labels        confine.Labels       // from confine.NewLabels
	Host          Host
	Files         Files
	SystemdCgroup bool
	// TargetPIDNS is the path of the PID namespace to join if the CRI config asks for
	// one by NamespaceMode_TARGET.
	TargetPIDNS string
	// ImageVolumes are the places where the launcher mounts the images that the config's mounts
	// name (KEP-4639), by their index in Config.Mounts. A file or directory of the image
	// (image_sub_path) the launcher puts in.
	ImageVolumes map[int]string
	// DeviceOwnership gives the devices of Config to run_as_user and run_as_group, where these
	// are set, so that a process that is not root can use them.
	DeviceOwnership bool
}

// SandboxInput is what SandboxSpec builds the spec of a pod's pause from.
type SandboxInput struct {
	Pod           Pod
	Image         *ocispec.ImageConfig // of pause_image; nil: the embedded pause, at PausePath of its root
	User          users.User           // from users.Resolve with users.SandboxRequest
	Labels        confine.Labels       // from confine.NewLabels
	Host          Host
	Files         Files
	SystemdCgroup bool
}

// PausePath is where the embedded pause lies in its own root filesystem.
const PausePath = "/pause"

func (p Pod) options() *runtimeapi.NamespaceOption {
	return p.Config.GetLinux().GetSecurityContext().GetNamespaceOptions()
}

func (p Pod) privileged() bool { return p.Config.GetLinux().GetSecurityContext().GetPrivileged() }

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
