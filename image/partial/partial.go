// Package partial keeps the start of blobs whose transfer did not finish, so that the next pull
// fetches only the rest.
//
// A file holds the first bytes of one blob, as one repository has sent them. It grows during the
// transfer and is removed when the blob is complete. So any length is valid, and a killed daemon
// leaves nothing to repair. Files are not synced. Their content is not trusted. The caller hashes
// it with the rest, checks the blob's digest, and discards the file if the digest is wrong. A file
// is used only for the repository that has sent it. The registry must first begin to send the rest
// to the new pull. So other repositories cannot use, measure or damage the file
// (docs/adr/001-layer-access.md). Files expire, have a common limit, and are dropped when the
// filesystem is short of space. A failure to write one never makes a pull fail. Other entries of
// the directory are reported and kept.
package partial

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"regexp"
	"sync"
	"time"

	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"golang.org/x/sys/unix"

	"berth/internal/failpoint"
)

const (
	// MinSize is the least number of bytes that are kept. Smaller blobs get no file.
	MinSize = 1 << 20
	// DefaultMaxBytes is the default of Config.MaxBytes.
	DefaultMaxBytes = 8 << 30
	// inflation is the usual ratio of an unpacked layer to its blob. A file is written only while
	// the filesystem has room for both the file and the layer.
	inflation = 4
	// checkEvery is how many bytes are written between two checks of the free space.
	checkEvery = 8 << 20
	// growth is how many bytes are written between two failpoints.
	growth = 1 << 20
)

// Config configures a Store.
type Config struct {
	Dir      string
	TTL      time.Duration            // how long bytes are kept after their last change; 0: none are kept
	MaxBytes int64                    // of all files; 0: DefaultMaxBytes
	HasRoom  func(bytes uint64) error // reports whether the filesystem has room for more layers
	Log      *slog.Logger
}

// Store keeps the files below one directory. Its methods may be called concurrently.
type Store struct {
	cfg Config

	mu sync.Mutex // guards the fields below and those of each file
	// +checklocks:mu
	files map[string]*file
	// +checklocks:mu
	bytes int64 // of all files
}

// file describes a file of the store.
type file struct {
	size    int64
	changed time.Time
	active  bool     // a Blob has it open, or it is being removed
	content *os.File // of the Blob
	reading bool     // a Blob still reads the bytes of earlier transfers
	dropped bool     // the Blob must discard it
}

// Found is a file on disk.
type Found struct {
	Name    string
	Size    int64
	Changed time.Time
}

// fileName matches the names of files: digest of the blob, hash of the repository.
var fileName = regexp.MustCompile(`^([0-9a-f]{64}|[0-9a-f]{96}|[0-9a-f]{128})-[0-9a-f]{16}$`)

// nameOf returns the name of the file for a repository's blob.
func nameOf(repository string, blob digest.Digest) string {
	return blob.Encoded() + "-" + digest.FromString(repository).Encoded()[:16]
}

// Inspect lists the files of a store, and the names of all other entries of its directory. It
// changes nothing. A missing directory is empty.
func Inspect(dir string) (files []Found, others []string, err error) {
	entries, err := os.ReadDir(dir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, nil, fmt.Errorf("list partial layers: %w", err)
	}
	for _, e := range entries {
		info, err := e.Info()
		switch {
		case errors.Is(err, fs.ErrNotExist): // removed meanwhile
		case err != nil:
			return nil, nil, fmt.Errorf("list partial layers: %w", err)
		case !info.Mode().IsRegular() || !fileName.MatchString(e.Name()):
			others = append(others, e.Name())
		default:
			files = append(files, Found{Name: e.Name(), Size: info.Size(), Changed: info.ModTime()})
		}
	}
	return files, others, nil
}

// Open opens the store, creates its directory if needed, and removes expired files.
func Open(cfg Config) (*Store, error) {
	if cfg.MaxBytes == 0 {
		cfg.MaxBytes = DefaultMaxBytes
	}
	s := &Store{cfg: cfg, files: map[string]*file{}}
	if err := os.MkdirAll(cfg.Dir, 0o700); err != nil {
		return nil, fmt.Errorf("open partial layers: %w", err)
	}
	files, others, err := Inspect(cfg.Dir)
	if err != nil {
		return nil, err
	}
	if len(others) > 0 {
		cfg.Log.Warn("unknown files among partial layers", "directory", cfg.Dir, "files", others)
	}
	now := time.Now()
	for _, f := range files {
		if f.Changed.After(now) { // the clock was wrong
			f.Changed = now
		}
		s.files[f.Name] = &file{size: f.Size, changed: f.Changed}
		s.bytes += f.Size
	}
	s.makeRoom(0) // an earlier version may have had a higher limit
	if err := s.Expire(now); err != nil {
		cfg.Log.Warn("delete partial layers; will be retried", "error", err)
	}
	return s, nil
}

