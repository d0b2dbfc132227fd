// Package record stores durable records: small JSON documents, one per file. A record describes
// an object outside the daemon before the object is created.
//
// # Contract
//
// A record is replaced atomically: written to a temporary file and renamed. It has a schema version
// and a SHA-256 of the header and the content, which is verified on reading. A damaged file is
// reported and moved to the folder "set-aside" beside the records. It is never deleted and does not
// stop the daemon. A file that cannot be read at present, or that a newer berth wrote, is not
// damaged. It stays, and loading fails.
//
// A [Dir] is used by one process. Writes to different names may be concurrent. The caller owns the
// object and serializes writes to one name.
package record

import (
	"bytes"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"

	"berth/internal/errdefs"
	"berth/internal/failpoint"
)

// Durability is the worst failure that a record survives.
type Durability int

const (
	// Process means that the record survives the daemon, but perhaps not a power cut. It is for
	// objects that do not survive a reboot: pods and containers.
	Process Durability = iota
	// Power means that Write syncs the file and the folder. It is for images.
	Power
)

// magic starts the header line of every record file.
const magic = "berth-record/2"

// firstMagic is the magic of versions up to 0.2.0. Its sum covers only the body.
const firstMagic = "berth-record"

// maxRecord bounds the size of a file that is read, so a damaged file cannot exhaust memory. A CRI
// message has at most 16 MiB. JSON (base64) adds a third.
const maxRecord = 64 << 20

const suffix = ".record"

// SetAsideDir is the folder of damaged files, beside the records.
const SetAsideDir = "set-aside"

// ErrCorrupt is wrapped by the errors of damaged records.
var ErrCorrupt = errors.New("record is damaged")

// Dir is a folder of records of one kind and schema version. [OpenDir] opens it.
type Dir struct {
	path       string
	kind       string
	version    int
	durability Durability

	begin func(what, object string) (end func()) // registers waits; may be nil
}

// OpenDir opens a folder of records, and creates a missing one with mode 0700. kind is written into
// each record and checked on reading. version is the schema version of new records.
func OpenDir(path, kind string, version int, d Durability) (*Dir, error) {
	if err := os.MkdirAll(path, 0o700); err != nil {
		return nil, fmt.Errorf("make record folder %s: %w", path, err)
	}
	return &Dir{path: path, kind: kind, version: version, durability: d}, nil
}

// Note sets a function that registers waits for the disk. It must be called before any other
// method.
func (d *Dir) Note(begin func(what, object string) (end func())) { d.begin = begin }

// waiting registers a wait for the disk.
func (d *Dir) waiting(name string) (end func()) {
	if d.begin == nil {
		return func() {}
	}
	return d.begin("write of its record", d.kind+" "+name)
}

// Write stores v as the record of that name, and replaces an older record atomically. Names must be
// plain file names (IDs).
func (d *Dir) Write(name string, v any) error {
	if err := checkName(name); err != nil {
		return err
	}
	data, err := Encode(d.kind, d.version, v)
	if err != nil {
		return fmt.Errorf("encode %s record %s: %w", d.kind, name, err)
	}
	defer d.waiting(name)()
	if err := d.replace(name, data); err != nil {
		code := codes.Internal
		if errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT) {
			code = codes.ResourceExhausted
		}
		return errdefs.New(code, "write %s record %s: %w", d.kind, name, err)
	}
	return nil
}

