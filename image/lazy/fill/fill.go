package fill

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"time"

	"golang.org/x/sync/semaphore"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"

	"berth/image/blobindex"
	"berth/image/tree"
	"berth/image/unpack/tarsplit"
	"berth/internal/errdefs"
	"berth/internal/failpoint"
	"berth/internal/task"
)

const (
	// maxRequest is the maximum size in bytes of one request for several spans. Two goroutines of a
	// layer send background requests, so that one receives while the other decompresses.
	maxRequest = 4 << 20
	// quiet is a time in which no access has waited. Then spans are filled that no access is
	// expected to need soon. Before, they would take bandwidth from the next access.
	quiet = 50 * time.Millisecond
)

// defaultProofs is the default of Config.Proofs. With the pauses between them it takes an hour.
const defaultProofs = 600

// maxMismatches is how often in a row a source may send wrong bytes before the layer is given up.
const maxMismatches = 4

// job is a range of adjacent spans to fill.
type job struct {
	first, last int
	mismatches  int // Layer.mismatches when it was taken
}

// kick starts goroutines if there is work for them. The caller holds mu.
func (l *Layer) kick() {
	if !l.e.started || l.complete || l.failed != nil {
		return
	}
	if _, ok := l.canHash(); ok {
		l.spawn(forHash, l.hashAhead)
	}
	if l.left == 0 {
		if l.runners[inBackground] == 0 && l.runners[forHash] == 0 {
			l.spawn(inBackground, l.finish)
		}
		return
	}
	if len(l.faults) > 0 {
		l.spawn(forFaults, func() { l.run(forFaults) })
	}
	for range maxRunners[inBackground] {
		l.spawn(inBackground, func() { l.run(inBackground) })
	}
}

// spawn starts a goroutine of a kind, unless there are enough. The caller holds mu.
func (l *Layer) spawn(kind int, f func()) {
	if l.runners[kind] >= maxRunners[kind] {
		return
	}
	l.runners[kind]++
	if !l.life.Spawn(f) {
		l.runners[kind]--
	}
}

// run fills spans until none is left for its kind of goroutine.
func (l *Layer) run(kind int) {
	for {
		j, wait, ok := l.take(kind)
		if !ok {
			return
		}
		if wait > 0 {
			l.sleep(wait) // take sees the layer's end
			continue
		}
		err := task.Guard(l.e.cfg.Log, "fill", l.name, func() error { return l.do(kind, j) })
		if failures := l.after(j, err); failures > 0 && !l.pause(failures) {
			// take notices that the layer ends.
			continue
		}
	}
}

// take returns the next job, or how long to wait for one. If there is none it ends the goroutine.
func (l *Layer) take(kind int) (j job, wait time.Duration, ok bool) {
	l.e.mu.Lock()
	defer l.e.mu.Unlock()
	if l.life.Context().Err() == nil && l.failed == nil {
		if j, wait, ok = l.nextJob(kind); ok {
			return j, wait, true
		}
	}
	l.runners[kind]--
	if kind == inBackground && l.left == 0 {
		l.kick()
	}
	return job{}, 0, false
}

// nextJob takes the next job of a kind, or returns how long to wait for it. The caller holds mu.
func (l *Layer) nextJob(kind int) (j job, wait time.Duration, ok bool) {
	if kind == forFaults {
		first, ok := l.nextOf(&l.faults, wanted)
		return l.jobFrom(first, ok, nil), 0, ok
	}
	for _, queue := range []*[]int{&l.ahead, &l.order} {
		if first, ok := l.nextOf(queue, idle); ok {
			return l.jobFrom(first, true, l.isExpected), 0, true
		}
	}
	first, ok := l.nextIdle()
	if wait = l.untilQuiet(); ok && wait > 0 {
		return job{}, wait, true
	}
	return l.jobFrom(first, ok, nil), 0, ok
}

// jobFrom makes a job of a span and of the following spans in the same state, as many as fit into
// one request. joins, if not nil, says which spans may be taken. If there is no span (ok is false),
// the job is empty.
func (l *Layer) jobFrom(first int, ok bool, joins func(int) bool) job {
	if !ok {
		return job{}
	}
	from := l.spans[first]
	j := job{first: first, last: first, mismatches: l.mismatches}
	l.spans[first] = fetching
	for i := first + 1; i < len(l.spans) && l.spans[i] == from && (joins == nil || joins(i)); i++ {
		if _, size := l.x.GridRange(first, i); size > maxRequest {
			break
		}
		l.spans[i] = fetching
		j.last = i
	}
	return j
}