// Usage returns the number of files and their bytes.
func (s *Store) Usage() (files int, bytes int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.files), s.bytes
}

// Expire removes the files that have not changed for the TTL, and the files that are too small to
// be useful.
func (s *Store) Expire(now time.Time) error {
	return s.drop(func(f *file) bool { return f.size < MinSize || now.Sub(f.changed) >= s.cfg.TTL })
}

// Clear removes all files that no transfer uses.
func (s *Store) Clear() error { return s.drop(func(*file) bool { return true }) }

// Reclaim frees the space of all files, because other data needs it. Current transfers continue and
// keep nothing more. A transfer that still reads the bytes of an earlier transfer keeps its file
// until it has read them.
func (s *Store) Reclaim() error {
	s.mu.Lock()
	var open []*os.File
	for _, f := range s.files {
		if f.content != nil && !f.reading && !f.dropped {
			f.dropped = true
			open = append(open, f.content)
			s.bytes -= f.size
			f.size = 0
		}
	}
	s.mu.Unlock()
	var failed error
	for _, content := range open {
		// The Blob may still write a little, and removes the file with its next bytes or at its
		// end.
		if err := content.Truncate(0); err != nil && !errors.Is(err, os.ErrClosed) {
			failed = errors.Join(failed, fmt.Errorf("truncate partial layer: %w", err))
		}
	}
	return errors.Join(failed, s.Clear())
}

// drop removes the chosen files that no transfer uses.
func (s *Store) drop(chosen func(*file) bool) (failed error) {
	s.mu.Lock()
	var names []string
	for name, f := range s.files {
		if !f.active && chosen(f) {
			f.active = true // an active file is not opened meanwhile
			names = append(names, name)
		}
	}
	s.mu.Unlock()
	for _, name := range names {
		failed = errors.Join(failed, s.remove(name))
	}
	return failed
}

// remove removes a file that the caller has made active.
func (s *Store) remove(name string) error {
	failpoint.Reach("partial.remove")
	err := os.Remove(filepath.Join(s.cfg.Dir, name))
	failpoint.Reach("partial.removed")
	s.mu.Lock()
	defer s.mu.Unlock()
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		*s.files[name] = file{size: s.files[name].size, changed: s.files[name].changed}
		return fmt.Errorf("remove partial layer: %w", err)
	}
	s.bytes -= s.files[name].size
	delete(s.files, name)
	return nil
}

// makeRoom removes the least recently changed files until another n bytes are within the limit. It
// reports whether that succeeded.
func (s *Store) makeRoom(n int64) bool {
	for {
		s.mu.Lock()
		if s.bytes+n <= s.cfg.MaxBytes {
			s.mu.Unlock()
			return true
		}
		name := s.oldest()
		if name != "" {
			s.files[name].active = true
		}
		s.mu.Unlock()
		if name == "" || s.remove(name) != nil {
			return false
		}
	}
}

// oldest returns the least recently changed file that no transfer uses, or "". The caller holds the
// lock.
//
// +checklocks:s.mu
func (s *Store) oldest() (oldest string) {
	for name, f := range s.files {
		if !f.active && (oldest == "" || f.changed.Before(s.files[oldest].changed)) {
			oldest = name
		}
	}
	return oldest
}

// Blob is the start of one blob, open for a transfer. A nil Blob keeps nothing. Its methods must
// not be called concurrently.
type Blob struct {
	store   *Store
	name    string
	want    ocispec.Descriptor
	content *os.File // nil: closed
	had     int64    // bytes from earlier transfers
	at      int64    // position of the next byte received
	checked int64    // position at the last check of the free space
	full    bool     // the limit is reached, and the file grows no more
}

// Open opens the kept bytes of a repository's blob for a transfer of the blob. The result is nil if
// the blob is small, the disk has no room, or another transfer has the file. The caller calls Keep
// or Discard.
func (s *Store) Open(repository string, want ocispec.Descriptor) *Blob {
	if s.cfg.TTL <= 0 || want.Size < MinSize {
		return nil
	}
	name := nameOf(repository, want.Digest)
	if !s.activate(name) {
		return nil
	}
	b := &Blob{store: s, name: name, want: want}
	if err := b.open(); err != nil {
		s.cfg.Log.Debug("partial layer is not kept", "layer", want.Digest, "error", err)
		b.Discard()
		return nil
	}
	return b
}

