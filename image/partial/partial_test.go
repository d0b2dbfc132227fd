package partial

import (
	"bytes"
	"errors"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"berth/internal/testutil"
)

const repository = "registry.example/team/app"

// blob returns the descriptor of a blob with a size in MiB.
func blob(name string, size int64) ocispec.Descriptor {
	return ocispec.Descriptor{Digest: digest.FromString(name), Size: size << 20}
}

func mebibytes(n int) []byte { return bytes.Repeat([]byte("x"), n<<20) }

func config(t *testing.T) Config {
	return Config{Dir: t.TempDir(), TTL: time.Hour, HasRoom: func(uint64) error { return nil }, Log: slog.New(slog.DiscardHandler)}
}

func open(t *testing.T, cfg Config) *Store {
	t.Helper()
	s, err := Open(cfg)
	testutil.Must(t, err)
	return s
}

// keep keeps the first bytes of a blob.
func keep(s *Store, want ocispec.Descriptor, content []byte) {
	b := s.Open(repository, want)
	b.Received(content)
	b.Keep()
}

func wantUsage(t *testing.T, s *Store, files int, bytes int64) {
	t.Helper()
	if f, n := s.Usage(); f != files || n != bytes {
		t.Errorf("%d files with %d bytes, want %d with %d", f, n, files, bytes)
	}
	var sum int64
	found, _, err := Inspect(s.cfg.Dir)
	testutil.Must(t, err)
	for _, f := range found {
		sum += f.Size
	}
	if len(found) != files || sum != bytes {
		t.Errorf("%d files with %d bytes on disk, want %d with %d", len(found), sum, files, bytes)
	}
}

func TestOnlyTheSameRepositorySeesBytes(t *testing.T) {
	t.Parallel()
	s := open(t, config(t))
	keep(s, blob("a", 4), mebibytes(2))
	for _, other := range []string{"registry.example/team/other", "other.example/team/app"} {
		b := s.Open(other, blob("a", 4))
		if _, had := b.Had(); had != 0 {
			t.Errorf("%s has %d bytes", other, had)
		}
		b.Discard()
	}
	b := s.Open(repository, blob("a", 4))
	content, had := b.Had()
	if data, err := io.ReadAll(content); err != nil || had != 2<<20 || !bytes.Equal(data, mebibytes(2)) {
		t.Errorf("%d of %d bytes, %v", len(data), had, err)
	}
	if s.Open(repository, blob("a", 4)) != nil {
		t.Error("two transfers have one file")
	}
	b.Discard()
	wantUsage(t, s, 0, 0)
}

// Open deletes what is of no use, and leaves alone what is not its own.
func TestOpenAfterKill(t *testing.T) {
	t.Parallel()
	cfg := config(t)
	put := func(name string, size int64, age time.Duration) string {
		path := filepath.Join(cfg.Dir, nameOf(repository, digest.FromString(name)))
		testutil.Must(t, os.WriteFile(path, nil, 0o600))
		testutil.Must(t, os.Truncate(path, size))
		testutil.Must(t, os.Chtimes(path, time.Now(), time.Now().Add(-age)))
		return path
	}
	put("good", 3<<20, time.Minute)
	put("small", MinSize-1, 0)
	put("expired", 3<<20, 2*time.Hour)
	put("from the future", 3<<20, -24*time.Hour)
	foreign := []string{"notes.txt", digest.FromString("x").Encoded(), nameOf(repository, digest.FromString("directory"))}
	testutil.Must(t, os.WriteFile(filepath.Join(cfg.Dir, foreign[0]), nil, 0o600))
	testutil.Must(t, os.Symlink("/etc/passwd", filepath.Join(cfg.Dir, foreign[1])))
	testutil.Must(t, os.Mkdir(filepath.Join(cfg.Dir, foreign[2]), 0o700))
	s := open(t, cfg)
	wantUsage(t, s, 2, 6<<20)
	testutil.Must(t, s.Expire(time.Now().Add(time.Hour))) // also the one from the future
	wantUsage(t, s, 0, 0)
	_, others, err := Inspect(cfg.Dir)
	testutil.Must(t, err)
	slices.Sort(foreign)
	if !slices.Equal(others, foreign) {
		t.Errorf("other entries are %v, want %v", others, foreign)
	}
}

