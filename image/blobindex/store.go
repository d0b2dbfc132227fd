package blobindex

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/opencontainers/go-digest"

	"berth/internal/cleanup"
	"berth/internal/failpoint"
)

// Files of an index.
const (
	indexFile  = "index"
	treeFile   = "tree"
	recordFile = "tar"
	// registriesFile has a line for each registry. It is not a part of the index. If it is missing,
	// no pull may use the index.
	registriesFile = "registries"
	// profileFile has the spans that processes have waited for, as JSON.
	profileFile = "profile"

	tmpPrefix = "tmp-"
)

// DefaultMaxBytes is the usual limit of all indexes.
const DefaultMaxBytes = 256 << 20

// Store keeps the indexes below one directory. Its methods may be called concurrently.
type Store struct {
	dir string
	max int64 // bytes of all indexes
	log *slog.Logger

	mu sync.Mutex // guards the fields below and those of each entry
	// +checklocks:mu
	entries map[digest.Digest]*entry
	// +checklocks:mu
	bytes int64 // of all entries
}

// entry is an index.
type entry struct {
	size int64 // of its files
	used time.Time
	busy bool // it is being written, read or removed
	// registries have served the blob.
	registries []string
}

// Open opens the store and creates its directory if needed. It removes what a crash has left. If
// all indexes together exceed maxBytes, it removes the least recently used ones. If maxBytes is 0,
// it keeps none.
func Open(dir string, maxBytes int64, log *slog.Logger) (*Store, error) {
	s := &Store{dir: dir, max: maxBytes, log: log, entries: map[digest.Digest]*entry{}}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("open indexes of blobs: %w", err)
	}
	found, err := os.ReadDir(dir)
	if err != nil {
		return nil, fmt.Errorf("open indexes of blobs: %w", err)
	}
	for _, f := range found {
		blob := digest.NewDigestFromEncoded(digest.SHA256, f.Name())
		e, err := stat(filepath.Join(dir, f.Name()))
		if err == nil && blob.Validate() == nil {
			s.entries[blob] = e
			s.bytes += e.size
			continue
		}
		if err := s.delete(f.Name()); err != nil {
			log.Warn("delete the rest of an index; the next start tries again", "error", err)
		}
	}
	s.makeRoom(0)
	return s, nil
}

// stat describes the index in a directory.
func stat(dir string) (*entry, error) {
	e := &entry{}
	for _, name := range []string{indexFile, treeFile, recordFile} {
		info, err := os.Lstat(filepath.Join(dir, name))
		if err != nil {
			return nil, err
		}
		e.size += info.Size()
		if name == indexFile {
			e.used = info.ModTime()
		}
	}
	var err error
	e.registries, err = readRegistries(filepath.Join(dir, registriesFile))
	return e, err
}

// maxRegistries limits the registries of an index.
const maxRegistries = 64

// readRegistries reads a registriesFile. A line without an end was not written whole.
func readRegistries(path string) (registries []string, err error) {
	f, err := os.Open(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	defer f.Close() // read only
	text, err := io.ReadAll(io.LimitReader(f, maxRegistries*256))
	for line := range strings.Lines(string(text)) {
		if name, whole := strings.CutSuffix(line, "\n"); whole {
			registries = append(registries, name)
		}
	}
	return registries, err
}

// Served reports whether there is an index of a blob, and a registry has served the blob to this
// node.
func (s *Store) Served(blob digest.Digest, registry string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	e := s.entries[blob]
	return e != nil && slices.Contains(e.registries, registry)
}

// NoteServed records that a registry has served a blob. It does nothing if there is no index of the
// blob, or if that is in use.
func (s *Store) NoteServed(blob digest.Digest, registry string) error {
	if s.Served(blob, registry) || !s.begin(blob, false) {
		return nil
	}
	s.mu.Lock()
	e := s.entries[blob]
	full := len(e.registries) >= maxRegistries
	s.mu.Unlock()
	var err error
	if !full {
		err = addRegistry(filepath.Join(s.dir, blob.Encoded()), registry)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	e.busy = false
	if err != nil {
		return fmt.Errorf("index of %s: note registry: %w", blob, err)
	}
	if !full {
		e.registries = append(e.registries, registry)
	}
	return nil
}

// addRegistry adds a line to the registriesFile in a directory.
func addRegistry(dir, registry string) error {
	failpoint.Reach("blobindex.note-registry")
	f, err := os.OpenFile(filepath.Join(dir, registriesFile), os.O_WRONLY|os.O_APPEND|os.O_CREATE, 0o600)
	if err != nil {
		return err
	}
	_, err = f.WriteString(registry + "\n")
	failpoint.Reach("blobindex.registry-noted")
	return errors.Join(err, f.Close())
}

// Enabled reports whether the store keeps indexes.
func (s *Store) Enabled() bool { return s.max > 0 }

// Has reports whether there is an index of a blob.
func (s *Store) Has(blob digest.Digest) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.entries[blob] != nil
}

// Usage returns the number of indexes and the bytes of their files, including linked files.
func (s *Store) Usage() (indexes int, bytes int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.entries), s.bytes
}

