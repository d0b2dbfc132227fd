package archive

import (
	"archive/tar"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"strings"

	"berth/internal/errdefs"
)

// Pack writes the archive in dir to a file as a tar. The manifest comes first. Each directory has an
// entry before its files, because checkpointctl looks for that of CRIU's images.
func Pack(ctx context.Context, dir, to *os.File) error {
	w := tar.NewWriter(to)
	manifest := func(e entry) bool { return e.path == ManifestFile }
	packed := map[string]bool{".": true} // directories
	for _, first := range []bool{true, false} {
		err := eachFile(dir, func(e entry) error {
			if manifest(e) != first {
				return nil
			}
			if err := packDirectory(w, path.Dir(e.path), packed); err != nil {
				return err
			}
			return packFile(ctx, w, to, e)
		})
		if err != nil {
			return fmt.Errorf("write checkpoint: %w", err)
		}
	}
	return w.Close()
}

// packDirectory writes the entry of a directory, after those of its parents, unless packed has it.
func packDirectory(w *tar.Writer, dir string, packed map[string]bool) error {
	if packed[dir] {
		return nil
	}
	if err := packDirectory(w, path.Dir(dir), packed); err != nil {
		return err
	}
	packed[dir] = true
	return w.WriteHeader(&tar.Header{Typeflag: tar.TypeDir, Name: dir + "/", Mode: 0o700, Format: tar.FormatPAX})
}

// packFile writes one file. The tar is written without a buffer, so the kernel can copy the content
// from file to file.
func packFile(ctx context.Context, w *tar.Writer, to *os.File, e entry) error {
	file, err := e.open()
	if err != nil {
		return err
	}
	defer file.Close() // it was only read
	const format = tar.FormatPAX
	header := &tar.Header{Typeflag: tar.TypeReg, Name: e.path, Size: e.st.Size, Mode: 0o600, Format: format}
	if err := w.WriteHeader(header); err != nil {
		return err
	}
	n, err := copyContext(ctx, w, io.LimitReader(file, e.st.Size))
	if err == nil && n != e.st.Size {
		err = io.ErrUnexpectedEOF
	}
	return err
}

// tarFile is an archive in a tar.
type tarFile struct {
	file *os.File
	size int64
}

// entries calls do with each regular file of the tar until do fails.
func (t tarFile) entries(do func(h *tar.Header, content io.Reader) error) error {
	r := tar.NewReader(io.NewSectionReader(t.file, 0, t.size))
	for i := 0; ; i++ {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return errdefs.InvalidArgument("checkpoint: read tar: %w", err)
		}
		if i == maxEntries {
			return errdefs.InvalidArgument("checkpoint: more than %d files", maxFiles)
		}
		if err := checkHeader(h); err != nil {
			return err
		}
		if h.Typeflag == tar.TypeDir {
			continue
		}
		if err := do(h, r); err != nil {
			return err
		}
	}
}

// checkHeader returns an error unless an entry is a directory or a regular file without holes.
func checkHeader(h *tar.Header) error {
	switch h.Typeflag {
	case tar.TypeDir:
	case tar.TypeReg:
		for key := range h.PAXRecords {
			if strings.HasPrefix(key, "GNU.sparse.") {
				return errdefs.InvalidArgument("checkpoint: file %q is sparse", errdefs.Clip(h.Name))
			}
		}
	default:
		return errdefs.InvalidArgument("checkpoint: %q is neither a regular file nor a directory", errdefs.Clip(h.Name))
	}
	return nil
}

// entryName returns the path of an entry in the archive. Some programs write "./" in front.
func entryName(h *tar.Header) string { return strings.TrimPrefix(h.Name, "./") }

func (t tarFile) manifest() (data []byte, err error) {
	err = t.entries(func(h *tar.Header, content io.Reader) error {
		if entryName(h) != ManifestFile {
			return nil
		}
		if data != nil {
			return errdefs.InvalidArgument("checkpoint: file %q twice", ManifestFile)
		}
		data, err = readManifest(content)
		return err
	})
	if err == nil && data == nil {
		err = fs.ErrNotExist
	}
	return data, err
}

func (t tarFile) each(do func(name string, size int64, content io.Reader) error) error {
	return t.entries(func(h *tar.Header, content io.Reader) error {
		if entryName(h) == ManifestFile {
			return nil
		}
		return do(entryName(h), h.Size, content)
	})
}
