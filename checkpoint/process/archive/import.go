package archive

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"

	"golang.org/x/sys/unix"

	"berth/internal/errdefs"
	"berth/internal/failpoint"
	"berth/internal/safefs"
)

// Archive is an archive that was read.
type Archive struct {
	Manifest Manifest
	Signer   Signer
}

// source yields the files of an archive that is read.
type source interface {
	// manifest returns the content of the manifest's file; fs.ErrNotExist if there is none.
	manifest() ([]byte, error)
	// each calls do with all other files in any order. do reads the content.
	each(do func(name string, size int64, content io.Reader) error) error
}

// Import copies the archive from, a directory or a tar, into the empty directory to, and checks it.
// key is the node's key, nil if it has none. After an error the caller empties the directory to
// (Clear).
//
// An archive that is not signed with the key is FailedPrecondition, and nothing is copied. An
// archive without a manifest was made by another program.
func Import(ctx context.Context, from, to *os.File, key *Key) (*Archive, error) {
	s, err := open(from)
	if err != nil {
		return nil, err
	}
	data, err := s.manifest()
	if errors.Is(err, fs.ErrNotExist) {
		return nil, errdefs.FailedPrecondition("checkpoint: it has no %s, so it is not signed with the key of this node", ManifestFile)
	}
	if err != nil {
		return nil, err
	}
	m, signer, err := decodeManifest(data, key)
	if err != nil {
		return nil, err
	}
	if signer != ThisNode {
		return nil, errdefs.FailedPrecondition("checkpoint: it is not signed with the key of this node (signer: %s)", signer)
	}
	im, err := newImporter(ctx, to, m)
	if err != nil {
		return nil, err
	}
	if err := s.each(im.add); err != nil {
		return nil, err
	}
	for _, f := range m.Files {
		if !im.have[f.Path] {
			return nil, errdefs.InvalidArgument("checkpoint: file %q is missing", f.Path)
		}
	}
	return &Archive{Manifest: *m, Signer: signer}, writeFile(to, ManifestFile, data)
}

// maxJSON limits the JSON files of a container, in bytes. Arguments and environment of a process
// have at most 2 MiB (execve(2)), and one deleted file has a path.
var maxJSON = map[string]int64{
	SpecFile:                              16 << 20,
	DeletedFilesFile:                      16 << 20,
	path.Join(ImagesDir, DescriptorsFile): 4 << 10,
}

// ReadJSON decodes a JSON file of a container from its directory in an imported archive. name is
// the file's name. The caller passes a struct with the fields that it needs, and other fields are
// skipped. The error is fs.ErrNotExist for a missing file, and InvalidArgument for a file that
// cannot be decoded or exceeds the limits.
func ReadJSON(dir *os.File, name string, into any) error {
	data, err := safefs.ReadFile(dir, name, maxJSON[name])
	if errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("read %s of a checkpoint: %w", name, err)
	}
	if err == nil {
		err = checkShape(data)
	}
	if err == nil {
		err = json.Unmarshal(data, into)
	}
	if err != nil {
		return errdefs.InvalidArgument("%s of the checkpoint: %w", name, err)
	}
	return nil
}

// importer copies files and checks them.
type importer struct {
	ctx      context.Context
	to       *os.File
	expected *Manifest
	room     int64 // bytes that may still be written
	have     map[string]bool
}

func newImporter(ctx context.Context, to *os.File, expected *Manifest) (*importer, error) {
	var st unix.Statfs_t
	if err := unix.Fstatfs(int(to.Fd()), &st); err != nil {
		return nil, &fs.PathError{Op: "statfs", Path: to.Name(), Err: err}
	}
	return &importer{ctx: ctx, to: to, expected: expected, room: int64(st.Bavail) * st.Bsize, have: map[string]bool{}}, nil
}

// add copies one file. size is what its directory or header says, so add checks it before it reads.
func (im *importer) add(name string, size int64, content io.Reader) error {
	if k, _ := classify(name, im.expected.Pod != nil); k == unknown {
		return errdefs.InvalidArgument("checkpoint: unexpected file %q", errdefs.Clip(name))
	}
	if im.have[name] {
		return errdefs.InvalidArgument("checkpoint: file %q twice", name)
	}
	want, ok := im.expected.file(name)
	if !ok {
		return errdefs.InvalidArgument("checkpoint: file %q is not in the manifest", name)
	}
	if want.Size != size {
		return errdefs.InvalidArgument("checkpoint: file %q has %d bytes instead of %d", name, size, want.Size)
	}
	if size > im.room {
		return errdefs.FailedPrecondition("checkpoint: no space for file %q of %d bytes", name, size)
	}
	im.room -= size
	got, err := im.copy(name, size, content)
	if err != nil {
		return fmt.Errorf("copy %q of a checkpoint: %w", name, err)
	}
	if got != want {
		return errdefs.InvalidArgument("checkpoint: file %q was changed: its SHA-256 is not that of the manifest", name)
	}
	im.have[name] = true
	return nil
}

// copy writes a file and hashes it. It reads at most one byte more than size.
func (im *importer) copy(name string, size int64, content io.Reader) (File, error) {
	if err := im.makeDirs(path.Dir(name)); err != nil {
		return File{}, err
	}
	failpoint.Reach("checkpoint.import-file")
	file, err := safefs.Open(im.to, name, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	failpoint.Reach("checkpoint.imported-file")
	if err != nil {
		return File{}, err
	}
	hash := sha256.New()
	n, err := im.fill(file, size, content, hash)
	if err := errors.Join(err, file.Close()); err != nil {
		return File{}, err
	}
	if n != size {
		return File{}, errdefs.InvalidArgument("its size is not %d bytes", size)
	}
	return File{Path: name, Size: n, SHA256: hex.EncodeToString(hash.Sum(nil))}, nil
}

// fill copies the content by a reflink, if the filesystem can, else byte by byte. The hash is
// computed from the copy.
func (im *importer) fill(file *os.File, size int64, content io.Reader, hash io.Writer) (int64, error) {
	if from, ok := content.(*os.File); ok && unix.IoctlFileClone(int(file.Fd()), int(from.Fd())) == nil {
		return CopyContext(im.ctx, hash, io.LimitReader(file, size+1))
	}
	return CopyContext(im.ctx, io.MultiWriter(file, hash), io.LimitReader(content, size+1))
}

// makeDirs makes a directory of the copy.
func (im *importer) makeDirs(dir string) error {
	if dir == "." {
		return nil
	}
	failpoint.Reach("checkpoint.import-directory")
	made, err := (safefs.Maker{Perm: 0o700}).MkdirAll(im.to, dir)
	failpoint.Reach("checkpoint.imported-directory")
	if err != nil {
		return err
	}
	return made.Close()
}