// NewFile creates a file without a name for what a pull notes. It is on the store's filesystem.
func (s *Store) NewFile() (*os.File, error) {
	failpoint.Reach("blobindex.make-file")
	f, err := os.CreateTemp(s.dir, tmpPrefix)
	if err != nil {
		return nil, err
	}
	failpoint.Reach("blobindex.file-made")
	err = os.Remove(f.Name())
	failpoint.Reach("blobindex.file-unnamed")
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}

var errTooLarge = errors.New("it exceeds the limit of all indexes")

// Add writes an index. tree and record are the paths of the layer's files. If there is an index of
// the blob, Add does nothing. An index that is larger than all may be is an error.
func (s *Store) Add(x *Index, tree, record string) (err error) {
	if !s.begin(x.Blob, true) {
		return nil
	}
	size := int64(0)
	defer func() { s.end(x.Blob, size) }()
	encoded, err := x.Encode()
	if err != nil {
		return fmt.Errorf("index of %s: %w", x.Blob, err)
	}
	sum := int64(len(encoded))
	for _, path := range []string{tree, record} {
		info, err := os.Lstat(path)
		if err != nil {
			return fmt.Errorf("index of %s: %w", x.Blob, err)
		}
		sum += info.Size()
	}
	if !s.makeRoom(sum) {
		return fmt.Errorf("index of %s with %d bytes: %w", x.Blob, sum, errTooLarge)
	}
	if err := s.write(x.Blob, encoded, tree, record); err != nil {
		return fmt.Errorf("index of %s: %w", x.Blob, err)
	}
	size = sum
	return nil
}

// write makes the directory of an index.
func (s *Store) write(blob digest.Digest, encoded []byte, tree, record string) (err error) {
	failpoint.Reach("blobindex.make")
	tmp, err := os.MkdirTemp(s.dir, tmpPrefix)
	if err != nil {
		return err
	}
	failpoint.Reach("blobindex.made")
	undo := cleanup.New()
	defer undo.Run(&err)
	undo.Add("delete "+tmp, func() error { return s.delete(filepath.Base(tmp)) })
	if err := os.WriteFile(filepath.Join(tmp, indexFile), encoded, 0o600); err != nil {
		return err
	}
	failpoint.Reach("blobindex.written")
	if err := os.Link(tree, filepath.Join(tmp, treeFile)); err != nil {
		return err
	}
	failpoint.Reach("blobindex.tree-linked")
	if err := os.Link(record, filepath.Join(tmp, recordFile)); err != nil {
		return err
	}
	failpoint.Reach("blobindex.record-linked")
	if err := os.Rename(tmp, filepath.Join(s.dir, blob.Encoded())); err != nil {
		return err
	}
	failpoint.Reach("blobindex.shown")
	undo.Release()
	return nil
}

// begin marks an index as busy. It returns false if the index is busy already. It also returns
// false if the index exists but should be new, or should exist but does not.
func (s *Store) begin(blob digest.Digest, isNew bool) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	e := s.entries[blob]
	if isNew && e == nil && s.max > 0 {
		s.entries[blob] = &entry{busy: true}
		return true
	}
	if isNew || e == nil || e.busy {
		return false
	}
	e.busy = true
	return true
}

// end reverts begin. size is the size of the index, 0 if there is none.
func (s *Store) end(blob digest.Digest, size int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	e := s.entries[blob]
	s.bytes += size - e.size
	e.size, e.used, e.busy = size, time.Now(), false
	if size == 0 {
		delete(s.entries, blob)
	}
}

// makeRoom removes the least recently used indexes until another n bytes are within the limit. It
// reports whether that succeeded.
func (s *Store) makeRoom(n int64) bool {
	if n > s.max {
		return false
	}
	for {
		s.mu.Lock()
		full, oldest := s.bytes+n > s.max, s.oldest()
		s.mu.Unlock()
		if !full {
			return true
		}
		if oldest == "" || s.Remove(oldest) != nil {
			return false
		}
	}
}

// oldest returns the blob of the least recently used index that is not busy, or "". The caller
// holds the lock.
//
// +checklocks:s.mu
func (s *Store) oldest() (oldest digest.Digest) {
	for blob, e := range s.entries {
		if !e.busy && (oldest == "" || e.used.Before(s.entries[oldest].used)) {
			oldest = blob
		}
	}
	return oldest
}

// maxProfile limits the spans of a profile.
const maxProfile = 4096

// Profile returns the spans of a blob that processes have waited for, in the order of their first
// accesses. It returns nil if the blob has no index or no profile.
func (s *Store) Profile(blob digest.Digest) (spans []int) {
	f, err := os.Open(filepath.Join(s.dir, blob.Encoded(), profileFile))
	if err != nil {
		return nil
	}
	defer f.Close() // read only
	if json.NewDecoder(io.LimitReader(f, maxProfile*12)).Decode(&spans) != nil {
		return nil // the file is not synced, because a later pull writes it again
	}
	return spans[:min(len(spans), maxProfile)]
}

