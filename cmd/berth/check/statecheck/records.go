package statecheck

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"berth/cmd/node"
	"berth/image"
	"berth/sandbox/state"
)

// Records: each is valid (checksum, kind, version, content), and none is quarantined. Each file and
// directory below root and state is used by the daemon itself, or belongs to a recorded object.
// Recorded objects have their files.

// These are the entries of root, state and the image directory, besides files that users of a
// socket create.
var (
	inRoot = []string{
		"pods",
		"containers",
		"runtime",
		"images",
		"sandboxes",
		"rootfs",
		"empty",
		"bin",
		"cni",
		"lock",
		"identity",
		"starts",         // of builds before 0.3.0; nothing reads them
		"run",            // files of berth run
		"checkpoints",    // checkpoints in progress
		"checkpoint.key", // signs checkpoints
	}
	inState = []string{"c", "cni", "libcontainer", "nri", "oci", "pods", "lock", "identity", "run-id", "debug.sock",
		"sessions",
		"s",      // sockets of shims: taskapi has one place for them
		"events"} // the daemon drops damaged ones
	inImages = []string{"records", "signatures", "layers", "joins", "tmp", "trash", "empty-directory", "erofs", "profiles",
		"partial", // of failed pulls: see comparePartial
		"bans",    // of builds before 0.3.0; nothing reads them
		"indexes"} // of blobs, see compareIndexes
	inErofs = []string{"layers", "joins", "lazy", "tmp", "trash", "empty-erofs"}
)

func compareRecords(f *facts, d *finder) {
	for _, s := range f.surveys {
		for _, bad := range s.Damaged {
			d.differ(bad.Path, "a valid record", "%v", bad.Err)
		}
		for _, path := range s.Newer {
			d.differ(path, "a record of this version of berth, or an older one", "a newer one")
		}
		for _, path := range s.SetAside {
			d.differ(path, "no quarantined record; inspect and delete it", "one")
		}
		for _, path := range s.Other {
			if f.daemon != 0 || !strings.HasSuffix(path, ".tmp") { // the next daemon deletes the remains of a crash
				d.differ(path, "a record", "another file")
			}
		}
	}
	f.compareFolder(d, f.node.Root, inRoot)
	f.compareFolder(d, f.node.State, inState)
	roots := image.LayerRoots(f.imageRoot())
	f.compareFolder(d, roots[0], inImages)
	for _, root := range roots[1:] {
		if _, err := os.Lstat(root); !errors.Is(err, fs.ErrNotExist) {
			f.compareFolder(d, root, inErofs)
		}
	}
	f.compareObjects(d, f.dirs.PodFiles(""), func(id string) bool { return f.pods[id] != nil })
	f.compareObjects(d, f.dirs.Writable(""), f.known)
	f.compareObjects(d, f.dirs.SharedMounts(),
		func(id string) bool { return f.pods[id] != nil && !f.podIsOver(f.pods[id]) })
	f.compareFiles(d)
}

// compareFolder compares the other entries of one of the daemon's directories.
func (f *facts) compareFolder(d *finder, dir string, own []string) {
	names, err := namesIn(dir)
	if err != nil {
		d.differ(dir, "a directory of the daemon", "%v", err)
	}
	for _, name := range names {
		path := filepath.Join(dir, name)
		if slices.Contains(own, name) || f.holdsOurs(path) {
			continue
		}
		d.differ(path, "", "not a berth file")
	}
}

// holdsOurs reports whether a configured path is at or below path.
func (f *facts) holdsOurs(path string) bool {
	socket := strings.TrimPrefix(f.node.Socket, "unix://")
	return slices.ContainsFunc(
		[]string{
			f.node.Root,
			f.node.State,
			socket,
			strings.TrimPrefix(f.node.Metrics, "unix://"),
			f.node.NetNSDir,
			f.node.CNICacheDir,
			f.node.CNIConfDir,
			f.dirs.RootPlace(),
			filepath.Join(f.node.Root, node.AddressDir),
		},
		func(place string) bool {
			return place == path || strings.HasPrefix(place, path+"/")
		},
	)
}

// compareObjects compares a directory with one entry for each object.
func (f *facts) compareObjects(d *finder, dir string, belongs func(id string) bool) {
	names, err := namesIn(dir)
	if err != nil {
		d.differ(dir, "a directory of the daemon", "%v", err)
	}
	for _, name := range names {
		path := filepath.Join(dir, name)
		if path != f.dirs.Trash() && !belongs(name) {
			d.differ(path, "a recorded pod or container that has it", "none")
		}
	}
}

// compareFiles checks the files of objects that are neither being created nor removed.
func (f *facts) compareFiles(d *finder) {
	for id, p := range f.pods {
		if p.Stage != state.Running && p.Stage != state.Ended {
			continue
		}
		f.compareExists(d, podName(id), f.dirs.PodFiles(id))
		if !f.podRuns(p) { // its tmpfs is unmounted when the pod is stopped
			continue
		}
		for _, name := range []string{"resolv.conf", "hostname", "hosts"} {
			f.compareExists(d, podName(id), filepath.Join(p.Etc, name))
		}
	}
	for id, c := range f.containers {
		if c.Stage != state.BeingMade && c.Stage != state.BeingRemoved {
			f.compareExists(d, containerName(id), filepath.Join(f.dirs.Writable(""), id, "upper"))
			for _, v := range c.Anonymous {
				f.compareExists(d, containerName(id), filepath.Join(f.dirs.Volumes(id), v.Name))
			}
		}
	}
}

func (f *facts) compareExists(d *finder, object, path string) {
	if _, err := os.Lstat(path); errors.Is(err, fs.ErrNotExist) {
		d.differ(object, path, "no such file")
	}
}
