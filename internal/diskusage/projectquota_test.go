package diskusage

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"berth/internal/testutil"
)

func TestSizesOfKernelStructures(t *testing.T) {
	if q, a := unsafe.Sizeof(quota{}), unsafe.Sizeof(attributes{}); q != 112 || a != 28 {
		t.Errorf("struct fs_disk_quota has %d bytes, struct fsxattr %d", q, a)
	}
}

// A filesystem without project quotas gives ErrNoQuotas.
func TestOpenQuotasOfFilesystemWithoutQuotas(t *testing.T) {
	if _, err := OpenQuotas("/proc"); !errors.Is(err, ErrNoQuotas) {
		t.Errorf("got %v", err)
	}
}

// mounted mounts a new filesystem with project quotas. It skips the test if the kernel does not
// support them.
func mounted(t *testing.T, mkfs ...string) string {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root")
	}
	image, dir := filepath.Join(t.TempDir(), "image"), t.TempDir()
	testutil.Must(t, errors.Join(os.WriteFile(image, nil, 0o600), os.Truncate(image, 320<<20)))
	if out, err := exec.Command(mkfs[0], append(mkfs[1:], image)...).CombinedOutput(); err != nil {
		t.Skipf("%s: %v, %s", mkfs[0], err, out)
	}
	if out, err := exec.Command("mount", "-o", "loop,prjquota", image, dir).CombinedOutput(); err != nil {
		t.Skipf("the kernel has no project quotas for it: %v, %s", err, out)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(dir, 0); err != nil {
			t.Error(err)
		}
	})
	return dir
}

func TestProjectLimitIsEnforced(t *testing.T) {
	for name, mkfs := range map[string][]string{
		"ext4": {"mkfs.ext4", "-q", "-O", "project,quota", "-E", "quotatype=prjquota"},
		"xfs":  {"mkfs.xfs", "-q"},
	} {
		t.Run(name, func(t *testing.T) {
			dir := mounted(t, mkfs...)
			f, err := OpenQuotas(dir)
			if errors.Is(err, ErrNoQuotas) {
				t.Skip(err) // the kernel mounts XFS without quotas if it lacks support for them
			}
			testutil.Must(t, err)
			defer f.Close()
			const id, limit = 1 << 30, 4 << 20
			layer, err := os.Open(mkdir(t, filepath.Join(dir, "layer")))
			testutil.Must(t, err)
			defer layer.Close()
			for range 2 { // a repeated call succeeds
				testutil.Must(t, errors.Join(AssignProject(layer, id), f.SetLimit(id, limit)))
			}
			below := mkdir(t, filepath.Join(dir, "layer", "sub"))
			var written int
			withoutResources(t, func() { written, err = fill(filepath.Join(below, "file")) })
			if !errors.Is(err, unix.ENOSPC) && !errors.Is(err, unix.EDQUOT) || written > limit {
				t.Errorf("%d bytes were written: %v", written, err)
			}
			if got, err := f.Usage(id); err != nil || got.Bytes < limit/2 || got.Bytes > limit || got.Inodes != 3 {
				t.Errorf("usage %+v, %v", got, err)
			}
			if got, err := f.Usage(id + 1); err != nil || got != (Usage{}) {
				t.Errorf("usage of another project %+v, %v", got, err)
			}
			testutil.Must(t, f.SetLimit(id, 0))
			if written, err := fill(filepath.Join(below, "another")); written < 2*limit {
				t.Errorf("%d bytes without a limit: %v", written, err)
			}
		})
	}
}

// withoutResources runs f without CAP_SYS_RESOURCE, because ext4 ignores limits for a process with
// it. The thread ends with f.
func withoutResources(t *testing.T, f func()) {
	t.Helper()
	done := make(chan error)
	go func() {
		runtime.LockOSThread()
		header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
		var data [2]unix.CapUserData
		err := unix.Capget(&header, &data[0])
		data[0].Effective &^= 1 << unix.CAP_SYS_RESOURCE
		if err = errors.Join(err, unix.Capset(&header, &data[0])); err == nil {
			f()
		}
		done <- err
	}()
	testutil.Must(t, <-done)
}

func mkdir(t *testing.T, dir string) string {
	t.Helper()
	testutil.Must(t, os.Mkdir(dir, 0o700))
	return dir
}

// fill writes up to 16 MiB.
func fill(path string) (written int, err error) {
	f, err := os.Create(path)
	if err != nil {
		return 0, err
	}
	chunk := make([]byte, 64<<10)
	for err == nil && written < 16<<20 {
		var n int
		n, err = f.Write(chunk)
		written += n
	}
	return written, errors.Join(err, f.Close())
}