// isExpected reports whether a reader is expected to need a span soon.
func (l *Layer) isExpected(i int) bool {
	return slices.Contains(l.ahead, i) || slices.Contains(l.order, i)
}

// nextOf returns the first span of a queue that is in a state.
func (l *Layer) nextOf(queue *[]int, state spanState) (int, bool) {
	for len(*queue) > 0 {
		i := (*queue)[0]
		*queue = (*queue)[1:]
		if l.spans[i] == state {
			return i, true
		}
	}
	return 0, false
}

// nextIdle returns the first span that nothing has asked for.
func (l *Layer) nextIdle() (int, bool) {
	for ; l.next < len(l.spans); l.next++ {
		if l.spans[l.next] == idle {
			return l.next, true
		}
	}
	return 0, false
}

// untilQuiet returns how long to wait before spans are filled that no access is expected to need
// soon.
func (l *Layer) untilQuiet() time.Duration {
	if len(l.waiting) > 0 {
		return quiet
	}
	return max(quiet-time.Since(l.waited), 0)
}

// after notes the outcome of a job. It returns how many attempts have failed in a row, 0 after a
// success or at the layer's end.
func (l *Layer) after(j job, err error) (failures int) {
	e := l.e
	e.mu.Lock()
	l.putBack(j)
	if err == nil || l.life.Context().Err() != nil {
		l.failures, l.mismatches = 0, 0
		e.mu.Unlock()
		return 0
	}
	e.counts.failures.Add(1)
	l.failures++
	failures = l.failures
	// Concurrent requests go to the same host, so their failures count once.
	if errors.Is(err, blobindex.ErrMismatch) && l.mismatches == j.mismatches {
		l.mismatches++
	}
	lost := errdefs.Code(err) == codes.DataLoss || l.mismatches >= maxMismatches
	e.mu.Unlock()
	if lost {
		l.giveUp(errdefs.New(codes.DataLoss, "fill layer %s: %w", l.name, err), false)
		return 0
	}
	e.cfg.Log.Info("filling a layer will be tried again", "layer", l.name, "failures", failures, "error", err)
	return failures
}

// putBack puts the unfilled spans of a job back into their queues. The caller holds mu.
func (l *Layer) putBack(j job) {
	for i := j.last; i >= j.first; i-- {
		switch {
		case l.spans[i] != fetching:
		case len(l.waiting[i]) > 0:
			l.spans[i] = wanted
			l.faults = slices.Insert(l.faults, 0, i)
		default:
			l.spans[i] = idle
			l.next = min(l.next, i)
		}
	}
	l.kick()
}

// do fetches, verifies, decompresses and writes the spans of a job.
func (l *Layer) do(kind int, j job) error {
	ctx := l.life.Context()
	release, err := l.e.reserve(ctx, kind, l.memory(j))
	if err != nil {
		return err
	}
	defer release()
	defer l.e.cfg.Waits.BeginOpen("fill", "layer "+l.name)()
	if err := l.e.cfg.Room(); err != nil {
		return fmt.Errorf("fill layer %s: %w", l.name, err)
	}
	in := gridReader{x: l.x}
	if err := in.open(ctx, l.source, j); err != nil {
		return errdefs.Unavailable("fetch spans %d to %d of %s: %w", j.first, j.last, l.x.Blob, err)
	}
	defer in.close()
	for i := j.first; i <= j.last; i++ {
		if err := l.fill(ctx, &in, i); err != nil {
			return fmt.Errorf("span %d of %s: %w", i, l.x.Blob, err)
		}
	}
	return nil
}

// memory returns the memory of a job: one span of the blob, extended to the grid, and one span of
// the tar.
func (l *Layer) memory(j job) (most int64) {
	for i := j.first; i <= j.last; i++ {
		_, in := l.x.GridRange(i, i)
		most = max(most, in+blobindex.Grid+l.x.Span(i).OutSize)
	}
	return most
}

