package fill

import (
	"errors"
	"os"
	"testing"

	"berth/internal/testutil"
)

// openProbed skips the test if the kernel has no lazy layers.
func needKernel(t testing.TB) {
	t.Helper()
	if err := probe(testutil.DiskDir(t)); errors.Is(err, errors.ErrUnsupported) {
		t.Skip("NOT TESTED: ", err)
	} else if err != nil {
		t.Fatal(err)
	}
}

func TestProbe(t *testing.T) {
	needKernel(t)
	before, err := os.ReadDir("/proc/self/fd")
	testutil.Must(t, err)
	testutil.Must(t, probe(testutil.DiskDir(t)))
	after, err := os.ReadDir("/proc/self/fd")
	testutil.Must(t, err)
	if len(after) != len(before) {
		t.Errorf("%d descriptors, before %d", len(after), len(before))
	}
}

func TestProbeUnsupported(t *testing.T) {
	if err := probe(t.TempDir()); err == nil { // on a disk it is supported
		return
	} else if !errors.Is(err, errors.ErrUnsupported) {
		t.Errorf("%v", err)
	}
}
