package moody

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

// Volume is a volume whose server does not answer, as NFS without one: of its empty directory there are attributes, but who
// looks for something in it is in an uninterruptible sleep, which no signal ends, until Answer.
type Volume struct {
	Dir     string
	asked   atomic.Int32
	answers chan struct{}
	Answer  func() // from now on: there is nothing; may be called again
}

// NewVolume mounts a volume, which has to be made before the daemon that uses it: it is unmounted afterwards. The test is
// skipped without FUSE.
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

// Path is of something in the volume, of which nobody knows whether it is there.
func (v *Volume) Path() string { return filepath.Join(v.Dir, "something") }

// Asked is how often something was looked for.
func (v *Volume) Asked() int { return int(v.asked.Load()) }

// AwaitAsked waits until something was looked for so often.
func (v *Volume) AwaitAsked(t *testing.T, times int) {
	t.Helper()
	harness.Eventually(t, "the volume is looked at", func() error {
		if got := v.Asked(); got < times {
			return harness.Unexpected("how often it was", got, times)
		}
		return nil
	})
}

type silent struct {
	fs.Inode
	volume *Volume
}

var _ fs.NodeLookuper = (*silent)(nil)

// Lookup implements fs.NodeLookuper. That who asks has been killed changes nothing.
func (s *silent) Lookup(context.Context, string, *fuse.EntryOut) (*fs.Inode, syscall.Errno) {
	s.volume.asked.Add(1)
	<-s.volume.answers
	return nil, syscall.ENOENT
}
