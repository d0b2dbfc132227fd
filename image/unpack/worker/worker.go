// Package worker is the program berth-unpack, which unpacks one layer and ends, or decompresses
// spans of one blob (SpanArgs), or checks one seccomp profile (ProfileArgs).
//
// # Contract
//
// The daemon (package process) starts the program (package jail) with the layer's tree. It passes
// the blob on standard input and the other parameters as arguments. If the layer is to be packed,
// the tree is read-only, and the program gets two open files for the result. The program first
// confines itself and then reads the blob. It writes its answer with a Writer to standard output.
// Standard error is for fatal errors of Go's runtime. The daemon reads the answer with a Reader,
// which validates it.
package worker

import (
	"context"
	"fmt"
	"io"
	"os"
	"runtime/debug"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/opencontainers/go-digest"
	"golang.org/x/sys/unix"

	"berth/image/blobindex"
	"berth/image/unpack"
	"berth/image/unpack/inflate"
	"berth/image/unpack/tarsplit"
	"berth/internal/jail"
	"berth/internal/jail/early"
)

// Files of a layer, as indexes of jail.Command.Files.
const (
	Data   = iota // to pack: the file for the data
	Out           // to pack: the file for the tree
	Record        // the file for the record of the tar, if one is wanted
	Points        // the file for the points of the blob, if they are wanted
)

// inherited returns one of these files.
func inherited(file uintptr, name string) *os.File { return os.NewFile(jail.FilesFD+file, name) }

// Operations.
const (
	toUnpack = "unpack"
	toPack   = "pack"

	toInflate = "inflate"
	toCheck   = "check-profile"
)

const (
	// heapLimit is the upper bound of Go's memory limit for any layer.
	heapLimit = 256 << 20
	// heapBase is the heap of a process that keeps nothing of its layer and uses a zstd window of
	// usualWindow.
	heapBase    = 16 << 20
	usualWindow = 8 << 20
	// mostNames bounds the names that are kept of a layer that is not packed.
	mostNames = 64 << 20
	// collectAt is GOGC. The default would collect garbage every few megabytes.
	collectAt = 400
	// addresses is the size of the writable memory that Go's runtime and the C library map in
	// addition to the heap. Little of this memory is used.
	addresses = 128 << 20
	// memoryLimit is the upper bound of the kernel's memory limit for any layer.
	memoryLimit = 640 << 20
	// fileLimit allows a descriptor for each level of a directory that is removed, and a reserve.
	fileLimit = 4096
)

// progressPeriod is the interval of progress reports.
const progressPeriod = 200 * time.Millisecond

// Args returns the arguments for a job: unpack.Pack or unpack.Layer.
func Args(job unpack.Job, pack bool) []string {
	number := func(n int64) string { return strconv.FormatInt(n, 10) }
	what := toUnpack
	if pack {
		what = toPack
	}
	return []string{what, job.Algorithm.String(), number(job.Limits.Tar), number(job.Limits.Bytes),
		number(job.Limits.Entries), number(job.Limits.Memory), number(job.Limits.Window),
		strconv.FormatBool(job.Record != nil), strconv.FormatBool(job.Points != nil), number(job.Span),
		strconv.FormatBool(job.NoData)}
}

func parse(args []string) (job unpack.Job, pack bool, err error) {
	if len(args) != 11 {
		return job, false, fmt.Errorf("%d arguments", len(args))
	}
	switch args[0] {
	case toUnpack:
	case toPack:
		pack = true
	default:
		return job, false, fmt.Errorf("unknown operation %q", args[0])
	}
	if job.Algorithm = digest.Algorithm(args[1]); !job.Algorithm.Available() {
		return job, false, fmt.Errorf("digest %q", args[1])
	}
	for i, n := range []*int64{&job.Limits.Tar, &job.Limits.Bytes, &job.Limits.Entries, &job.Limits.Memory,
		&job.Limits.Window} {
		if *n, err = strconv.ParseInt(args[2+i], 10, 64); err != nil {
			return job, false, err
		}
	}
	if job.Record, err = optional(args[7], Record, "record"); err != nil {
		return job, false, err
	}
	if job.Points, err = optional(args[8], Points, "points"); err != nil {
		return job, false, err
	}
	if job.Span, err = strconv.ParseInt(args[9], 10, 64); err != nil {
		return job, false, err
	}
	job.NoData, err = strconv.ParseBool(args[10])
	return job, pack, err
}

// optional returns an inherited file if given says that there is one.
func optional(given string, file uintptr, name string) (*os.File, error) {
	ok, err := strconv.ParseBool(given)
	if err != nil || !ok {
		return nil, err
	}
	return inherited(file, name), nil
}