// reserve waits for memory. Filling in the background leaves half of the memory for accesses.
func (e *Engine) reserve(ctx context.Context, kind int, bytes int64) (release func(), err error) {
	type part struct {
		of *semaphore.Weighted
		n  int64
	}
	parts := []part{{e.memory, min(bytes, e.cfg.Memory)}}
	if kind == inBackground {
		parts = []part{{e.turns, 1}, {e.background, min(bytes, e.cfg.Memory/2)}, {e.memory, min(bytes, e.cfg.Memory/2)}}
	}
	var held []part
	release = func() {
		for _, p := range held {
			p.of.Release(p.n)
		}
	}
	for _, p := range parts {
		if err := p.of.Acquire(ctx, p.n); err != nil {
			release()
			return nil, fmt.Errorf("wait for memory: %w", err)
		}
		held = append(held, p)
	}
	return release, nil
}

// fill fills one span and answers the accesses that it completes.
func (l *Layer) fill(ctx context.Context, in *gridReader, i int) error {
	s, raw, err := in.span(i)
	if err != nil {
		return err
	}
	tar, err := l.inflate(ctx, i, s, raw)
	if err != nil {
		in.rejectIf(err)
		return err
	}
	failpoint.Reach("lazy.fill")
	if l.blob != nil {
		_, err := l.blob.WriteAt(raw, s.In)
		failpoint.Reach("lazy.blob-kept")
		if err != nil {
			return fmt.Errorf("keep the blob: %w", err)
		}
	}
	err = l.contents.inTar(s.Out, s.OutSize, func(offset, data, size int64) error {
		return l.write(tar[offset-s.Out:][:size], data)
	})
	failpoint.Reach("lazy.span-filled")
	if err != nil {
		return fmt.Errorf("write data: %w", err)
	}
	l.filled(i, s)
	return nil
}

// decompress returns the bytes of the tar in a span, from its verified bytes of the blob.
func (l *Layer) decompress(ctx context.Context, s blobindex.Span, raw []byte) (tar []byte, err error) {
	tar = raw
	switch {
	case s.OutSize == 0: // after the tar's end, for example an empty gzip member
		return nil, nil
	case l.x.Kind != blobindex.None:
		tar, err = l.inflater.span(ctx, s.Point, raw, s.OutSize)
		if errdefs.Code(err) == codes.DataLoss {
			return nil, wrongIndex("%w", err)
		}
		if err != nil {
			return nil, err
		}
	}
	if int64(len(tar)) != s.OutSize {
		return nil, wrongIndex("decompressed to %d bytes, the index says %d", len(tar), s.OutSize)
	}
	return tar, nil
}

// inflate is decompress, and also verifies chunks that could not be verified before.
func (l *Layer) inflate(ctx context.Context, i int, s blobindex.Span, raw []byte) ([]byte, error) {
	tar, err := l.decompress(ctx, s, raw)
	if l.x.OfChunks() && !l.x.Sealed() && errors.Is(err, ErrWrongIndex) {
		return nil, fmt.Errorf("%w: %s", blobindex.ErrMismatch, err.Error()) // the registry may have sent wrong bytes
	}
	if err != nil {
		return nil, err
	}
	return tar, l.x.VerifySpan(i, tar)
}

// write writes a part of the content. At the end of a file it also writes the rest of the block, as
// unpacking does. A filesystem with smaller blocks would otherwise have a hole there, and the disk
// usage would differ from the record.
func (l *Layer) write(part []byte, at int64) error {
	if _, err := l.data.WriteAt(part, at); err != nil {
		return err
	}
	end := at + int64(len(part))
	if rest := -end & (tree.BlockSize - 1); rest > 0 && end+rest <= l.x.DataSize && l.contents.endsAt(end) {
		_, err := l.data.WriteAt(zeros[:rest], end)
		return err
	}
	return nil
}

// zeros is the content of blocks after the end of a file.
var zeros [tree.BlockSize]byte

// filled notes that a span is filled, and answers the accesses that need no other span.
func (l *Layer) filled(i int, s blobindex.Span) {
	e := l.e
	var ready []*waiter
	e.mu.Lock()
	l.spans[i] = filled
	l.left--
	l.filledIn += s.InSize
	l.dirty += max(s.OutSize, 1) // a span without content is recorded, too
	l.missing -= l.contentOf(i)
	for _, w := range l.waiting[i] {
		if w.missing--; w.missing == 0 {
			ready = append(ready, w)
			e.stalling.Remove(w.waits)
			w.waits = nil
		}
	}
	if len(ready) > 0 {
		l.waited = time.Now()
	}
	delete(l.waiting, i)
	e.mu.Unlock()
	e.counts.filled.Add(uint64(s.OutSize))
	for _, w := range ready {
		e.answer(w, allow)
	}
	signal(e.wakeSync)
}

