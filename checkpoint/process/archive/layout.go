package archive

import (
	"path"
	"strings"

	"berth/internal/errdefs"
)

// Files of an archive.
const (
	ManifestFile   = "manifest.json"
	PodOptionsFile = "pod.options"
	PodDumpFile    = "pod.dump"
)

// Files of a container.
const (
	ConfigFile       = "config.dump"           // ContainerConfig of checkpointctl
	SpecFile         = "spec.dump"             // the runtime-spec, with annotations for checkpointctl and CRI-O
	BindMountsFile   = "bind.mounts"           // CRI-O: paths that must exist for bind mounts
	StatusFile       = "status.dump"           // the container's CRI status
	RootfsDiffFile   = "rootfs-diff.tar"       // changed files of the writable layer
	DeletedFilesFile = "deleted.files"         // JSON list of deleted paths
	ShmFile          = "devshm-checkpoint.tar" // content of /dev/shm; a pod's file is beside the containers' directories
	VolumesFile      = "volumes.tar"           // content of the image's volumes, in numbered directories
	StatsFile        = "stats-dump"            // CRIU's statistics
	LogFile          = "dump.log"              // CRIU's log
	ImagesDir        = "checkpoint"            // images of CRIU, or of gVisor's sandbox
	SandboxFile      = "checkpoint.img"        // in ImagesDir: the state of gVisor's sandbox
	DescriptorsFile  = "descriptors.json"      // in ImagesDir: libcontainer's list of standard streams
)

// containerFiles are the files of a container that Import accepts.
var containerFiles = map[string]bool{
	ConfigFile: true, SpecFile: true, BindMountsFile: true, StatusFile: true, RootfsDiffFile: true,
	DeletedFilesFile: true, VolumesFile: true, ShmFile: true, StatsFile: true, LogFile: true,
}

// podFiles are the files beside the containers' directories that Import accepts.
var podFiles = map[string]bool{PodOptionsFile: true, PodDumpFile: true, ShmFile: true}

// maxName limits the length of a container's name and of a file's name.
const maxName = 128

// CheckName returns FailedPrecondition unless a container's name can be the name of its directory.
func CheckName(name string) error {
	if !plain(name) || name == ManifestFile || podFiles[name] {
		return errdefs.FailedPrecondition("checkpoint: container name %q cannot be the name of a directory", errdefs.Clip(name))
	}
	return nil
}

// plain reports whether name is a plain file name of letters, digits, dots, dashes and underscores.
func plain(name string) bool {
	if name == "" || len(name) > maxName || name[0] == '.' {
		return false
	}
	return strings.IndexFunc(name, func(r rune) bool {
		return (r < 'a' || r > 'z') && (r < 'A' || r > 'Z') && (r < '0' || r > '9') && !strings.ContainsRune("._-", r)
	}) < 0
}

// kind is the role of a path in an archive.
type kind int

const (
	unknown kind = iota
	ofPod        // a file beside the containers' directories
	ofContainer
	ofImages // below ImagesDir
)

// classify returns the kind of a path and the directory of its container. In an archive of one
// container the directory is "".
func classify(name string, pod bool) (kind, string) {
	parts := strings.Split(name, "/")
	for _, part := range parts {
		if !plain(part) {
			return unknown, ""
		}
	}
	container := ""
	if pod {
		if len(parts) == 1 {
			return kindIf(podFiles[name], ofPod), ""
		}
		container, parts = parts[0], parts[1:]
		if CheckName(container) != nil {
			return unknown, ""
		}
	}
	switch {
	case len(parts) == 1 && containerFiles[parts[0]]:
		return ofContainer, container
	case len(parts) == 2 && parts[0] == ImagesDir:
		return kindIf(isImage(parts[1]), ofImages), container
	}
	return unknown, ""
}

func kindIf(ok bool, k kind) kind {
	if ok {
		return k
	}
	return unknown
}

// isImage reports whether name can be a file that CRIU, libcontainer or gVisor writes into
// ImagesDir.
func isImage(name string) bool {
	return path.Ext(name) == ".img" || name == DescriptorsFile || name == LogFile || name == StatsFile
}
