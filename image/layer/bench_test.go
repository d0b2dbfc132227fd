package layer

import (
	"bytes"
	"context"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"

	"github.com/opencontainers/go-digest"

	"berth/image/unpack"
	"berth/internal/testutil"
)

// benchTar is like a layer of a distribution: many directories, small files, links.
func benchTar(b *testing.B, files int) []byte {
	r := rand.New(rand.NewPCG(1, 2))
	data := make([]byte, 256<<10)
	for i := range data {
		data[i] = byte(r.Uint32())
	}
	var list []header
	for i := range files {
		if i%20 == 0 {
			list = append(list, dir(fmt.Sprintf("usr/share/d%d", i/200), 0o755), dir(fmt.Sprintf("usr/share/d%d/e%d", i/200, i/20), 0o755))
		}
		size := r.IntN(16 << 10)
		if i%100 == 0 {
			size = len(data)
		}
		name := fmt.Sprintf("usr/share/d%d/e%d/file-%d", i/200, i/20, i)
		switch i % 25 {
		case 1:
			list = append(list, symlink(name, "file"))
		case 2:
			list = append(list, hardlink(name, fmt.Sprintf("usr/share/d%d/e%d/file-%d", (i-2)/200, (i-2)/20, i-2)))
		default:
			list = append(list, file(name, string(data[:size])))
		}
	}
	return makeTar(b, list...)
}

// BenchmarkCreate makes one layer, to the moment it is durable.
func BenchmarkCreate(b *testing.B) {
	data := benchTar(b, 10_000)
	b.SetBytes(int64(len(data)))
	b.ReportAllocs()
	id := digest.FromBytes(data)
	s := openStore(b, b.TempDir())
	for b.Loop() {
		testutil.Must(b, s.Create(context.Background(), Source{DiffID: id}, bytes.NewReader(data), unpack.Limits{}))
		b.StopTimer()
		testutil.Must(b, s.Remove(id))
		b.StartTimer()
	}
}

// BenchmarkApply leaves out hashing, sync and publication.
func BenchmarkApply(b *testing.B) {
	data := benchTar(b, 10_000)
	b.SetBytes(int64(len(data)))
	b.ReportAllocs()
	for b.Loop() {
		_, err := NewDirectory(unpack.Layer).Apply(context.Background(), b.TempDir(), bytes.NewReader(data), unpack.Job{Algorithm: digest.SHA256})
		testutil.Must(b, err)
	}
}

// BenchmarkCreateParallel makes the layers of an image, all at once.
func BenchmarkCreateParallel(b *testing.B) {
	var tars [][]byte
	size := 0
	for i := range 4 {
		tars = append(tars, append(benchTar(b, 2500), byte(i)))
		size += len(tars[i])
	}
	b.SetBytes(int64(size))
	s := openStore(b, b.TempDir())
	for b.Loop() {
		var wg sync.WaitGroup
		for _, data := range tars {
			wg.Go(func() {
				if err := s.Create(context.Background(), Source{DiffID: digest.FromBytes(data)}, bytes.NewReader(data), unpack.Limits{}); err != nil {
					b.Error(err)
				}
			})
		}
		wg.Wait()
		b.StopTimer()
		for _, data := range tars {
			testutil.Must(b, s.Remove(digest.FromBytes(data)))
		}
		b.StartTimer()
	}
}