// activate marks a file as in use by a transfer, unless it is in use already.
func (s *Store) activate(name string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	f := s.files[name]
	if f == nil {
		f = &file{}
		s.files[name] = f
	}
	if f.active {
		return false
	}
	f.active = true
	return true
}

func (b *Blob) open() (err error) {
	if err := b.hasRoom(); err != nil {
		return err
	}
	path := filepath.Join(b.store.cfg.Dir, b.name)
	failpoint.Reach("partial.open")
	b.content, err = os.OpenFile(path, os.O_RDWR|os.O_CREATE|unix.O_NOFOLLOW, 0o600)
	failpoint.Reach("partial.opened")
	if err != nil {
		return err
	}
	info, err := b.content.Stat()
	if err != nil {
		return err
	}
	// The registry must send at least one byte, which shows that the pull may have the blob.
	b.had = min(info.Size(), b.want.Size-1)
	if err := b.content.Truncate(b.had); err != nil {
		return err
	}
	b.store.update(b.name, func(f *file) { f.content, f.reading = b.content, b.had > 0 })
	b.store.changed(b.name, b.had)
	return nil
}

// update changes the description of a file.
func (s *Store) update(name string, change func(*file)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	change(s.files[name])
}

// changed records the new size of a file.
func (s *Store) changed(name string, size int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	f := s.files[name]
	s.bytes += size - f.size
	f.size, f.changed = size, time.Now()
}

// hasRoom checks that the filesystem has room for the layer in addition to the file.
func (b *Blob) hasRoom() error { return b.store.cfg.HasRoom(uint64(b.want.Size) * inflation) }

// Had returns the bytes of earlier transfers and their number.
func (b *Blob) Had() (content io.Reader, size int64) {
	if b == nil || b.content == nil {
		return nil, 0
	}
	return io.NewSectionReader(b.content, 0, b.had), b.had
}

// Received adds the next bytes of the blob. The first bytes are those that Had returned. At the
// limit of all files, the file stops growing. After a failure the file is gone and later bytes are
// ignored.
func (b *Blob) Received(p []byte) {
	if b == nil || b.content == nil {
		return
	}
	skip := min(int64(len(p)), max(b.had-b.at, 0))
	b.at += int64(len(p))
	if p = p[skip:]; len(p) == 0 || b.full {
		return
	}
	switch err := b.add(p); {
	case errors.Is(err, errLimit):
		b.full = true
	case err != nil:
		b.store.cfg.Log.Debug("partial layer is not kept", "layer", b.want.Digest, "error", err)
		b.Discard()
	}
}

var (
	errLimit   = errors.New("partial layers have reached their limit")
	errDropped = errors.New("its space is needed")
)

func (b *Blob) add(p []byte) error {
	if b.isDropped() {
		return errDropped
	}
	if b.at-b.checked >= checkEvery {
		b.checked = b.at
		if err := b.hasRoom(); err != nil {
			return err
		}
	}
	if !b.store.makeRoom(int64(len(p))) {
		return errLimit
	}
	before := b.at - int64(len(p))
	if _, err := b.content.WriteAt(p, before); err != nil {
		return err
	}
	if before/growth != b.at/growth {
		failpoint.Reach("partial.grown")
	}
	b.store.changed(b.name, b.at)
	return nil
}

// isDropped reports whether the file must be discarded. The Blob has read all bytes of earlier
// transfers.
func (b *Blob) isDropped() (dropped bool) {
	b.store.update(b.name, func(f *file) { f.reading, dropped = false, f.dropped })
	return dropped
}

// Keep ends the transfer and keeps the received bytes, if there are enough.
func (b *Blob) Keep() {
	if b == nil || b.content == nil {
		return
	}
	b.close()
	kept := false
	b.store.update(b.name, func(f *file) {
		if kept = f.size >= MinSize && !f.dropped; kept {
			*f = file{size: f.size, changed: f.changed}
		}
	})
	if kept {
		b.name = ""
	} else {
		b.Discard()
	}
}

// Discard ends the transfer and removes the file. It does nothing after Keep or Discard.
func (b *Blob) Discard() {
	if b == nil || b.name == "" {
		return
	}
	b.close()
	if err := b.store.remove(b.name); err != nil {
		b.store.cfg.Log.Warn("delete partial layer; will be retried", "error", err)
	}
	b.name = ""
}

func (b *Blob) close() {
	if b.content != nil {
		_ = b.content.Close() // nothing is read from it or trusted
		b.content = nil
	}
}
