package image_test

import (
	"archive/tar"
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/klauspost/compress/zstd"
	"github.com/opencontainers/go-digest"
	"google.golang.org/grpc/codes"

	"berth/image/registry/registrytest"
	"berth/image/unpack/process"
	"berth/internal/errdefs"
	"berth/internal/rootfs"
)

const mib = 1 << 20

// Concurrent pulls of layers that need the maximum of memory keep their unpack processes within one
// budget, and all of them end. Layers that fit are pulled, if need be one by one. Others are
// refused. Small images are pulled meanwhile.
func TestHostileLayersStayWithinMemoryBudget(t *testing.T) {
	const (
		processes = 8
		work      = 64 * mib
		merging   = 2 * mib
		// The sum that cmd/berth uses: 16 MiB for each process and 1.5 times its retained data. On
		// top of it comes what Go takes outside its heap.
		budget = processes*16*mib + work*3/2 + processes*6*mib
	)
	program := filepath.Join(t.TempDir(), "berth-unpack")
	compile(t, program, "CGO_ENABLED=0", "", "berth/cmd/berth-unpack")
	for _, driver := range []rootfs.Kind{rootfs.Directory, rootfs.EROFS} {
		t.Run(string(driver), func(t *testing.T) {
			cfg := with(driversConfig(t), string(driver), nil)
			log := slog.New(slog.DiscardHandler)
			p, err := process.Open(program, time.Minute, log)
			if err != nil {
				t.Fatal(err)
			}
			cfg.Unpack, cfg.Pack, cfg.WorkMemory, cfg.MergeMemory, cfg.MaxUnpacking = p.Unpack, p.Pack, work, merging, processes
			reg := registrytest.New(t)
			images := hostileImages(reg, map[rootfs.Kind]int{rootfs.Directory: 2, rootfs.EROFS: 6}[driver]) // directories take time
			s := openStore(t, cfg)
			t.Cleanup(func() { p.Close() })
			peak := watchChildren(t)
			var pulls sync.WaitGroup
			for name, want := range images {
				pulls.Go(func() {
					ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
					defer cancel()
					_, err := s.Pull(ctx, reg.Host()+"/"+name+":v1", nil)
					if code := errdefs.Code(err); err == nil && want != codes.OK || err != nil && code != want {
						t.Errorf("%s: %v, want %s", name, err, want)
					}
				})
			}
			pulls.Wait()
			most := peak()
			t.Logf("processes took %d MiB, budget %d", most/mib, budget/mib)
			if most > budget {
				t.Errorf("processes took %d MiB, more than %d", most/mib, budget/mib)
			}
			if n := s.Budget().MemoryInUse(); n != 0 {
				t.Errorf("%d bytes did not come back", n)
			}
		})
	}
}

// hostileImages stores images in a registry and returns the expected code of each pull.
func hostileImages(reg *registrytest.Server, trees int) map[string]codes.Code {
	images := map[string]codes.Code{}
	put := func(name string, want codes.Code, l registrytest.Layer) {
		reg.PutImage(name, "v1", name, l)
		images[name] = want
	}
	for i := range 6 {
		put(fmt.Sprint("window-", i), codes.OK, windowLayer(i, 32*mib))
		put(fmt.Sprint("small-", i), codes.OK, namesLayer(fmt.Sprint("small", i), 100))
	}
	for i := range trees {
		put(fmt.Sprint("tree-", i), codes.FailedPrecondition, namesLayer(fmt.Sprint(i), 12_000))
	}
	put("window-huge", codes.FailedPrecondition, windowLayer(9, 128*mib))
	return images
}

// windowLayer is a zstd layer whose decoder has to keep so many bytes. n makes it another blob.
func windowLayer(n, window int) registrytest.Layer {
	var whole bytes.Buffer
	w := tar.NewWriter(&whole)
	random := rand.New(rand.NewPCG(uint64(n), 1))
	data := make([]byte, window+window/8)
	for i := range len(data) / 8 {
		binary.LittleEndian.PutUint64(data[8*i:], random.Uint64()&0x0303030303030303)
	}
	_ = w.WriteHeader(&tar.Header{Name: "f", Size: int64(len(data)), Mode: 0o644})
	_, _ = w.Write(data)
	_ = w.Close()
	content := whole.Bytes()
	var blob bytes.Buffer
	z, _ := zstd.NewWriter(&blob, zstd.WithWindowSize(window), zstd.WithEncoderLevel(zstd.SpeedFastest), zstd.WithEncoderConcurrency(1))
	for chunk := range slices.Chunk(content, mib) { // the encoder does not know how much comes: it writes the window
		_, _ = z.Write(chunk)
	}
	_ = z.Close()
	return registrytest.Layer{Blob: blob.Bytes(), MediaType: "application/vnd.oci.image.layer.v1.tar+zstd", DiffID: digest.FromBytes(content)}
}

// namesLayer is a layer with so many directories, which are kept in memory until its end.
func namesLayer(prefix string, n int) registrytest.Layer {
	var blob bytes.Buffer
	z, _ := zstd.NewWriter(&blob, zstd.WithWindowSize(mib), zstd.WithEncoderConcurrency(1))
	sum := digest.SHA256.Digester()
	w := tar.NewWriter(io.MultiWriter(z, sum.Hash()))
	for i := range n {
		_ = w.WriteHeader(&tar.Header{Typeflag: tar.TypeDir, Name: fmt.Sprintf("%s/%d/%s%d", prefix, i%100, strings.Repeat("n", 200), i), Mode: 0o755})
	}
	_ = w.Close()
	_ = z.Close()
	return registrytest.Layer{Blob: blob.Bytes(), MediaType: "application/vnd.oci.image.layer.v1.tar+zstd", DiffID: sum.Digest()}
}

// watchChildren adds up the memory of this process's children again and again. peak ends that and
// returns the largest sum.
func watchChildren(t *testing.T) (peak func() int64) {
	own, err := os.ReadFile("/proc/self/comm")
	if err != nil {
		t.Fatal(err)
	}
	var most int64
	quit := make(chan struct{})
	var watching sync.WaitGroup
	watching.Go(func() {
		tick := time.NewTicker(2 * time.Millisecond)
		defer tick.Stop()
		for {
			select {
			case <-quit:
				return
			case <-tick.C:
				most = max(most, childrenMemory(string(own)))
			}
		}
	})
	return func() int64 {
		close(quit)
		watching.Wait()
		return most
	}
}

// childrenMemory is the anonymous memory of all children that have executed a program: others show
// this process's.
func childrenMemory(own string) (sum int64) {
	lists, _ := filepath.Glob("/proc/self/task/*/children")
	for _, list := range lists {
		pids, _ := os.ReadFile(list)
		for _, pid := range strings.Fields(string(pids)) {
			comm, err := os.ReadFile("/proc/" + pid + "/comm")
			if err != nil || string(comm) == own {
				continue
			}
			status, _ := os.ReadFile("/proc/" + pid + "/status") // empty: it has ended
			for line := range strings.Lines(string(status)) {
				var kib int64
				if n, _ := fmt.Sscanf(line, "RssAnon: %d", &kib); n == 1 {
					sum += kib << 10
				}
			}
		}
	}
	return sum
}