// giveUp ends the filling of a layer whose index or data is wrong. If all is set, filled ranges are
// denied, too.
func (l *Layer) giveUp(reason error, all bool) {
	e := l.e
	e.mu.Lock()
	if l.failed != nil || l.complete {
		e.mu.Unlock()
		return
	}
	l.failed, l.denied = reason, all
	late := l.detachAll()
	close(l.done)
	e.mu.Unlock()
	e.cfg.Log.Error("layer cannot be completed; reading its missing content fails with EIO",
		"layer", l.name, "error", reason)
	e.denyAll(late)
}

// finish verifies a layer whose spans are all filled, and removes the mark.
func (l *Layer) finish() {
	ctx := l.life.Context()
	err := task.Guard(l.e.cfg.Log, "complete", l.name, func() error { return l.verify(ctx) })
	if err == nil {
		err = l.unmark()
	}
	if ctx.Err() != nil && err != nil {
		return // the next Engine does it again
	}
	if err != nil {
		l.giveUp(fmt.Errorf("complete layer %s: %w", l.name, err), true)
		return
	}
	if err := l.inflater.close(ctx); err != nil {
		l.e.cfg.Log.Warn("end the decompression of a layer", "layer", l.name, "error", err)
	}
	l.e.mu.Lock()
	defer l.e.mu.Unlock()
	if l.failed != nil { // the layer ended meanwhile, for example after a disk error
		return
	}
	l.complete = true
	close(l.done)
}

// verify syncs the data and compares the digest of the tar.
func (l *Layer) verify(ctx context.Context) error {
	if err := l.sync(ctx); err != nil {
		return err
	}
	if l.blob != nil {
		return l.verifyBlob(ctx)
	}
	h := l.tarHash
	if h == nil {
		var err error
		if h, err = l.openTarHash(ctx); err != nil {
			return err
		}
	}
	got, err := h.digest(l.x.DiffID.Algorithm())
	if err != nil {
		return errdefs.New(codes.DataLoss, "restore the tar: %w", err)
	}
	if got != l.x.DiffID {
		return wrongIndex("the tar has the digest %s, not %s", got, l.x.DiffID)
	}
	return nil
}

// proveIndex calls Prove until it knows the answer.
func (l *Layer) proveIndex(ctx context.Context, blob *io.SectionReader) error {
	defer l.e.cfg.Waits.BeginOpen("proof of an index", "layer "+l.name)()
	for failures := 1; ; failures++ {
		err := l.prove(ctx, blob)
		switch {
		case err == nil, errdefs.Code(err) == codes.DataLoss:
			return err
		case failures == l.e.cfg.Proofs:
			return errdefs.New(codes.DataLoss, "its index could not be proven in %d attempts: %w", failures, err)
		}
		l.e.cfg.Log.Warn("the index of a layer could not be proven; another attempt follows", "layer", l.name,
			"failures", failures, "error", err)
		if !l.pause(failures) {
			return context.Cause(ctx)
		}
	}
}

// content reads the content of a layer until a context ends.
type content struct {
	ctx  context.Context
	data io.ReaderAt
}

// ReadContent implements tarsplit.Content.
func (c content) ReadContent(at tarsplit.Ref, p []byte, offset int64) error {
	if c.ctx.Err() != nil {
		return context.Cause(c.ctx)
	}
	_, err := c.data.ReadAt(p, at.Offset+offset)
	return err
}

// unmark removes the mark from the data file, which is then the file of a complete layer. After a
// crash, the next Engine verifies the layer again, or the caller finds a complete layer.
func (l *Layer) unmark() error {
	failpoint.Reach("lazy.complete")
	err := unix.Fremovexattr(int(l.data.Fd()), incompleteXattr)
	if errors.Is(err, unix.ENODATA) {
		err = nil
	}
	if err == nil {
		err = l.data.Sync()
	}
	if err != nil {
		return fmt.Errorf("mark %s as complete: %w", l.data.Name(), err)
	}
	failpoint.Reach("lazy.unmark")
	err = l.e.group.unmark(l.data)
	failpoint.Reach("lazy.unmarked")
	return err
}