// At the limit the oldest file goes. A file that is larger than the limit keeps its start.
func TestLimit(t *testing.T) {
	t.Parallel()
	cfg := config(t)
	cfg.MaxBytes = 5 << 20
	s := open(t, cfg)
	keep(s, blob("a", 9), mebibytes(2))
	keep(s, blob("b", 9), mebibytes(2))
	keep(s, blob("c", 9), mebibytes(2))
	wantUsage(t, s, 2, 4<<20)
	if _, had := s.Open(repository, blob("a", 9)).Had(); had != 0 {
		t.Error("the oldest file is still there")
	}
	b := s.Open(repository, blob("large", 9))
	for range 9 {
		b.Received(mebibytes(1))
	}
	b.Keep()
	b = s.Open(repository, blob("large", 9))
	if _, had := b.Had(); had != 5<<20 {
		t.Errorf("%d bytes of a blob beyond the limit are kept", had)
	}
	b.Keep()
}

// When other data needs the space, all files go. Transfers continue, and keep nothing more. A
// transfer that still reads its file keeps it.
func TestReclaim(t *testing.T) {
	t.Parallel()
	s := open(t, config(t))
	keep(s, blob("idle", 9), mebibytes(2))
	keep(s, blob("reading", 9), mebibytes(2))
	growing, reading := s.Open(repository, blob("growing", 9)), s.Open(repository, blob("reading", 9))
	growing.Received(mebibytes(2))
	testutil.Must(t, s.Reclaim())
	if f, n := s.Usage(); f != 2 || n != 2<<20 {
		t.Errorf("%d files with %d bytes", f, n)
	}
	content, had := reading.Had()
	if data, err := io.ReadAll(content); err != nil || int64(len(data)) != had || had != 2<<20 {
		t.Errorf("%d of %d bytes, %v", len(data), had, err)
	}
	growing.Received(mebibytes(1))
	growing.Keep()
	reading.Received(mebibytes(2))
	reading.Received(mebibytes(1)) // beyond its file
	wantUsage(t, s, 1, 3<<20)
	testutil.Must(t, s.Reclaim())
	reading.Keep()
	wantUsage(t, s, 0, 0)
}

// A failed write, or a lack of space, ends the keeping but not the transfer.
func TestNoRoom(t *testing.T) {
	t.Parallel()
	cfg := config(t)
	full := false
	cfg.HasRoom = func(bytes uint64) error {
		if bytes != 4*16<<20 {
			t.Errorf("asked for %d bytes", bytes)
		}
		if full {
			return errors.New("full")
		}
		return nil
	}
	s := open(t, cfg)
	b := s.Open(repository, blob("a", 16))
	b.Received(mebibytes(6))
	full = true
	b.Received(mebibytes(3)) // crosses a check
	wantUsage(t, s, 0, 0)
	b.Received(mebibytes(1))
	b.Keep()
	wantUsage(t, s, 0, 0)
	if s.Open(repository, blob("a", 16)) != nil {
		t.Error("a file was opened without room")
	}
	full = false
	b = s.Open(repository, blob("a", 16))
	testutil.Must(t, b.content.Close()) // writes fail
	b.Received(mebibytes(2))
	b.Keep()
	wantUsage(t, s, 0, 0)
}

// What is too small to be of use is not kept.
func TestSmall(t *testing.T) {
	t.Parallel()
	s := open(t, config(t))
	if s.Open(repository, ocispec.Descriptor{Digest: digest.FromString("a"), Size: MinSize - 1}) != nil {
		t.Error("a small blob has a file")
	}
	keep(s, blob("a", 4), make([]byte, MinSize-1))
	wantUsage(t, s, 0, 0)
	cfg := config(t)
	cfg.TTL = 0
	if open(t, cfg).Open(repository, blob("a", 4)) != nil {
		t.Error("a file without a TTL")
	}
}
