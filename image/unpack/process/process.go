// Package process runs berth-unpack to unpack layers, with one process for each layer. The process
// can access only the layer's directory (package jail), and ends with the work.
//
// # Contract
//
// The daemon reads the blob from the network and passes it on. It gets only validated results of
// the content, through a worker.Reader. If the process dies, is killed or stalls, the layer fails
// with Unavailable, because a retry may succeed. If it violates the protocol, the layer fails with
// Internal. When Unpack returns, the process has ended.
//
// The result may be false. A blob could compromise the process through a bug in Go's runtime or in
// the decompressors. They are memory-safe, except for zstd's assembly and ISA-L. Such a process can
// report anything about the tar and leave anything in the tree. So the caller must use the result
// only for images that name the same blob.
//
// The package is the daemon's side of a process boundary. It is separate from unpack and worker,
// which are linked into berth-unpack and must not import gRPC.
package process

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"runtime"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"

	"berth/image/unpack"
	"berth/image/unpack/worker"
	"berth/internal/errdefs"
	"berth/internal/failpoint"
	"berth/internal/jail"
	"berth/internal/task"
)

// Program is the program berth-unpack.
type Program struct {
	exe   *os.File // the program as it was when the daemon started, even if another version is installed meanwhile
	stall time.Duration
	most  func(unpack.Limits) time.Duration // worker.CPULimit
	log   *slog.Logger

	checking     chan struct{} // holds a token during CheckProfile
	unrestricted sync.Once     // logs once that mounts cannot be restricted
}

// Open opens the program at path. A process that takes no bytes and reports no progress for the
// duration stall is killed. The caller closes the program.
func Open(path string, stall time.Duration, log *slog.Logger) (*Program, error) {
	exe, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("berth-unpack: %w", err)
	}
	if !jail.FiltersCalls(runtime.GOARCH) {
		log.Warn("system calls of berth-unpack are not filtered on this architecture", "architecture", runtime.GOARCH)
	}
	return &Program{exe: exe, stall: stall, most: worker.CPULimit, log: log, checking: make(chan struct{}, 1)}, nil
}

// Close closes the program. Unpack must not run during or after Close.
func (p *Program) Close() error { return p.exe.Close() }

// Unpack is unpack.Layer in a separate process. It has further errors. It returns Unavailable if
// the process died or stalled, and FailedPrecondition if it used more CPU time than any layer can
// need. It returns Internal if the process could not be started or violated the protocol. It waits
// for the current Read of the blob. If a Read may take long, the blob must be an unpack.Stopper.
func (p *Program) Unpack(ctx context.Context, tree *os.File, blob io.Reader, job unpack.Job) (unpack.Result, error) {
	return p.do(ctx, tree, nil, blob, job)
}

// Pack is unpack.Pack in a separate process, see Unpack. The process can access no files except
// data and out.
func (p *Program) Pack(ctx context.Context, data, out *os.File, blob io.Reader, job unpack.Job) (unpack.Result, error) {
	dir, err := os.Open(filepath.Dir(data.Name()))
	if err != nil {
		return unpack.Result{}, errdefs.Internal("start berth-unpack: %w", err)
	}
	defer dir.Close() // read only
	return p.do(ctx, dir, []*os.File{worker.Data: data, worker.Out: out}, blob, job)
}

// do unpacks a layer into tree, or packs it into files.
func (p *Program) do(ctx context.Context, tree *os.File, files []*os.File, blob io.Reader,
	job unpack.Job) (unpack.Result, error) {
	job.Limits = job.Limits.WithDefaults()
	failpoint.Reach("unpack.start")
	more := []*os.File{worker.Record: job.Record, worker.Points: job.Points}
	copy(more, files)
	w, err := p.start(tree, files != nil, worker.Args(job, files != nil), more)
	if err != nil {
		return unpack.Result{}, errdefs.Internal("start berth-unpack: %w", err)
	}
	failpoint.Reach("unpack.started")
	ctx, cancel := context.WithCancelCause(ctx)
	stopKilling := context.AfterFunc(ctx, w.Kill)
	var helpers sync.WaitGroup
	helpers.Go(func() {
		if err := p.guard("pass on blob of", func() error { w.feed(blob, cancel); return nil }); err != nil {
			cancel(err)
		}
	})
	helpers.Go(func() {
		if w.standsStill(ctx, p.stall) {
			cancel(errdefs.Unavailable("berth-unpack has made no progress for %v", p.stall))
		}
	})
	var result unpack.Result
	err = p.guard("unpack", func() (err error) { result, err = w.answer(job.Limits, job.Progress); return err })
	failpoint.Reach("unpack.answered")
	stopKilling()
	end, said := w.End() // the process has nothing left to do, whatever its answer is
	if err != nil {
		result, err = unpack.Result{}, verdict(context.Cause(ctx), err, end, said, p.most(job.Limits))
	}
	cancel(nil)
	if s, ok := blob.(unpack.Stopper); ok {
		s.Stop() // no more input is needed
	}
	helpers.Wait()
	p.log.Debug("unpacked a layer", "digest", result.Digest, "error", err, "cpu", end.UserTime()+end.SystemTime(),
		"peakKiB", peak(end), "gunzip", w.gunzip)
	return result, err
}

