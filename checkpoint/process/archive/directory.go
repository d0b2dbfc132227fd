package archive

import (
	"fmt"
	"io"
	"os"
	"path"

	"golang.org/x/sys/unix"

	"berth/internal/errdefs"
	"berth/internal/safefs"
)

// maxEntries limits the files and directories of a directory that is read.
const maxEntries = maxFiles + 3*maxContainers

// levels is the depth of the files in the archive of a pod: NAME/checkpoint/FILE.
const levels = 3

// entry is a regular file of a directory that is read.
type entry struct {
	path string // relative to the archive
	dir  *safefs.Dir
	name string // in dir
	st   unix.Stat_t
}

// open opens the file and checks that nothing has replaced it.
func (e entry) open() (*os.File, error) {
	file, err := e.dir.OpenRegular(e.name, os.O_RDONLY)
	if err != nil {
		return nil, fmt.Errorf("open %q of a checkpoint: %w", e.path, err)
	}
	return file, nil
}

// eachFile calls do with each regular file below dir. An entry of another type is an error. So is a
// file with several links, because it could be a file from outside.
func eachFile(dir *os.File, do func(entry) error) error {
	top, err := safefs.OpenDir(dir, "")
	if err != nil {
		return fmt.Errorf("open checkpoint: %w", err)
	}
	defer top.Close() // it was only read
	w := &walk{do: do}
	return w.dir(top, "", levels)
}

type walk struct {
	entries int
	do      func(entry) error
}

func (w *walk) dir(dir *safefs.Dir, prefix string, levels int) error {
	return dir.EachName(func(name string) error {
		full := path.Join(prefix, name)
		if w.entries++; w.entries > maxEntries {
			return errdefs.InvalidArgument("checkpoint: more than %d files", maxFiles)
		}
		st, err := dir.Stat(name)
		if err != nil {
			return err
		}
		switch {
		case st.Mode&unix.S_IFMT == unix.S_IFREG && st.Nlink == 1:
			return w.do(entry{path: full, dir: dir, name: name, st: st})
		case st.Mode&unix.S_IFMT == unix.S_IFREG:
			return errdefs.InvalidArgument("checkpoint: file %q has %d links", errdefs.Clip(full), st.Nlink)
		case st.Mode&unix.S_IFMT != unix.S_IFDIR:
			return errdefs.InvalidArgument("checkpoint: %q is neither a regular file nor a directory", errdefs.Clip(full))
		case levels == 1:
			return errdefs.InvalidArgument("checkpoint: unexpected directory %q", errdefs.Clip(full))
		}
		below, err := dir.Open(name)
		if err != nil {
			return err
		}
		defer below.Close() // it was only read
		return w.dir(below, full, levels-1)
	})
}

// directory is an archive in a directory.
type directory struct{ root *os.File }

func (d directory) manifest() ([]byte, error) {
	top, err := safefs.OpenDir(d.root, "")
	if err != nil {
		return nil, err
	}
	defer top.Close() // it was only read
	file, err := top.OpenRegular(ManifestFile, os.O_RDONLY)
	if err != nil {
		return nil, err
	}
	defer file.Close() // it was only read
	return readManifest(file)
}

// readManifest reads the manifest's file.
func readManifest(r io.Reader) ([]byte, error) {
	data, err := io.ReadAll(io.LimitReader(r, maxManifest+1))
	if err != nil {
		return nil, fmt.Errorf("read %s: %w", ManifestFile, err)
	}
	if len(data) > maxManifest {
		return nil, errdefs.InvalidArgument("checkpoint: %s has more than %d bytes", ManifestFile, maxManifest)
	}
	return data, nil
}

func (d directory) each(do func(name string, size int64, content io.Reader) error) error {
	return eachFile(d.root, func(e entry) error {
		if e.path == ManifestFile {
			return nil
		}
		file, err := e.open()
		if err != nil {
			return err
		}
		defer file.Close() // it was only read
		return do(e.path, e.st.Size, file)
	})
}
