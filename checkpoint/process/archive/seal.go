package archive

import (
	"context"
	"encoding/hex"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"berth/internal/errdefs"
	"berth/internal/failpoint"
	"berth/internal/safefs"
)

// Seal completes the archive in dir, which has the files of the containers. It writes pod.options
// and pod.dump, hashes all files, and writes the signed manifest. It sets m.Version and m.Files.
// The manifest gets its name when everything else is complete. If synced is set, everything else is
// on the disk before, and the name is on the disk when Seal returns.
//
// A file that does not belong into an archive is an error. The caller removes the files after an
// error (Clear). early has the hashes that exist already, or is nil.
func Seal(ctx context.Context, dir *os.File, m *Manifest, key *Key, early *Early, synced bool) error {
	slices.SortFunc(m.Containers, func(a, b Container) int { return strings.Compare(a.Name, b.Name) })
	if m.Pod != nil {
		if err := writePodFiles(dir, m); err != nil {
			return err
		}
	}
	files, err := list(dir, m.Pod != nil)
	if err != nil {
		return err
	}
	m.Version, m.Files = Version, make([]File, len(files))
	group, hashing := errgroup.WithContext(ctx)
	group.SetLimit(hashers)
	for i, f := range files {
		group.Go(func() (err error) {
			m.Files[i], err = hashFile(hashing, dir, f, early)
			return err
		})
	}
	if err := group.Wait(); err != nil {
		return fmt.Errorf("hash checkpoint: %w", err)
	}
	if err := m.check(); err != nil {
		return errdefs.Internal("checkpoint: %w", err)
	}
	data, err := m.encode(key)
	if err != nil {
		return err
	}
	if err := writeFile(dir, newManifest, data); err != nil {
		return err
	}
	if synced {
		if err := syncAll(ctx, dir, m); err != nil {
			return err
		}
	}
	return publish(dir, synced)
}

// newManifest is the manifest's name while the archive is not complete.
const newManifest = ".manifest.json.new"

// publish gives the manifest its name.
func publish(dir *os.File, synced bool) error {
	at := int(dir.Fd())
	failpoint.Reach("checkpoint.rename-manifest")
	err := unix.Renameat(at, newManifest, at, ManifestFile)
	failpoint.Reach("checkpoint.manifest-renamed")
	if err != nil {
		return os.NewSyscallError("renameat", err)
	}
	if !synced {
		return nil
	}
	return syncFile(dir, ".")
}

// hashers is the number of files that are hashed at the same time.
const hashers = 4

// writeFile creates a file in dir, which must not have it, with mode 0600.
func writeFile(dir *os.File, name string, data []byte) error {
	failpoint.Reach("checkpoint.write-file")
	file, err := safefs.Open(dir, name, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	failpoint.Reach("checkpoint.wrote-file")
	if err != nil {
		return err
	}
	_, err = file.Write(data)
	if closed := file.Close(); err == nil {
		err = closed
	}
	return err
}

// list returns the files of an archive that should be in its manifest, sorted, without their
// hashes.
func list(dir *os.File, pod bool) ([]File, error) {
	var files []File
	err := eachFile(dir, func(f entry) error {
		if f.path == ManifestFile {
			return errdefs.Internal("checkpoint: the archive has a manifest already")
		}
		if k, _ := classify(f.path, pod); k == unknown {
			return errdefs.Internal("checkpoint: unexpected file %q", errdefs.Clip(f.path))
		}
		files = append(files, File{Path: f.path, Size: f.st.Size})
		return nil
	})
	sortFiles(files)
	return files, err
}

func sortFiles(files []File) {
	slices.SortFunc(files, func(a, b File) int { return strings.Compare(a.Path, b.Path) })
}

// hashFile returns the file with its hash and the size that was hashed.
func hashFile(ctx context.Context, dir *os.File, f File, early *Early) (File, error) {
	file, err := safefs.OpenRegular(dir, f.Path)
	if err != nil {
		return File{}, err
	}
	defer file.Close() // it was only read
	sum, done := early.begin(f.Path)
	if _, err := file.Seek(done, io.SeekStart); err != nil {
		return File{}, err
	}
	rest, err := CopyContext(ctx, sum, file)
	f.Size = done + rest
	f.SHA256 = hex.EncodeToString(sum.Sum(nil))
	return f, err
}

// copyChunk is how many bytes are copied between two checks of the context.
const copyChunk = 8 << 20

// CopyContext copies until the end of from, or until ctx ends. It returns the number of bytes.
func CopyContext(ctx context.Context, to io.Writer, from io.Reader) (int64, error) {
	for total := int64(0); ; {
		if err := context.Cause(ctx); err != nil {
			return total, err
		}
		n, err := io.CopyN(to, from, copyChunk)
		total += n
		if err == io.EOF { //nolint:errorlint // CopyN returns io.EOF itself
			return total, nil
		}
		if err != nil {
			return total, err
		}
	}
}

// Clear removes everything below dir, but not dir.
func Clear(dir *os.File) error {
	top, err := safefs.OpenDir(dir, "")
	if err != nil {
		return err
	}
	defer top.Close() // Close of a directory loses no changes
	names, err := top.Names()
	if err != nil {
		return err
	}
	for _, name := range names {
		failpoint.Reach("checkpoint.clear")
		err := top.RemoveAll(name)
		failpoint.Reach("checkpoint.cleared")
		if err != nil {
			return fmt.Errorf("remove %s of a checkpoint: %w", name, err)
		}
	}
	return nil
}
