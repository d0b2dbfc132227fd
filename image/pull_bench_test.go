package image

import (
	"bufio"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"berth/image/layer"
	"berth/image/unpack/process"
	"berth/internal/rootfs"
	"berth/internal/testutil"
)

// BenchmarkPull pulls the image of fixture.PullImage, eight layers of 628 MB, from a registry
// process on loopback, and removes it. TMPDIR decides on which filesystem the layers are.
//
//	cpu-s/op    CPU time of this process and its berth-unpacks for a pull
//	disk-MB     disk usage of the layers
//	deleted-ms  time until that is free again
//	rss-MB      peak memory of this process
func BenchmarkPull(b *testing.B) {
	if testing.Short() {
		b.Skip("it builds programs, and writes gigabytes")
	}
	dir := b.TempDir()
	images := startRegistry(b, dir)
	for _, build := range []struct{ name, env, tags string }{{"isal", "CGO_ENABLED=1", "isal"}, {"go", "CGO_ENABLED=0", ""}} {
		path := filepath.Join(dir, "berth-unpack-"+build.name)
		compile(b, path, build.env, build.tags, "berth/cmd/berth-unpack")
		for _, codec := range []string{"gzip", "zstd"} {
			for _, driver := range []rootfs.Kind{rootfs.Directory, rootfs.EROFS} {
				b.Run(codec+"/"+build.name+"/"+string(driver), func(b *testing.B) { pullAndRemove(b, path, images[codec], driver) })
			}
		}
	}
}

// compile builds a program.
func compile(b testing.TB, path, env, tags, pkg string) {
	b.Helper()
	cmd := exec.Command("go", "build", "-tags", tags, "-o", path, pkg)
	cmd.Env = append(os.Environ(), env)
	if out, err := cmd.CombinedOutput(); err != nil {
		b.Fatalf("build %s: %v\n%s", pkg, err, out)
	}
}

// startRegistry returns the images' names by their compression. The registry ends with the benchmark.
func startRegistry(b *testing.B, dir string) map[string]string {
	b.Helper()
	path := filepath.Join(dir, "registry")
	compile(b, path, "CGO_ENABLED=0", "", "berth/integration/demoregistry")
	cmd := exec.Command(path, "-pull")
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	if err != nil {
		b.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		b.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() {
		in.Close()
		if err := cmd.Wait(); err != nil {
			b.Error(err)
		}
	})
	images := map[string]string{}
	for lines := bufio.NewScanner(out); len(images) < 3 && lines.Scan(); {
		name := lines.Text()
		_, kind, _ := strings.Cut(strings.TrimSuffix(name, ":latest"), "/bench/pull-")
		images[kind] = name
	}
	return images
}

func pullAndRemove(b *testing.B, unpacker, ref string, driver rootfs.Kind) {
	log := slog.New(slog.NewTextHandler(io.Discard, nil))
	p, err := process.Open(unpacker, time.Minute, log)
	if err != nil {
		b.Fatal(err)
	}
	defer p.Close()
	s, err := Open(b.Context(), Config{Root: testutil.DiskDir(b), Unpack: layer.Unpacker(p.Unpack), Pack: layer.Packer(p.Pack), Driver: string(driver)}, log)
	if err != nil {
		b.Fatal(err)
	}
	defer s.Close()
	if err := s.CollectGarbage(b.Context()); err != nil {
		b.Fatal(err)
	}
	var cpu, removal, deletion time.Duration
	var disk uint64
	for b.Loop() {
		before := cpuTime(b)
		if _, err := s.Pull(b.Context(), ref, nil); err != nil {
			b.Fatal(err)
		}
		b.StopTimer()
		cpu += cpuTime(b) - before
		disk = s.layers.Usage().Bytes
		began := time.Now()
		if err := s.Remove(b.Context(), ref); err != nil {
			b.Fatal(err)
		}
		removal += time.Since(began)
		waitDeleted(b, s)
		deletion += time.Since(began)
		b.StartTimer()
	}
	b.ReportMetric(cpu.Seconds()/float64(b.N), "cpu-s/op")
	b.ReportMetric(float64(removal.Microseconds())/1e3/float64(b.N), "remove-ms/op")
	b.ReportMetric(float64(deletion.Microseconds())/1e3/float64(b.N), "deleted-ms/op")
	b.ReportMetric(float64(disk)/1e6, "disk-MB")
	b.ReportMetric(residentMB(b), "rss-MB")
}

// residentMB is the most memory that this process has had.
func residentMB(b *testing.B) float64 {
	b.Helper()
	var usage unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &usage); err != nil {
		b.Fatal(err)
	}
	return float64(usage.Maxrss) / 1e3
}

// waitDeleted waits until the files of removed layers are gone.
func waitDeleted(b *testing.B, s *Store) {
	b.Helper()
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(time.Millisecond) {
		if s.layers.Usage() == (layer.Usage{}) {
			return
		}
		if time.Now().After(deadline) {
			b.Fatalf("%+v are left", s.layers.Usage())
		}
	}
}

// cpuTime returns the CPU time of this process and of the children that it has waited for.
func cpuTime(b *testing.B) (sum time.Duration) {
	b.Helper()
	for _, who := range []int{unix.RUSAGE_SELF, unix.RUSAGE_CHILDREN} {
		var usage unix.Rusage
		if err := unix.Getrusage(who, &usage); err != nil {
			b.Fatal(err)
		}
		sum += time.Duration(usage.Utime.Nano() + usage.Stime.Nano())
	}
	return sum
}