// guard runs a part of the work. A panic fails the layer, not the daemon.
func (p *Program) guard(what string, part func() error) error {
	return task.Guard(p.log, what, "a layer", part)
}

// peak returns the maximum resident memory of a process, in KiB.
func peak(end *os.ProcessState) int64 {
	if usage, ok := end.SysUsage().(*syscall.Rusage); ok {
		return usage.Maxrss
	}
	return 0
}

// work is a process that unpacks a layer. The blob goes to its In. The answer comes from its Out.
type work struct {
	*jail.Worker

	gunzip string // its gzip implementation, once it has answered

	fed      atomic.Bool  // the whole blob has been passed on, without error
	awaiting atomic.Bool  // the work waits for the blob's Read
	steps    atomic.Int64 // counter of progress, without a unit
}

// start starts a process with the given files of a layer.
func (p *Program) start(tree *os.File, readOnly bool, args []string, files []*os.File) (*work, error) {
	mount, err := jail.Clone(tree)
	if err != nil {
		return nil, err
	}
	defer mount.Close() // read only
	attributes := uint64(0)
	if readOnly {
		attributes = unix.MOUNT_ATTR_RDONLY
	}
	if err := jail.Restrict(mount, attributes); errors.Is(err, unix.ENOSYS) { // Linux 5.12
		p.unrestricted.Do(func() {
			p.log.Warn("berth-unpack can open devices in layers: the kernel cannot restrict its mount", "error", err)
		})
	} else if err != nil {
		return nil, err
	}
	w, err := jail.Start(jail.Command{Name: "berth-unpack", Exe: p.exe, Version: worker.Version, Args: args,
		Tree: mount, Files: files})
	if err != nil {
		return nil, err
	}
	return &work{Worker: w}, nil
}

var feedPool = sync.Pool{New: func() any { return new([128 << 10]byte) }}

// feed passes the blob on. It records the blob's error before it closes the pipe, because the
// process will then report a truncated input. If the process stops reading the blob, its answer has
// the reason.
func (w *work) feed(blob io.Reader, failed func(error)) {
	defer w.In.Close() // a second Close is harmless
	buf := feedPool.Get().(*[128 << 10]byte)
	defer feedPool.Put(buf)
	for {
		w.awaiting.Store(true)
		n, err := blob.Read(buf[:])
		w.awaiting.Store(false)
		if _, refused := w.In.Write(buf[:n]); refused != nil {
			return
		}
		w.steps.Add(1)
		if err == io.EOF { //nolint:errorlint // a wrapped EOF is a failed transfer
			w.fed.Store(true)
			err = w.In.Close()
			if err == nil || errors.Is(err, os.ErrClosed) { // End has closed it: the answer is there
				return
			}
		}
		if err != nil {
			failed(err)
			return
		}
	}
}

// standsStill waits until the process makes no progress for the duration stall although it has
// input. It returns false if ctx is done before.
func (w *work) standsStill(ctx context.Context, stall time.Duration) bool {
	const looks = 10
	tick := time.NewTicker(max(stall/looks, time.Millisecond))
	defer tick.Stop()
	seen, quiet := int64(0), 0
	for quiet < looks {
		select {
		case <-ctx.Done():
			return false
		case <-tick.C:
		}
		quiet++
		if n := w.steps.Load(); n != seen || w.awaiting.Load() {
			seen, quiet = n, 0
		}
	}
	return true
}

// errHasty is the error if the process reports a result before the end of the blob.
var errHasty = errors.New("result before the end of the blob")

// answer reads the answer and rejects impossible results.
func (w *work) answer(limits unpack.Limits, progress func(n int)) (unpack.Result, error) {
	r := worker.NewReader(w.Out)
	result, err := r.Result(func(n int64) {
		w.steps.Add(1)
		if progress != nil {
			progress(int(n))
		}
	})
	w.gunzip = r.Gunzip()
	if err == nil && !w.fed.Load() {
		err = errHasty
	}
	if err == nil {
		err = result.Within(limits)
	}
	return result, err
}

// verdict returns the root cause: the reason for killing the process, its own error, or its exit
// status. The kernel kills a process that exceeds its CPU time.
func verdict(cause, answer error, end *os.ProcessState, said string, most time.Duration) error {
	const nearly = 0.5 // the limit counts ticks, and this time is exact, which matters for short times
	var refused *unpack.Error
	switch {
	case cause != nil:
		return cause
	case errors.As(answer, &refused):
		return errdefs.New(codes.Code(refused.Code.Status()), "%w", answer)
	case !errors.Is(answer, worker.ErrEnded):
		return errdefs.Internal("berth-unpack: %w", answer)
	case end.UserTime()+end.SystemTime() >= time.Duration(nearly*float64(most)):
		refused := fmt.Errorf("berth-unpack exceeded its CPU time limit of %v", most)
		return errdefs.FailedPrecondition("%w", &unpack.Error{Code: unpack.FailedPrecondition, Err: refused})
	}
	text := end.String()
	if said != "" {
		text += ": " + said
	}
	return errdefs.Unavailable("berth-unpack died: %s", text)
}
