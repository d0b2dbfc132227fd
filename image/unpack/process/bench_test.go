package process

import (
	"archive/tar"
	"bytes"
	"context"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"berth/image/unpack"
)

// distribution is a gzipped tar like a layer of a distribution, of about that many bytes.
func distribution(b *testing.B, size int) []byte {
	b.Helper()
	r := rand.New(rand.NewPCG(1, 2))
	words := make([]string, 4096)
	for i := range words {
		word := make([]byte, 3+r.IntN(12))
		for j := range word {
			word[j] = byte(' ' + r.IntN(95))
		}
		words[i] = string(word)
	}
	var entries []entry
	for total := 0; total < size; {
		var text strings.Builder
		for n := r.IntN(64 << 10); text.Len() < n; {
			text.WriteString(words[r.IntN(len(words))])
		}
		entries = append(entries, file(fmt.Sprintf("usr/d%d/f%d", len(entries)/50, len(entries)), text.String()))
		if len(entries)%50 == 1 {
			entries = append(entries, special(tar.TypeDir, fmt.Sprintf("usr/d%d/", len(entries)/50), ""))
		}
		total += text.Len() + 1024
	}
	return gzipped(b, pack(b, entries...))
}

// BenchmarkUnpack compares unpacking in a process with unpacking in this one. Compare CPU times:
// elapsed time depends on the machine's other load.
func BenchmarkUnpack(b *testing.B) {
	if testing.Short() {
		b.Skip("it unpacks 200 MiB, by two ways")
	}
	blob := distribution(b, 200<<20)
	p := open(b, built, time.Minute)
	type unpacker = func(context.Context, *os.File, io.Reader, unpack.Job) (unpack.Result, error)
	for name, unpackIn := range map[string]unpacker{"library": unpack.Layer, "process": p.Unpack} {
		b.Run(name, func(b *testing.B) {
			b.SetBytes(int64(len(blob)))
			before := ownTime(b) + childrensTime(b)
			for b.Loop() {
				if _, err := unpackIn(b.Context(), tree(b), bytes.NewReader(blob), job); err != nil {
					b.Fatal(err)
				}
			}
			b.ReportMetric(float64((ownTime(b)+childrensTime(b)-before).Microseconds())/1e3/float64(b.N), "cpu-ms/op")
		})
	}
}

// ownTime is this process's CPU time.
func ownTime(b *testing.B) time.Duration { return cpuTime(b, unix.RUSAGE_SELF) }

// childrensTime is the CPU time of the processes that have been waited for.
func childrensTime(b *testing.B) time.Duration { return cpuTime(b, unix.RUSAGE_CHILDREN) }

func cpuTime(b *testing.B, who int) time.Duration {
	b.Helper()
	var usage unix.Rusage
	if err := unix.Getrusage(who, &usage); err != nil {
		b.Fatal(err)
	}
	return time.Duration(usage.Utime.Nano() + usage.Stime.Nano())
}

// BenchmarkStart measures the cost of a process, with an empty layer.
func BenchmarkStart(b *testing.B) {
	p := open(b, built, time.Minute)
	root := tree(b)
	before := childrensTime(b)
	for b.Loop() {
		if _, err := p.Unpack(b.Context(), root, bytes.NewReader(nil), job); err != nil {
			b.Fatal(err)
		}
	}
	b.ReportMetric(float64((childrensTime(b)-before).Microseconds())/1e3/float64(b.N), "child-cpu-ms/op")
}
