package layer

import (
	"context"
	"fmt"
	"time"

	"github.com/opencontainers/go-digest"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"

	"berth/internal/errdefs"
)

// Reserve is what layers leave free on their filesystem: whoever serves a blob decides how much it
// becomes, and pods, logs and kubelet need room too. Where a field is zero, that is nothing.
type Reserve struct {
	Percent int   // of the filesystem, of its bytes and of its inodes
	Bytes   int64 // but no more than so many

	Statfs func(path string) (unix.Statfs_t, error) // looks at the filesystem; nil: statfs(2)
}

func (r Reserve) isNone() bool { return r.Percent == 0 || r.Bytes == 0 }

const (
	// maxReservedInodes bounds what Percent makes of inodes.
	maxReservedInodes = 1 << 16
	// lookPeriod is how often free space is looked at while a layer is made: a fast disk takes some
	// hundred megabytes in that time.
	lookPeriod = 50 * time.Millisecond
)

// check fails with ResourceExhausted, and ENOSPC in it, if a filesystem, with so many bytes freed, has less free than the reserve and the
// bytes that are wanted.
func (r Reserve) check(fs *unix.Statfs_t, wanted, freed uint64) error {
	block := uint64(fs.Bsize)
	bytes := min(fs.Blocks*block/100*uint64(r.Percent), uint64(r.Bytes))
	switch free := fs.Bavail*block + freed; {
	case free < bytes:
		return exhausted("%d bytes are free on the filesystem of images and %d are kept free", free, bytes)
	case free-bytes < wanted:
		return exhausted("%d bytes are free on the filesystem of images, %d are kept free, and %d or more are needed", free, bytes, wanted)
	}
	if inodes := min(fs.Files/100*uint64(r.Percent), maxReservedInodes); fs.Ffree < inodes { // btrfs has no number of them: 0
		return exhausted("%d inodes are free on the filesystem of images and %d are kept free", fs.Ffree, inodes)
	}
	return nil
}

func exhausted(format string, args ...any) error {
	return errdefs.New(codes.ResourceExhausted, "%w: %s", unix.ENOSPC, fmt.Sprintf(format, args...))
}

// guard looks at the free space, at once and until stop is called. The context ends, with the reason as its
// cause, when there is less than the reserve. It is who reads the filesystem that decides, not who writes the layer.
func (s *Store) guard(ctx context.Context) (guarded context.Context, stop func(), err error) {
	if err := s.HasRoom(0, 0); err != nil {
		return nil, nil, err
	}
	guarded, cancel := context.WithCancelCause(ctx)
	done := make(chan struct{})
	go func() {
		defer close(done)
		tick := time.NewTicker(lookPeriod)
		defer tick.Stop()
		for {
			select {
			case <-guarded.Done():
				return
			case <-tick.C:
				if err := s.HasRoom(0, 0); err != nil {
					cancel(err)
				}
			}
		}
	}()
	return guarded, func() { cancel(nil); <-done }, nil
}

// HasRoom fails with ResourceExhausted if layers can't take so many bytes more and leave the reserve, once what is to be freed is. Without
// a reserve there is always room.
func (s *Store) HasRoom(bytes, freed uint64) error {
	if s.reserve.isNone() {
		return nil
	}
	fs, err := s.statfs()
	if err != nil {
		return fmt.Errorf("look at the free space of %s: %w", s.root, err)
	}
	return s.reserve.check(&fs, bytes, freed)
}

// Inodes is how many files those of the layers have that are there.
func (s *Store) Inodes(names []digest.Digest) (sum uint64) {
	for _, name := range names {
		if info, err := s.Info(name); err == nil {
			sum += info.Inodes
		}
	}
	return sum
}

// Deleting is what those layers take that are being deleted, but for what could not be: a part of Usage.
func (s *Store) Deleting() Usage { return s.trash.Deleting() }

// statfsOf returns a function that looks at the filesystem that a path is on.
func (r Reserve) statfsOf(path string) func() (unix.Statfs_t, error) {
	if r.Statfs != nil {
		return func() (unix.Statfs_t, error) { return r.Statfs(path) }
	}
	return func() (fs unix.Statfs_t, err error) {
		for {
			if err = unix.Statfs(path, &fs); err != unix.EINTR {
				return fs, err
			}
		}
	}
}
