package faults

import (
	"context"
	"path/filepath"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"

	"github.com/hanwen/go-fuse/v2/fs"
	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"

	"berth/integration/harness"
)

// Volume is an empty volume whose server does not answer, like NFS with a dead server. stat of the
// mount point works. A lookup inside blocks uninterruptibly until Answer is called.
type Volume struct {
	Dir     string
	asked   atomic.Int32
	answers chan struct{}
	Answer  func() // makes lookups return ENOENT; may be called more than once
}

// NewVolume mounts a volume until the test ends. Call it before the daemon is started, so that it
// is unmounted after the daemon has exited. It skips the test without FUSE.
func NewVolume(t *testing.T) *Volume {
	t.Helper()
	v := &Volume{Dir: t.TempDir(), answers: make(chan struct{})}
	v.Answer = sync.OnceFunc(func() { close(v.answers) })
	if unix.Access("/dev/fuse", unix.R_OK|unix.W_OK) != nil {
		t.Skip("needs FUSE")
	}
	server := harness.Get(fs.Mount(v.Dir, &silent{volume: v}, &fs.Options{MountOptions: fuse.MountOptions{DirectMountStrict: true, DisableXAttrs: true}}))(t)
	t.Cleanup(func() {
		v.Answer()
		harness.Must(t, unix.Unmount(v.Dir, unix.MNT_DETACH))
		server.Wait()
	})
	return v
}

// Path returns a path in the volume. A lookup of it does not return.
func (v *Volume) Path() string { return filepath.Join(v.Dir, "something") }

// Lookups returns the number of lookups.
func (v *Volume) Lookups() int { return int(v.asked.Load()) }

// AwaitLookups waits for a number of lookups.
func (v *Volume) AwaitLookups(t *testing.T, times int) {
	t.Helper()
	harness.EventuallyGot(t, "the volume is looked up", func() (bool, any) { got := v.Lookups(); return got >= times, got })
}

type silent struct {
	fs.Inode
	volume *Volume
}

var _ fs.NodeLookuper = (*silent)(nil)

// Lookup implements fs.NodeLookuper. It goes on if the caller is killed.
func (s *silent) Lookup(context.Context, string, *fuse.EntryOut) (*fs.Inode, syscall.Errno) {
	s.volume.asked.Add(1)
	<-s.volume.answers
	return nil, syscall.ENOENT
}
