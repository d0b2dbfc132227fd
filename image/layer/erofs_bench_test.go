package layer

import (
	"bytes"
	"context"
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/opencontainers/go-digest"
	"golang.org/x/sys/unix"

	"berth/image/unpack"
	"berth/internal/rootfs"
	"berth/internal/rootfs/mounttest"
)

// cpu is the CPU time of the process.
func cpu(b *testing.B) (user, sys time.Duration) {
	var u syscall.Rusage
	must(b, syscall.Getrusage(syscall.RUSAGE_SELF, &u))
	return time.Duration(u.Utime.Nano()), time.Duration(u.Stime.Nano())
}

// BenchmarkDrivers makes the layer of BenchmarkApply, removes it, and mounts it, with both drivers.
func BenchmarkDrivers(b *testing.B) {
	data := benchTar(b, 10_000)
	id := digest.FromBytes(data)
	for _, d := range []Driver{NewDirectory(unpack.Layer), NewEROFS(unpack.Pack)} {
		open := func(b *testing.B) *Store {
			s, err := Open(filepath.Join(mounttest.DiskDir(b), "store"), d, Reserve{}, discardLog())
			must(b, err)
			b.Cleanup(func() { must(b, s.Close()) })
			return s
		}
		b.Run("apply/"+string(d.Kind()), func(b *testing.B) {
			b.SetBytes(int64(len(data)))
			dir := mounttest.DiskDir(b)
			user, sys := cpu(b)
			for b.Loop() {
				tmp, err := os.MkdirTemp(dir, "")
				must(b, err)
				_, err = d.Apply(context.Background(), tmp, bytes.NewReader(data), unpack.Job{Algorithm: digest.SHA256})
				must(b, err)
			}
			user2, sys2 := cpu(b)
			b.ReportMetric(float64((user2-user).Microseconds())/1000/float64(b.N), "user-ms/op")
			b.ReportMetric(float64((sys2-sys).Microseconds())/1000/float64(b.N), "sys-ms/op")
		})
		b.Run("remove/"+string(d.Kind()), func(b *testing.B) {
			dir := mounttest.DiskDir(b)
			for b.Loop() {
				b.StopTimer()
				tmp, err := os.MkdirTemp(dir, "")
				must(b, err)
				_, err = d.Apply(context.Background(), tmp, bytes.NewReader(data), unpack.Job{Algorithm: digest.SHA256})
				must(b, err)
				b.StartTimer()
				must(b, d.Remove(context.Background(), tmp))
			}
		})
		s := open(b)
		must(b, s.Create(context.Background(), Source{DiffID: id}, bytes.NewReader(data), unpack.Limits{}))
		b.Run("stack/"+string(d.Kind()), func(b *testing.B) {
			for b.Loop() {
				_, err := s.Stack(context.Background(), []digest.Digest{id})
				must(b, err)
				b.StopTimer()
				must(b, s.removeJoins(id))
				b.StartTimer()
			}
		})
		b.Run("mount/"+string(d.Kind()), func(b *testing.B) {
			layers, err := s.Stack(context.Background(), []digest.Digest{id})
			must(b, err)
			dir := mounttest.DiskDir(b)
			spec := rootfs.Spec{Layers: layers, Upper: dir + "/upper", Work: dir + "/work"}
			must(b, spec.MakeUpper())
			must(b, os.Mkdir(dir+"/root", 0o700))
			for b.Loop() {
				must(b, spec.MountAt(dir+"/root"))
				b.StopTimer()
				must(b, unix.Unmount(dir+"/root", 0))
				b.StartTimer()
			}
		})
	}
}