// replace writes data beside the record and renames it into place.
func (d *Dir) replace(name string, data []byte) error {
	final := filepath.Join(d.path, name+suffix)
	tmp := filepath.Join(d.path, "."+name+".tmp")
	failpoint.Reach("record.write")
	f, err := os.OpenFile(tmp, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	_, err = f.Write(data)
	if err == nil && d.durability == Power {
		err = f.Sync()
	}
	if e := f.Close(); err == nil {
		err = e
	}
	failpoint.Reach("record.written")
	if err == nil {
		err = os.Rename(tmp, final)
	}
	if err != nil {
		return errors.Join(err, removeIfExists(tmp))
	}
	failpoint.Reach("record.renamed")
	return d.sync()
}

// sync makes renames and removals in the folder durable, if the durability is Power.
func (d *Dir) sync() error {
	if d.durability != Power {
		return nil
	}
	f, err := os.Open(d.path)
	if err != nil {
		return err
	}
	defer f.Close() // opened read-only, so Close cannot lose data
	return f.Sync()
}

// Remove deletes a record. A missing record is no error.
func (d *Dir) Remove(name string) error {
	if err := checkName(name); err != nil {
		return err
	}
	defer d.waiting(name)()
	failpoint.Reach("record.remove")
	if err := removeIfExists(filepath.Join(d.path, name+suffix)); err != nil {
		return fmt.Errorf("remove %s record %s: %w", d.kind, name, err)
	}
	failpoint.Reach("record.removed")
	if err := d.sync(); err != nil {
		return fmt.Errorf("remove %s record %s: %w", d.kind, name, err)
	}
	return nil
}

// Damaged describes a damaged record that [Dir.Load] has moved to [SetAsideDir].
type Damaged struct {
	Name string // the record's name
	Path string // its path after the move; the old path if the folder is not writable
	Err  error
}

// Load calls decode for every record of the folder. It moves files that are damaged, or that decode
// refuses, to [SetAsideDir], and returns them. It deletes temporary files of interrupted writes. It
// fails for a file that cannot be read or that a newer berth wrote, so that no such record is lost.
func (d *Dir) Load(decode func(name string, version int, body []byte) error) ([]Damaged, error) {
	return d.LoadParallel(1, decode)
}

// LoadParallel is Load with several goroutines, which call decode.
func (d *Dir) LoadParallel(workers int, decode func(name string, version int, body []byte) error) ([]Damaged, error) {
	entries, err := os.ReadDir(d.path)
	if err != nil {
		return nil, fmt.Errorf("read record folder %s: %w", d.path, err)
	}
	damages := make([]error, len(entries))
	var loads errgroup.Group
	loads.SetLimit(workers)
	for i, e := range entries {
		if name, ok := recordName(e); ok {
			loads.Go(func() (err error) {
				damages[i], err = d.load(name, decode)
				return err
			})
		}
	}
	if err := loads.Wait(); err != nil {
		return nil, err
	}
	return d.tidy(entries, damages)
}

// recordName returns the name of the record in a file; ok is false for another file.
func recordName(e fs.DirEntry) (name string, ok bool) {
	name, ok = strings.CutSuffix(e.Name(), suffix)
	return name, ok && !e.IsDir()
}

// tidy moves the files with a damage aside, and deletes temporary files.
func (d *Dir) tidy(entries []fs.DirEntry, damages []error) (bad []Damaged, err error) {
	for i, e := range entries {
		name, isRecord := recordName(e)
		switch {
		case isRecord && damages[i] != nil:
			moved, err := SetAside(filepath.Join(d.path, e.Name()))
			if err != nil && !errdefs.IsUnwritable(err) { // on a read-only filesystem the next start moves it
				return bad, fmt.Errorf("move damaged %s record %s (%w): %w", d.kind, name, damages[i], err)
			}
			bad = append(bad, Damaged{Name: name, Path: moved, Err: damages[i]})
		case !e.IsDir() && strings.HasPrefix(e.Name(), ".") && strings.HasSuffix(e.Name(), ".tmp"):
			failpoint.Reach("record.remove-rest")
			if err := removeIfExists(filepath.Join(d.path, e.Name())); err != nil && !errdefs.IsUnwritable(err) {
				return bad, err
			}
			failpoint.Reach("record.rest-removed")
		}
	}
	return bad, nil
}

func (d *Dir) load(name string, decode func(string, int, []byte) error) (damage, err error) {
	data, err := readCapped(filepath.Join(d.path, name+suffix))
	if errors.Is(err, ErrCorrupt) {
		return err, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read %s record %s: %w", d.kind, name, err)
	}
	version, body, err := Decode(d.kind, data)
	if err != nil {
		return err, nil
	}
	if version > d.version {
		return nil, fmt.Errorf("%s record %s was written by a newer berth (schema version %d, this version supports up to %d)", d.kind,
			name, version, d.version)
	}
	return decode(name, version, body), nil
}

// SetAside moves the file or directory at path to [SetAsideDir] beside it, under the same name with
// a number. It returns the new path, or path after an error.
func SetAside(path string) (moved string, err error) {
	dir := filepath.Join(filepath.Dir(path), SetAsideDir)
	failpoint.Reach("record.set-aside")
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return path, err
	}
	failpoint.Reach("record.place-aside-made")
	for n := 0; ; n++ {
		to := filepath.Join(dir, fmt.Sprintf("%s.%d", filepath.Base(path), n))
		err := unix.Renameat2(unix.AT_FDCWD, path, unix.AT_FDCWD, to, unix.RENAME_NOREPLACE)
		if err != nil && !errors.Is(err, fs.ErrExist) {
			return path, err
		}
		if err == nil {
			failpoint.Reach("record.is-aside")
			return to, nil
		}
	}
}

