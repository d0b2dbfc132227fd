package image_test

import (
	"bufio"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"berth/image/layer"
	"berth/image/pull"
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

// startRegistry returns the images' names by their compression. The registry ends with the
// benchmark.
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

// BenchmarkPullWithIndexes pulls an image in gzip without and with indexes. They alternate, because
// a machine's speed changes. The metrics end in 0 without indexes, else in 1:
//
//	cpu-s-N     median CPU time of a pull and its indexes
//	pull-s-N    median time of a pull
//	index-kB-N  size of the indexes, without links to files of layers
func BenchmarkPullWithIndexes(b *testing.B) {
	dir := b.TempDir()
	images := startRegistry(b, dir)
	path := filepath.Join(dir, "berth-unpack")
	compile(b, path, "CGO_ENABLED=1", "isal", "berth/cmd/berth-unpack")
	log := slog.New(slog.NewTextHandler(io.Discard, nil))
	p, err := process.Open(path, time.Minute, log)
	testutil.Must(b, err)
	defer p.Close()
	var nodes [2]*node
	for i := range nodes {
		nodes[i], err = open(b.Context(), pull.Config{Root: testutil.DiskDir(b), Unpack: p.Unpack, Pack: p.Pack,
			Driver: string(rootfs.EROFS), IndexBytes: int64(i) * 256 << 20}, log)
		testutil.Must(b, err)
		defer nodes[i].Close()
		testutil.Must(b, nodes[i].CollectGarbage(b.Context()))
	}
	var cpu, wall [2][]float64
	var size [2]int64
	for b.Loop() {
		for i, s := range nodes {
			before, began := cpuTime(b), time.Now()
			if _, err := s.Pull(b.Context(), images["gzip"], nil); err != nil {
				b.Fatal(err)
			}
			wall[i] = append(wall[i], time.Since(began).Seconds())
			for s.Lazy().Indexing() > 0 {
				time.Sleep(time.Millisecond)
			}
			cpu[i] = append(cpu[i], (cpuTime(b) - before).Seconds())
			size[i] = encodedBytes(b, filepath.Join(s.cfg.Root, "indexes"))
			if _, err := s.DropIndexes(); err != nil {
				b.Fatal(err)
			}
			testutil.Must(b, s.Remove(b.Context(), images["gzip"]))
			waitDeleted(b, s)
		}
	}
	for i := range nodes {
		b.ReportMetric(median(cpu[i]), fmt.Sprintf("cpu-s-%d", i))
		b.ReportMetric(median(wall[i]), fmt.Sprintf("pull-s-%d", i))
		b.ReportMetric(float64(size[i])/1e3, fmt.Sprintf("index-kB-%d", i))
	}
}

// encodedBytes returns the size of the indexes in a directory, without links.
func encodedBytes(b *testing.B, dir string) (sum int64) {
	b.Helper()
	paths, err := filepath.Glob(filepath.Join(dir, "*", "index"))
	testutil.Must(b, err)
	for _, path := range paths {
		info, err := os.Stat(path)
		testutil.Must(b, err)
		sum += info.Size()
	}
	return sum
}

func median(list []float64) float64 {
	list = slices.Sorted(slices.Values(list))
	return list[len(list)/2]
}

func pullAndRemove(b *testing.B, unpacker, ref string, driver rootfs.Kind) {
	log := slog.New(slog.NewTextHandler(io.Discard, nil))
	p, err := process.Open(unpacker, time.Minute, log)
	if err != nil {
		b.Fatal(err)
	}
	defer p.Close()
	s, err := open(b.Context(), pull.Config{Root: testutil.DiskDir(b), Unpack: layer.Unpacker(p.Unpack), Pack: layer.Packer(p.Pack), Driver: string(driver)}, log)
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
		disk = s.LayerUsage().Bytes
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
func waitDeleted(b *testing.B, s *node) {
	b.Helper()
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(time.Millisecond) {
		if s.LayerUsage() == (layer.Usage{}) {
			return
		}
		if time.Now().After(deadline) {
			b.Fatalf("%+v are left", s.LayerUsage())
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
