package archive

import (
	"archive/tar"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"path"
	"strings"

	"berth/internal/errdefs"
)

// tarFiles are the regular files and symlinks of a tar, by their clean names.
type tarFiles map[string]tarEntry

// tarEntry is the place of a file in a tar.
type tarEntry struct {
	offset, size int64
	link         string // target of a symlink or hard link, relative to the archive's root
}

// list reads the headers of a tar. If entries have the same name, the last one counts, as when a
// program unpacks the tar.
func list(f io.ReaderAt, size int64) (tarFiles, error) {
	from := io.NewSectionReader(f, 0, size)
	in, files := tar.NewReader(from), tarFiles{}
	for entries := 1; ; entries++ {
		hdr, err := in.Next()
		if err == io.EOF { //nolint:errorlint // a wrapped EOF is a truncated tar
			return files, nil
		}
		if err != nil && !errors.Is(err, tar.ErrInsecurePath) { // names are keys of a map and never paths
			return nil, errdefs.InvalidArgument("read tar after %d entries: %w", entries-1, err)
		}
		if entries > MaxFiles {
			return nil, errdefs.FailedPrecondition("more than %d entries", MaxFiles)
		}
		offset, err := from.Seek(0, io.SeekCurrent)
		if err != nil {
			return nil, err
		}
		if entry, ok := entryOf(hdr, offset, size); ok {
			files[strings.Clone(path.Clean(hdr.Name))] = entry
		}
	}
}

// entryOf returns the place of an entry's content, or false for an entry that cannot belong to an
// image. Such entries are directories, devices, sparse files and files that extend past the end.
func entryOf(hdr *tar.Header, offset, size int64) (tarEntry, bool) {
	if len(hdr.Name) > MaxName || len(hdr.Linkname) > MaxName {
		return tarEntry{}, false
	}
	for key := range hdr.PAXRecords {
		if strings.HasPrefix(key, "GNU.sparse.") {
			return tarEntry{}, false
		}
	}
	switch hdr.Typeflag {
	case tar.TypeReg:
		return tarEntry{offset: offset, size: hdr.Size}, hdr.Size >= 0 && hdr.Size <= size-offset
	case tar.TypeSymlink: // docker save up to 24 links equal layers
		return tarEntry{link: path.Join(path.Dir(path.Clean(hdr.Name)), hdr.Linkname)}, true
	case tar.TypeLink:
		return tarEntry{link: path.Clean(hdr.Linkname)}, true
	}
	return tarEntry{}, false
}

// maxLinks limits the links that lead to one file.
const maxLinks = 8

func (t tarFiles) open(f io.ReaderAt, name string) (File, error) {
	for range maxLinks {
		entry, ok := t[name]
		if !ok {
			return nil, fmt.Errorf("open %q: %w", errdefs.Clip(name), fs.ErrNotExist)
		}
		if entry.link == "" {
			return tarFile{io.NewSectionReader(f, entry.offset, entry.size)}, nil
		}
		name = entry.link
	}
	return nil, errdefs.InvalidArgument("more than %d links lead to %q", maxLinks, errdefs.Clip(name))
}

// tarFile is a file in a tar.
type tarFile struct{ *io.SectionReader }

func (tarFile) Close() error { return nil }
