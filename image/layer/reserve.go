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

// Reserve is the space that layers leave free on their filesystem for pods, logs and kubelet.
// It prevents that the server of a blob decides how much of the disk it fills. If a field is zero,
// there is no reserve.
type Reserve struct {
	Percent int   // of the filesystem's bytes, and of its inodes
	Bytes   int64 // upper limit of the bytes

	Statfs func(path string) (unix.Statfs_t, error) // returns the filesystem's state; nil: statfs(2)

	// Reclaim, if not nil, is called before a lack of space is reported. It starts to delete the
	// data that is needed least. It returns the bytes of everything that is being deleted.
	Reclaim func() (freeing uint64)
	// Reclaimable returns how many bytes Reclaim can free at the most. It must not be nil if
	// Reclaim is not.
	Reclaimable func() uint64
}

// ClaimError says that the space is short for a size that a manifest claims. Nothing was written
// yet, and the claim may be wrong.
type ClaimError struct{ error }

// Unwrap returns the error with the gRPC code.
func (e ClaimError) Unwrap() error { return e.error }

func (r Reserve) isNone() bool { return r.Percent == 0 || r.Bytes == 0 }

const (
	// maxReservedInodes is the upper limit of the inodes.
	maxReservedInodes = 1 << 16
	// lookPeriod is how often free space is checked while a layer is written. A fast disk takes
	// some hundred megabytes in that time.
	lookPeriod = 50 * time.Millisecond
)

// check returns ResourceExhausted, which wraps ENOSPC, if the free space is less than the reserve
// and the wanted bytes together. freed bytes count as free.
func (r Reserve) check(fs *unix.Statfs_t, wanted, freed uint64) error {
	block := uint64(fs.Bsize)
	bytes := min(fs.Blocks*block/100*uint64(r.Percent), uint64(r.Bytes))
	switch free := fs.Bavail*block + freed; {
	case free < bytes:
		return exhausted("%d bytes are free on the filesystem of images and %d are kept free", free, bytes)
	case free-bytes < wanted:
		return exhausted("%d bytes are free on the filesystem of images, %d are kept free, and %d or more are needed", free,
			bytes, wanted)
	}
	if inodes := min(fs.Files/100*uint64(r.Percent), maxReservedInodes); fs.Ffree < inodes { // btrfs reports 0
		return exhausted("%d inodes are free on the filesystem of images and %d are kept free", fs.Ffree, inodes)
	}
	return nil
}

func exhausted(format string, args ...any) error {
	return errdefs.New(codes.ResourceExhausted, "%w: %s", unix.ENOSPC, fmt.Sprintf(format, args...))
}

// guard checks the free space now and until stop is called. If the free space falls below the
// reserve, it cancels the context with the error as cause. The daemon checks because berth-unpack,
// which writes, is not trusted.
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

// HasRoom returns ResourceExhausted if layers of the given bytes would use the reserve even after
// Reserve.Reclaim. freed bytes count as free. If there is no reserve, the result is nil. If bytes
// is not zero, the error is a ClaimError. Then nothing is reclaimed if that would not be enough,
// because anyone can claim a size.
func (s *Store) HasRoom(bytes, freed uint64) error {
	if s.reserve.isNone() {
		return nil
	}
	err := s.Spare(bytes, freed)
	if err == nil || s.reserve.Reclaim == nil {
		return err
	}
	if bytes > 0 && s.Spare(bytes, freed+s.reserve.Reclaimable()) != nil {
		return ClaimError{err}
	}
	err = s.Spare(bytes, max(freed, s.reserve.Reclaim()))
	if err != nil && bytes > 0 {
		err = ClaimError{err}
	}
	return err
}

// Spare returns ResourceExhausted if the filesystem has fewer free bytes in addition to the
// reserve. freed bytes count as free. It reclaims nothing.
func (s *Store) Spare(bytes, freed uint64) error {
	fs, err := s.statfs()
	if err != nil {
		return fmt.Errorf("get free space of %s: %w", s.root, err)
	}
	return s.reserve.check(&fs, bytes, freed)
}

// Inodes returns the number of files in the given layers. Missing layers do not count.
func (s *Store) Inodes(names []digest.Digest) (sum uint64) {
	for _, name := range names {
		if info, err := s.Info(name); err == nil {
			sum += info.Inodes
		}
	}
	return sum
}

// Deleting returns the usage of layers under deletion, a part of Usage. A layer does not count if
// its last deletion failed.
func (s *Store) Deleting() Usage { return s.trash.Deleting() }

// statfsOf returns a function that calls statfs(2) for a path, or Reserve.Statfs.
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