// CPULimit returns the limit of CPU time for a layer with the given limits. It is many times what
// the most expensive layer needs on the slowest machine. It is a second limit, for work that
// package unpack does not limit.
func CPULimit(l unpack.Limits) time.Duration {
	const (
		start    = 10 * time.Minute
		tarRate  = 4 << 20   // bytes of the tar a second
		fileRate = 256 << 20 // bytes of files a second; bytes beyond the tar are holes
		perEntry = time.Millisecond
	)
	seconds := l.Tar/tarRate + l.Bytes/fileRate
	return start + time.Duration(seconds)*time.Second + time.Duration(min(l.Entries, l.Tar/512))*perEntry
}

// Main returns the exit status. It is 0 if there was an answer, even if the answer is an error.
func Main() int { return jail.Main("berth-unpack", Version, run) }

// HeapFor returns Go's memory limit. It is the sum of the limit of the layer's data, half as much
// for garbage, and the zstd window, which causes no garbage.
func HeapFor(job unpack.Job, pack bool) int64 {
	limits := job.Limits.WithDefaults()
	if !pack {
		limits.Memory = min(limits.Memory, mostNames)
	}
	return min(heapLimit, heapBase+limits.Memory*3/2+max(0, limits.Window-usualWindow))
}

// MemoryFor returns the kernel's memory limit. It allows twice the heap, because Go's memory limit
// is soft.
func MemoryFor(job unpack.Job, pack bool) int64 {
	return min(memoryLimit, addresses+2*HeapFor(job, pack))
}

func run(args []string, tree *os.File) error {
	if len(args) > 0 && args[0] == toInflate {
		return runSpans(args, tree)
	}
	if len(args) > 0 && args[0] == toCheck {
		return runProfile(args, tree)
	}
	job, pack, err := parse(args)
	if err != nil {
		return err
	}
	debug.SetMemoryLimit(HeapFor(job, pack))
	debug.SetGCPercent(collectAt)
	// A single file is never larger than the limit of all files.
	grant := jail.Grant{
		Memory:   uint64(MemoryFor(job, pack)),
		FileSize: uint64(max(job.Limits.Bytes, tarsplit.MaxFile, blobindex.MaxEncoded)),
		Files:    fileLimit,
		CPU:      uint64(CPULimit(job.Limits).Seconds()),
	}
	layer := func(blob io.Reader) (unpack.Result, error) {
		return unpack.Layer(context.Background(), tree, blob, job)
	}
	if pack {
		data, out := inherited(Data, "data"), inherited(Out, "tree")
		grant.OnlyData = true
		grant.FileSize += uint64(min(job.Limits.Entries, job.Limits.Tar/512))*blockSize + treeSize
		layer = func(blob io.Reader) (unpack.Result, error) {
			return unpack.Pack(context.Background(), data, out, blob, job)
		}
	}
	if err := jail.Process(tree, grant, early.Done); err != nil {
		return err
	}
	blob, err := openBlob()
	if err != nil {
		return err
	}
	return answer(os.Stdout, &job, func() (unpack.Result, error) { return layer(blob) })
}

// pipe is the blob. It is an unpack.Aborter.
type pipe struct{ *os.File }

// openBlob opens standard input for Go's poller, so that a Read of it can be ended.
func openBlob() (pipe, error) {
	fd := unix.Stdin
	if err := unix.SetNonblock(fd, true); err != nil {
		return pipe{}, fmt.Errorf("open the blob: %w", err)
	}
	return pipe{os.NewFile(uintptr(fd), "blob")}, nil
}

// Abort implements unpack.Aborter.
func (p pipe) Abort() {
	_ = p.SetReadDeadline(time.Now()) // pipes support deadlines
}

const (
	blockSize = 4 << 10  // of a data file, in which each file fills its last block
	treeSize  = 64 << 20 // of a small tree
)

// answer unpacks the layer and writes the result or the error.
func answer(out io.Writer, job *unpack.Job, layer func() (unpack.Result, error)) error {
	var read, steps atomic.Int64
	job.Progress = func(n int) { read.Add(int64(n)); steps.Add(1) }
	w := NewWriter(out)
	w.Gunzip(inflate.Gunzip()) // in case the process dies before its result
	stop := report(w, &read, &steps)
	result, err := layer()
	if err := stop(); err != nil {
		return err
	}
	w.Gunzip(inflate.Gunzip())
	if err != nil {
		return w.Error(unpack.CodeOf(err), err.Error())
	}
	return w.Result(result)
}

// report reports progress until stop is called. Nothing is written after that.
func report(w *Writer, read, steps *atomic.Int64) (stop func() error) {
	quit := make(chan struct{})
	var failed error
	var done sync.WaitGroup
	done.Go(func() {
		tick := time.NewTicker(progressPeriod)
		defer tick.Stop()
		for told := int64(0); failed == nil; {
			select {
			case <-tick.C:
				if n := steps.Load(); n != told {
					told, failed = n, w.Progress(read.Load())
				}
			case <-quit:
				return
			}
		}
	})
	return func() error {
		close(quit)
		done.Wait()
		return failed
	}
}