// Encode returns the content of a record file for records outside of a [Dir]. [Decode] reads it.
func Encode(kind string, version int, v any) ([]byte, error) {
	body, err := json.Marshal(v)
	if err != nil {
		return nil, err
	}
	return append([]byte(headerOf(magic, kind, version, body)), body...), nil
}

// headerOf returns the header line of a record file with its newline. The sum covers the line too,
// because a flipped bit in the version could make the record look like one of a newer berth.
func headerOf(magic, kind string, version int, body []byte) string {
	line := fmt.Sprintf("%s %s %d %d", magic, kind, version, len(body))
	sum := sha256.New() // Write never fails
	if magic != firstMagic {
		sum.Write([]byte(line + "\n"))
	}
	sum.Write(body)
	return fmt.Sprintf("%s %x\n", line, sum.Sum(nil))
}

// Decode verifies the content of a record file and returns its schema version and JSON body. Errors
// wrap [ErrCorrupt].
func Decode(kind string, data []byte) (version int, body []byte, err error) {
	header, body, ok := bytes.Cut(data, []byte("\n"))
	if !ok {
		return 0, nil, fmt.Errorf("%w: no header line", ErrCorrupt)
	}
	var gotMagic, gotKind, sum string
	var size int
	if n, err := fmt.Sscanf(string(header), "%s %s %d %d %s", &gotMagic, &gotKind, &version, &size, &sum); n != 5 ||
		err != nil || gotMagic != magic && gotMagic != firstMagic {
		return 0, nil, fmt.Errorf("%w: not a record's header line", ErrCorrupt)
	}
	if gotKind != kind {
		return 0, nil, fmt.Errorf("%w: a %q record, not a %q one", ErrCorrupt, gotKind, kind)
	}
	if size != len(body) {
		return 0, nil, fmt.Errorf("%w: %d bytes of content, not %d", ErrCorrupt, len(body), size)
	}
	if string(header)+"\n" != headerOf(gotMagic, kind, version, body) {
		return 0, nil, fmt.Errorf("%w: the checksum does not match", ErrCorrupt)
	}
	return version, body, nil
}

func readCapped(path string) ([]byte, error) {
	info, err := os.Lstat(path)
	if err != nil {
		return nil, err
	}
	if !info.Mode().IsRegular() || info.Size() > maxRecord {
		return nil, fmt.Errorf("%w: not a regular file of at most %d bytes", ErrCorrupt, maxRecord)
	}
	return os.ReadFile(path)
}

func checkName(name string) error {
	if name == "" || name == "." || name == ".." || strings.ContainsAny(name, "/\x00") || strings.HasPrefix(name, ".") {
		return fmt.Errorf("%q is not a valid record name", name)
	}
	return nil
}

func removeIfExists(path string) error {
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}
