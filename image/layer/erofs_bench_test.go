package layer

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/opencontainers/go-digest"
	"golang.org/x/sys/unix"

	"berth/image/unpack"
	"berth/internal/rootfs"
	"berth/internal/testutil"
)

// cpu is the CPU time of the process.
func cpu(b *testing.B) (user, sys time.Duration) {
	var u syscall.Rusage
	testutil.Must(b, syscall.Getrusage(syscall.RUSAGE_SELF, &u))
	return time.Duration(u.Utime.Nano()), time.Duration(u.Stime.Nano())
}

// BenchmarkDrivers makes the layer of BenchmarkApply, removes it, and mounts it, with both drivers.
func BenchmarkDrivers(b *testing.B) {
	if testing.Short() {
		b.Skip("it writes the same layer many times")
	}
	data := benchTar(b, 10_000)
	id := digest.FromBytes(data)
	for _, d := range []Driver{NewDirectory(unpack.Layer), NewEROFS(unpack.Pack, 0)} {
		open := func(b *testing.B) *Store {
			s, err := Open(filepath.Join(testutil.DiskDir(b), "store"), d, Reserve{}, nil, discardLog())
			testutil.Must(b, err)
			b.Cleanup(func() { testutil.Must(b, s.Close()) })
			return s
		}
		b.Run("apply/"+string(d.Kind()), func(b *testing.B) {
			b.SetBytes(int64(len(data)))
			dir := testutil.DiskDir(b)
			user, sys := cpu(b)
			for b.Loop() {
				tmp, err := os.MkdirTemp(dir, "")
				testutil.Must(b, err)
				_, err = d.Apply(context.Background(), tmp, bytes.NewReader(data), unpack.Job{Algorithm: digest.SHA256})
				testutil.Must(b, err)
			}
			user2, sys2 := cpu(b)
			b.ReportMetric(float64((user2-user).Microseconds())/1000/float64(b.N), "user-ms/op")
			b.ReportMetric(float64((sys2-sys).Microseconds())/1000/float64(b.N), "sys-ms/op")
		})
		b.Run("remove/"+string(d.Kind()), func(b *testing.B) {
			dir := testutil.DiskDir(b)
			for b.Loop() {
				b.StopTimer()
				tmp, err := os.MkdirTemp(dir, "")
				testutil.Must(b, err)
				_, err = d.Apply(context.Background(), tmp, bytes.NewReader(data), unpack.Job{Algorithm: digest.SHA256})
				testutil.Must(b, err)
				b.StartTimer()
				testutil.Must(b, d.Remove(context.Background(), tmp))
			}
		})
		s := open(b)
		testutil.Must(b, s.Create(context.Background(), Source{DiffID: id}, bytes.NewReader(data), unpack.Limits{}))
		b.Run("stack/"+string(d.Kind()), func(b *testing.B) {
			for b.Loop() {
				_, err := s.Stack(context.Background(), []digest.Digest{id})
				testutil.Must(b, err)
				b.StopTimer()
				testutil.Must(b, s.removeJoins(id))
				b.StartTimer()
			}
		})
		b.Run("mount/"+string(d.Kind()), func(b *testing.B) {
			layers, err := s.Stack(context.Background(), []digest.Digest{id})
			testutil.Must(b, err)
			dir := testutil.DiskDir(b)
			spec := rootfs.Spec{Layers: layers, Upper: dir + "/upper", Work: dir + "/work"}
			testutil.Must(b, spec.MakeUpper())
			testutil.Must(b, os.Mkdir(dir+"/root", 0o700))
			for b.Loop() {
				testutil.Must(b, spec.MountAt(dir+"/root"))
				b.StopTimer()
				testutil.Must(b, unix.Unmount(dir+"/root", 0))
				b.StartTimer()
			}
		})
	}
}

// BenchmarkRead reads all files of a layer through an overlay, as a container does, with both
// drivers. It runs with a warm page cache and with a cold one, as far as a process can drop it.
func BenchmarkRead(b *testing.B) {
	if testing.Short() {
		b.Skip("it reads 128 MiB and 10,000 files, four times each")
	}
	data := append(benchTar(b, 10_000), 0)
	large := makeTar(b, file("large", strings.Repeat("0123456789abcdef", 8<<20)))
	for name, data := range map[string][]byte{"small": data, "large": large} {
		id := digest.FromBytes(data)
		for _, d := range []Driver{NewDirectory(unpack.Layer), NewEROFS(unpack.Pack, 0)} {
			root := filepath.Join(testutil.DiskDir(b), "store")
			open := func() *Store {
				s, err := Open(root, d, Reserve{}, nil, discardLog())
				testutil.Must(b, err)
				return s
			}
			s := open()
			testutil.Must(b, s.Create(context.Background(), Source{DiffID: id}, bytes.NewReader(data), unpack.Limits{}))
			for _, cold := range []bool{false, true} {
				b.Run(fmt.Sprintf("%s/%s/cold=%t", name, d.Kind(), cold), func(b *testing.B) {
					b.SetBytes(int64(len(data)))
					user, sys := cpu(b)
					for b.Loop() {
						b.StopTimer()
						if cold {
							testutil.Must(b, s.Close()) // unmounting drops the page cache
							forget(b, root)
							s = open()
						}
						layers, err := s.Stack(context.Background(), []digest.Digest{id})
						testutil.Must(b, err)
						dir := testutil.DiskDir(b)
						spec := rootfs.Spec{Layers: layers, Upper: dir + "/upper", Work: dir + "/work"}
						testutil.Must(b, spec.MakeUpper())
						testutil.Must(b, os.Mkdir(dir+"/root", 0o700))
						testutil.Must(b, spec.MountAt(dir+"/root"))
						b.StartTimer()
						readAll(b, dir+"/root")
						b.StopTimer()
						testutil.Must(b, unmount(dir+"/root"))
						b.StartTimer()
					}
					user2, sys2 := cpu(b)
					b.ReportMetric(float64((user2-user+sys2-sys).Microseconds())/1000/float64(b.N), "cpu-ms/op")
				})
			}
			testutil.Must(b, s.Close())
		}
	}
}

func readAll(b *testing.B, root string) {
	buf := make([]byte, 128<<10)
	testutil.Must(b, filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil || !d.Type().IsRegular() {
			return err
		}
		f, err := os.Open(path)
		if err != nil {
			return err
		}
		defer f.Close()
		_, err = io.CopyBuffer(struct{ io.Writer }{io.Discard}, struct{ io.Reader }{f}, buf)
		return err
	}))
}

// forget drops the kernel's page cache of files.
func forget(b *testing.B, root string) {
	testutil.Must(b, filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil || !d.Type().IsRegular() {
			return err
		}
		f, err := os.Open(path)
		if err != nil {
			return err
		}
		defer f.Close()
		return errors.Join(f.Sync(), unix.Fadvise(int(f.Fd()), 0, 0, unix.FADV_DONTNEED))
	}))
}
