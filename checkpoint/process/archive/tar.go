package archive

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"strings"

	"golang.org/x/sys/unix"

	"berth/internal/errdefs"
)

// Pack writes the archive in dir to a new file as a tar. The manifest comes first. Each directory
// has an entry before its files, because checkpointctl looks for the entry of the directory with
// CRIU's images.
func Pack(ctx context.Context, dir, to *os.File) error {
	p := newPacker(ctx, to)
	p.file = to
	manifest := func(e entry) bool { return e.path == ManifestFile }
	for _, first := range []bool{true, false} {
		err := eachFile(dir, func(e entry) error {
			if manifest(e) != first {
				return nil
			}
			return p.add(e)
		})
		if err != nil {
			return fmt.Errorf("write checkpoint: %w", err)
		}
	}
	return p.w.Close()
}

// packer writes a tar.
type packer struct {
	ctx    context.Context
	w      *tar.Writer
	packed map[string]bool // directories that have an entry
	file   *os.File        // the file that w writes to; nil: not a file, or no large files are added
}

func newPacker(ctx context.Context, to io.Writer) *packer {
	return &packer{ctx: ctx, w: tar.NewWriter(to), packed: map[string]bool{".": true}}
}

// add writes a file, after the entries of its directories.
func (p *packer) add(e entry) error {
	if err := p.addDirectory(path.Dir(e.path)); err != nil {
		return err
	}
	file, err := e.open()
	if err != nil {
		return err
	}
	defer file.Close() // it was only read
	if p.file != nil && e.st.Size >= largeFile {
		return p.addLarge(file, File{Path: e.path, Size: e.st.Size})
	}
	const format = tar.FormatPAX
	header := &tar.Header{Typeflag: tar.TypeReg, Name: e.path, Size: e.st.Size, Mode: 0o600, Format: format}
	if err := p.w.WriteHeader(header); err != nil {
		return err
	}
	return copySize(p.ctx, p.w, file, e.st.Size)
}

// addDirectory writes the missing entries of a directory and its parents, parents first.
func (p *packer) addDirectory(dir string) error {
	if p.packed[dir] {
		return nil
	}
	if err := p.addDirectory(path.Dir(dir)); err != nil {
		return err
	}
	p.packed[dir] = true
	return p.w.WriteHeader(&tar.Header{Typeflag: tar.TypeDir, Name: dir + "/", Mode: 0o700, Format: tar.FormatPAX})
}

// largeFile is the size in bytes from which a file gets the treatment of addLarge.
const largeFile = 1 << 20

// addLarge writes a file whose content begins at a block of the filesystem, and lets the kernel
// copy it. Filesystems with reflinks (XFS, btrfs) then share the content.
func (p *packer) addLarge(file *os.File, f File) error {
	if err := p.w.Flush(); err != nil {
		return err
	}
	at, err := p.file.Seek(0, io.SeekCurrent)
	if err != nil {
		return err
	}
	block, err := blockSize(p.file)
	if err != nil {
		return err
	}
	header, err := padHeader(at, f, block)
	if err != nil {
		return err
	}
	if _, err := p.file.Write(header); err != nil {
		return err
	}
	if err := copySize(p.ctx, p.file, file, f.Size); err != nil {
		return err
	}
	return p.resume(f.Size)
}

// resume fills the last block of a file's content and continues the tar after it.
func (p *packer) resume(size int64) error {
	_, err := p.file.Write(make([]byte, -size&(tarBlock-1)))
	p.w = tar.NewWriter(p.file)
	return err
}

// tarBlock is the size of a tar's blocks.
const tarBlock = 512

// padHeader returns the header of a file that begins at the offset at of a tar. A comment in it has
// the length that makes the content begin at a multiple of block.
func padHeader(at int64, f File, block int64) ([]byte, error) {
	for n := int64(0); n <= block+2*tarBlock; n += tarBlock / 2 {
		var header bytes.Buffer
		err := tar.NewWriter(&header).WriteHeader(&tar.Header{
			Typeflag: tar.TypeReg, Name: f.Path, Size: f.Size, Mode: 0o600, Format: tar.FormatPAX,
			PAXRecords: map[string]string{"comment": strings.Repeat(" ", int(n)+1)},
		})
		if err != nil {
			return nil, err
		}
		if (at+int64(header.Len()))%block == 0 {
			return header.Bytes(), nil
		}
	}
	return nil, fmt.Errorf("no header ends at a multiple of %d", block)
}

// maxBlock is the largest block size that is used. NFS reports the size of its requests as block
// size, which is larger.
const maxBlock = 64 << 10

// blockSize returns the block size of a file's filesystem.
func blockSize(file *os.File) (int64, error) {
	var st unix.Statfs_t
	if err := unix.Fstatfs(int(file.Fd()), &st); err != nil {
		return 0, &fs.PathError{Op: "statfs", Path: file.Name(), Err: err}
	}
	if st.Bsize < tarBlock || st.Bsize > maxBlock || st.Bsize%tarBlock != 0 {
		return tarBlock, nil
	}
	return st.Bsize, nil
}

// copySize copies a file of a known size, or until ctx ends. The kernel copies from file to file,
// so the arguments are plain files.
func copySize(ctx context.Context, to io.Writer, file *os.File, size int64) error {
	for size > 0 {
		if err := context.Cause(ctx); err != nil {
			return err
		}
		n, err := io.CopyN(to, file, min(size, copyChunk))
		size -= n
		if errors.Is(err, io.EOF) {
			return io.ErrUnexpectedEOF
		}
		if err != nil {
			return err
		}
	}
	return nil
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

// entryName returns the path of an entry in the archive. Some programs write "./" before the path.
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