// AddProfile adds spans to the profile of a blob. It does nothing if the blob has no index, or if
// the index is in use.
func (s *Store) AddProfile(blob digest.Digest, spans []int) error {
	all := s.Profile(blob)
	known := len(all)
	for _, i := range spans {
		if !slices.Contains(all, i) && len(all) < maxProfile {
			all = append(all, i)
		}
	}
	if len(all) == known || !s.begin(blob, false) {
		return nil
	}
	text, err := json.Marshal(all)
	if err == nil {
		failpoint.Reach("blobindex.write-profile")
		err = os.WriteFile(filepath.Join(s.dir, blob.Encoded(), profileFile), text, 0o600)
		failpoint.Reach("blobindex.profile-written")
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.entries[blob].busy = false
	if err != nil {
		return fmt.Errorf("index of %s: write profile: %w", blob, err)
	}
	return nil
}

// Remove removes the index of a blob. It is no error if the index is missing or in use.
func (s *Store) Remove(blob digest.Digest) error {
	if !s.begin(blob, false) {
		return nil
	}
	return s.remove(blob)
}

// remove removes a busy index.
func (s *Store) remove(blob digest.Digest) error {
	err := s.delete(blob.Encoded())
	if err != nil {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.entries[blob].busy = false
		return fmt.Errorf("remove index of %s: %w", blob, err)
	}
	s.end(blob, 0)
	return nil
}

// delete deletes an entry of the directory.
func (s *Store) delete(name string) error {
	failpoint.Reach("blobindex.delete")
	err := os.RemoveAll(filepath.Join(s.dir, name))
	failpoint.Reach("blobindex.deleted")
	return err
}

// Clear removes all indexes that are not in use. It returns how many bytes they had.
func (s *Store) Clear() (freed int64, failed error) {
	s.mu.Lock()
	var blobs []digest.Digest
	for blob := range s.entries {
		blobs = append(blobs, blob)
	}
	before := s.bytes
	s.mu.Unlock()
	for _, blob := range blobs {
		failed = errors.Join(failed, s.Remove(blob))
	}
	_, after := s.Usage()
	return max(before-after, 0), failed
}

// Get returns the index of a blob. The error wraps fs.ErrNotExist if there is none, if it is in
// use, or if it is damaged. Get removes a damaged index.
func (s *Store) Get(blob digest.Digest) (x *Index, err error) {
	if !s.begin(blob, false) {
		return nil, fmt.Errorf("index of %s: %w", blob, fs.ErrNotExist)
	}
	path := filepath.Join(s.dir, blob.Encoded())
	x, err = read(path, blob)
	if errors.Is(err, ErrDamaged) || errors.Is(err, fs.ErrNotExist) {
		s.log.Warn("damaged index of a blob removed", "blob", blob, "error", err)
		return nil, errors.Join(fmt.Errorf("index of %s: %w: %w", blob, fs.ErrNotExist, err), s.remove(blob))
	}
	if err == nil {
		s.touch(filepath.Join(path, indexFile))
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	e := s.entries[blob]
	e.used, e.busy = time.Now(), false
	if err != nil {
		return nil, fmt.Errorf("read index of %s: %w", blob, err)
	}
	return x, nil
}

// touch records on disk that an index is used, for the next Open.
func (s *Store) touch(path string) {
	now := time.Now()
	failpoint.Reach("blobindex.touch")
	err := os.Chtimes(path, now, now)
	failpoint.Reach("blobindex.touched")
	if err != nil {
		s.log.Debug("an index may be removed too soon", "path", path, "error", err)
	}
}

// maxFile limits the files that read takes into memory.
const maxFile = 512 << 20

// read reads an index.
func read(dir string, blob digest.Digest) (*Index, error) {
	var files [3][]byte
	for i, name := range []string{indexFile, treeFile, recordFile} {
		f, err := os.Open(filepath.Join(dir, name))
		if err != nil {
			return nil, err
		}
		files[i], err = io.ReadAll(io.LimitReader(f, maxFile))
		if err := errors.Join(err, f.Close()); err != nil {
			return nil, err
		}
	}
	x, err := Decode(files[0])
	if err != nil {
		return nil, err
	}
	if x.Blob != blob {
		return nil, fmt.Errorf("%w: it is of %s", ErrDamaged, x.Blob)
	}
	return x, x.SetFiles(files[1], files[2])
}

// Inspect reads all indexes below a directory without changing anything. It returns the damaged
// indexes with the reason, by path. The store may be open.
func Inspect(dir string) (damaged map[string]error, err error) {
	found, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	damaged = map[string]error{}
	for _, f := range found {
		path := filepath.Join(dir, f.Name())
		if strings.HasPrefix(f.Name(), tmpPrefix) {
			continue // the next Open deletes it
		}
		_, err := read(path, digest.NewDigestFromEncoded(digest.SHA256, f.Name()))
		if _, gone := os.Lstat(path); err != nil && !errors.Is(gone, fs.ErrNotExist) {
			damaged[path] = err
		}
	}
	return damaged, nil
}
