package fill

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"

	"berth/image/blobindex"
	"berth/internal/cleanup"
	"berth/internal/errdefs"
	"berth/internal/failpoint"
	"berth/internal/lograte"
	"berth/internal/task"
)

// Files in the directory of an incomplete layer. Every EROFS layer has the first two.
const (
	DataFile   = "data"
	RecordFile = "tar"
	FilledFile = "filled"
	// BlobFile has the fetched bytes of the blob, if the index is an index of chunks.
	BlobFile = "blob"
)

// incompleteXattr is on the data file of an incomplete layer.
const incompleteXattr = "trusted.berth.incomplete"

// isIncomplete reports whether an open file is the data file of an incomplete layer.
func isIncomplete(fd int) (bool, error) {
	_, err := unix.Fgetxattr(fd, incompleteXattr, nil)
	if errors.Is(err, unix.ENODATA) {
		return false, nil
	}
	return err == nil, err
}

// Prepare creates the files of an incomplete layer in a directory: the sparse data file,
// FilledFile, and BlobFile for an index of chunks. It does not sync. The caller writes the other
// files.
func Prepare(dir string, x *blobindex.Index) (err error) {
	failpoint.Reach("lazy.make-data")
	data, err := os.OpenFile(filepath.Join(dir, DataFile), os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	failpoint.Reach("lazy.data-made")
	defer func() { err = errors.Join(err, data.Close()) }()
	if err := data.Truncate(x.DataSize); err != nil {
		return err
	}
	if err := markIncomplete(data); err != nil {
		return err
	}
	failpoint.Reach("lazy.make-filled")
	filled, err := os.OpenFile(filepath.Join(dir, FilledFile), os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	failpoint.Reach("lazy.filled-made")
	if err := filled.Close(); err != nil || !x.OfChunks() {
		return err
	}
	blob, err := os.OpenFile(filepath.Join(dir, BlobFile), os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	failpoint.Reach("lazy.blob-made")
	if err != nil {
		return err
	}
	return blob.Close()
}

func markIncomplete(data *os.File) error {
	failpoint.Reach("lazy.mark-incomplete")
	err := unix.Fsetxattr(int(data.Fd()), incompleteXattr, []byte("1"), 0)
	failpoint.Reach("lazy.marked-incomplete")
	if err != nil {
		return fmt.Errorf("mark %s as incomplete: %w", data.Name(), err)
	}
	return nil
}

// spanState is the state of a span.
type spanState uint8

const (
	idle     spanState = iota
	wanted             // in Layer.faults
	fetching           // a goroutine fetches it
	filled             // its data is in the data file, but perhaps not on stable storage
)

// Kinds of goroutines of a layer, and how many of each it may have.
const (
	forFaults = iota
	inBackground
	forHash
	kinds
)

var maxRunners = [kinds]int{forFaults: 2, inBackground: 2, forHash: 1}

// Layer is a layer that the Engine fills.
type Layer struct {
	e      *Engine
	name   string
	x      *blobindex.Index // without Tree and Record
	source Source
	life   *task.Lifetime

	contents extents
	data     *os.File // its accesses raise no events
	record   *os.File
	bits     *os.File
	blob     *os.File // of an index of chunks
	inode    uint64

	inflater  inflater
	prove     Prove     // of an index of chunks
	syncing   task.Lock // guards lost; held while spans are recorded
	lost      error     // the first sync of the data that failed
	tarHash   *tarHash  // nil: none; used by the goroutines of the kind forHash, and then by finish
	done      chan struct{}
	warnStall lograte.Limiter

	// The Engine's mu guards these.
	spans      []spanState
	waiting    map[int][]*waiter // by span
	faults     []int             // spans in the state wanted, oldest first
	ahead      []int             // read-ahead: spans that are filled first in the background
	order      []int             // spans that are filled next: the hints of Prefer
	next       int               // after these, all spans from this one on are filled
	left       int               // spans that are not filled
	filledIn   int64             // number of blob bytes in filled spans
	missing    int64             // number of content bytes in unfilled spans
	dirty      int64             // number of bytes that are filled but not recorded
	runners    [kinds]int
	waited     time.Time // when an access last had to wait no longer
	stalled    time.Time // when an access was last denied because it had waited for too long
	refused    uint64    // accesses that failed
	lastRefuse time.Time // the last of these denials
	failures   int       // failed attempts since the last one that succeeded
	mismatches int       // of these, attempts that got wrong bytes
	faulted    []int     // spans in the order of their first access
	prefix     int       // the spans before this one are filled
	hashedTo   int64     // the tar before this offset is in tarHash
	hashFailed bool      // nothing is hashed before finish
	complete   bool
	failed     error // the layer cannot be filled; its missing ranges are denied
	denied     bool  // all ranges are denied, because filled ranges may be wrong, too
}

// Prove shows that an index of chunks is true of the layer's tar. It gets the blob, which has the
// right digest. All data is in the data file. The error is DataLoss if the index is false. After
// another error the Engine calls it again, at most Config.Proofs times.
type Prove func(ctx context.Context, blob *io.SectionReader) error

// Add makes the Engine fill the layer in a directory, which Prepare and the caller have written, or
// an earlier Engine has filled in part. The file RecordFile must be x.Record. x must not change;
// the Engine does not keep its Tree and Record. newInflater starts an Inflater; the Engine has at
// most one at a time for each layer. prove is not nil for an index of chunks only. Then the layer
// is complete after prove has returned nil. The directory may be renamed at any time.
//
// When Add has returned, the mark is set, and the data file may be mounted. The error is DataLoss
// if the index cannot belong to this layer. The caller then calls Refuse.
func (e *Engine) Add(dir string, x *blobindex.Index, source Source,
	newInflater func() (Inflater, error), prove Prove) (_ *Layer, err error) {
	undo := cleanup.New()
	defer undo.Run(&err)
	l := &Layer{e: e, name: x.Blob.String(), source: source, life: task.NewLifetime(), syncing: task.NewLock(),
		done: make(chan struct{}), waiting: map[int][]*waiter{}, inflater: inflater{make: newInflater, lock: task.NewLock()},
		prove: prove}
	if err := l.load(dir, x, undo); err != nil {
		return nil, fmt.Errorf("lazy layer %s: %w", l.name, err)
	}
	if err := e.register(l); err != nil {
		return nil, fmt.Errorf("lazy layer %s: %w", l.name, err)
	}
	undo.Release()
	e.mu.Lock()
	defer e.mu.Unlock()
	l.kick()
	return l, nil
}

// Refuse makes the Engine deny all accesses of a layer's data file, for an incomplete layer that
// cannot be loaded. It keeps nothing open, because an access of a marked file that has no Layer
// fails.
func (e *Engine) Refuse(dir string) (err error) {
	data, err := openUnwatched(filepath.Join(dir, DataFile))
	if err != nil {
		return fmt.Errorf("refuse lazy layer %s: %w", filepath.Base(dir), err)
	}
	defer func() { err = errors.Join(err, data.Close()) }()
	// It is missing if an earlier Engine ended while it completed the layer.
	if err := markIncomplete(data); err != nil {
		return err
	}
	return e.group.mark(data)
}

// load opens the files and reads what is filled.
func (l *Layer) load(dir string, x *blobindex.Index, undo *cleanup.List) (err error) {
	if x.OfChunks() != (l.prove != nil) {
		return errdefs.New(codes.DataLoss, "an index of chunks without a proof, or another one with it")
	}
	if l.contents, err = extentsOf(x); err != nil {
		return wrongIndex("%w", err)
	}
	own := *x
	own.Tree, own.Record = nil, nil
	l.x = &own
	if err := l.openData(dir, undo); err != nil {
		return err
	}
	st, err := l.data.Stat()
	if err != nil {
		return err
	}
	if st.Size() != x.DataSize {
		return errdefs.New(codes.DataLoss, "the data file has %d bytes, its index says %d", st.Size(), x.DataSize)
	}
	if l.record, err = os.Open(filepath.Join(dir, RecordFile)); err != nil {
		return err
	}
	undo.Add("close record", l.record.Close)
	if l.bits, err = os.OpenFile(filepath.Join(dir, FilledFile), os.O_RDWR, 0); err != nil {
		return err
	}
	undo.Add("close bitmap", l.bits.Close)
	if x.OfChunks() {
		if l.blob, err = os.OpenFile(filepath.Join(dir, BlobFile), os.O_RDWR, 0); err != nil {
			return err
		}
		undo.Add("close blob", l.blob.Close)
	}
	has, err := readBitmap(l.bits, x.Spans())
	if err != nil {
		return err
	}
	l.setSpans(has)
	return nil
}

// openData opens the data file.
func (l *Layer) openData(dir string, undo *cleanup.List) (err error) {
	if l.data, err = openUnwatched(filepath.Join(dir, DataFile)); err != nil {
		return err
	}
	undo.Add("close data", l.data.Close)
	// It is missing if an earlier Engine ended while it completed the layer.
	if err := markIncomplete(l.data); err != nil {
		return err
	}
	var st unix.Stat_t
	if err := unix.Fstat(int(l.data.Fd()), &st); err != nil {
		return fmt.Errorf("stat data file: %w", err)
	}
	l.inode = st.Ino
	return nil
}

// setSpans sets which spans are filled. Empty spans are filled only if the blob is kept.
func (l *Layer) setSpans(has bitmap) {
	l.spans = make([]spanState, l.x.Spans())
	for i := range l.spans {
		content := l.contentOf(i)
		if (content > 0 || l.blob != nil) && !has.has(i) {
			l.left++
			l.missing += content
			continue
		}
		l.spans[i] = filled
		l.filledIn += l.x.Span(i).InSize
	}
}

// contentOf returns how many bytes of a span are content.
func (l *Layer) contentOf(i int) (sum int64) {
	s := l.x.Span(i)
	_ = l.contents.inTar(s.Out, s.OutSize, func(_, _, size int64) error { sum += size; return nil })
	return sum
}

// register adds the layer and then sets the mark. In the other order, an event could come from an
// unknown layer, which is denied.
func (e *Engine) register(l *Layer) error {
	e.mu.Lock()
	twice := e.layers[l.inode] != nil
	if !twice {
		e.layers[l.inode] = l
	}
	e.mu.Unlock()
	if twice {
		return errors.New("the layer was added before")
	}
	err := e.group.mark(l.data)
	if err != nil {
		e.mu.Lock()
		defer e.mu.Unlock()
		delete(e.layers, l.inode)
	}
	return err
}

// retryTime is how long accesses fail at once after an access has waited in vain. After a failed
// read-ahead the kernel reads the page again by itself, and a reader would wait twice.
const retryTime = 100 * time.Millisecond

// want makes an access wait for the spans that it needs. It returns false if the access must fail.
// The caller holds mu.
func (l *Layer) want(w *waiter) bool {
	if l.denied {
		return false
	}
	if l.complete {
		return true
	}
	known := len(w.spans)
	l.contents.inData(w.offset, w.count, func(tar, size int64) {
		for i := l.x.SpanAt(tar); i <= l.x.SpanAt(tar+size-1); i++ {
			n := len(w.spans)
			if l.spans[i] == filled || n > known && w.spans[n-1].span >= i { // spans come in order
				continue
			}
			w.spans = append(w.spans, spanRef{l, i})
		}
	})
	if len(w.spans) == known {
		return true
	}
	if l.failed != nil || l.crowded() || l.failures > 0 && time.Since(l.stalled) < retryTime {
		w.spans = w.spans[:known]
		return false
	}
	for _, at := range w.spans[known:] {
		l.wait(at.span, w)
	}
	l.readAhead(w)
	return true
}

// crowded reports whether the accesses of a layer whose source fails take too many slots of the
// ring. Other layers need the slots.
func (l *Layer) crowded() bool {
	if l.failures == 0 {
		return false
	}
	n := 0
	for _, list := range l.waiting {
		n += len(list)
	}
	return n > l.e.slots/4
}

// maxFaulted limits the spans that Faulted returns.
const maxFaulted = 4096

// wait adds an access to a span.
func (l *Layer) wait(i int, w *waiter) {
	if len(l.waiting[i]) == 0 && len(l.faulted) < maxFaulted && !slices.Contains(l.faulted, i) {
		l.faulted = append(l.faulted, i)
	}
	l.waiting[i] = append(l.waiting[i], w)
	w.missing++
	if l.spans[i] == idle {
		l.spans[i] = wanted
		l.faults = append(l.faults, i)
	}
}

// readAheadSpans is how many further spans of a file follow an access in the background.
const readAheadSpans = 4

// readAhead queues the spans of the file that follow an access.
func (l *Layer) readAhead(w *waiter) {
	end := l.contents.fileEnd(w.offset)
	if end < 0 {
		return
	}
	last := w.spans[len(w.spans)-1].span
	l.ahead = l.ahead[:0] // an older access is worth less
	for i := last + 1; i <= min(last+readAheadSpans, l.x.SpanAt(end-1)); i++ {
		l.ahead = append(l.ahead, i)
	}
}

// forget removes an access from a span.
func (l *Layer) forget(i int, w *waiter) {
	list := slices.DeleteFunc(l.waiting[i], func(x *waiter) bool { return x == w })
	if len(list) == 0 {
		delete(l.waiting, i)
		return
	}
	l.waiting[i] = list
}

// warnStalled logs that accesses failed.
func (l *Layer) warnStalled() {
	l.warnStall.Warn(l.e.cfg.Log, "a layer's missing content did not arrive in time; reading it failed with EIO",
		"layer", l.name, "blob", l.x.Blob, "limit", l.e.cfg.Stall)
}

// Progress returns the filled bytes of the blob and its size.
func (l *Layer) Progress() (filled, total int64) {
	l.e.mu.Lock()
	defer l.e.mu.Unlock()
	return l.filledIn, l.x.BlobSize
}

// Refused returns how many accesses of the layer have failed with EIO since the start of the
// Engine, and when the last one did.
func (l *Layer) Refused() (n uint64, last time.Time) {
	l.e.mu.Lock()
	defer l.e.mu.Unlock()
	return l.refused, l.lastRefuse
}

// noteRefused notes that an access failed. The caller holds mu.
func (l *Layer) noteRefused() {
	l.refused++
	l.lastRefuse = time.Now()
}

// Missing returns how many bytes of the data file are not filled yet. They will take disk space.
func (l *Layer) Missing() int64 {
	l.e.mu.Lock()
	defer l.e.mu.Unlock()
	return l.missing
}

// Kept returns how many bytes of the blob are kept on disk until the layer is complete.
func (l *Layer) Kept() int64 {
	l.e.mu.Lock()
	defer l.e.mu.Unlock()
	if l.blob == nil || l.complete {
		return 0
	}
	return l.filledIn
}

// Done is closed when the layer is complete, cannot be completed, or was closed: see Err.
func (l *Layer) Done() <-chan struct{} { return l.done }

// Err returns nil for a layer that is complete or being filled. For a layer that was closed, it
// returns ErrClosed. If the index is wrong or the data was damaged, it returns DataLoss, and the
// caller deletes the index.
func (l *Layer) Err() error {
	l.e.mu.Lock()
	defer l.e.mu.Unlock()
	return l.failed
}

// Complete reports whether the whole layer is filled, verified and durable. The mark is removed.
func (l *Layer) Complete() bool {
	l.e.mu.Lock()
	defer l.e.mu.Unlock()
	return l.complete
}

// Prefer sets which spans are filled first in the background, in this order. Numbers of spans that
// do not exist are ignored.
func (l *Layer) Prefer(spans []int) {
	l.e.mu.Lock()
	defer l.e.mu.Unlock()
	l.order = slices.DeleteFunc(slices.Clone(spans), func(i int) bool { return i < 0 || i >= len(l.spans) })
	l.kick()
}

// Faulted returns the spans that processes have waited for, in the order of their first access.
// They are the argument of Prefer at the next pull of the image.
func (l *Layer) Faulted() []int {
	l.e.mu.Lock()
	defer l.e.mu.Unlock()
	return slices.Clone(l.faulted)
}

// ErrClosed is the error of a layer that was closed before it was complete.
var ErrClosed = errors.New("the layer was closed")

// Close makes the Engine forget the layer, after Done or because the layer is being removed.
// Accesses that wait fail. The mark of an incomplete layer stays until its data file is deleted, so
// that any later access fails, too.
func (l *Layer) Close() error {
	err := l.end()
	e := l.e
	e.mu.Lock()
	if e.layers[l.inode] == l {
		delete(e.layers, l.inode)
	}
	if !l.complete && l.failed == nil {
		l.failed = ErrClosed
		close(l.done)
	}
	late := l.detachAll()
	e.mu.Unlock()
	e.denyAll(late)
	return err
}

// detachAll detaches all accesses that wait for the layer, and notes that they fail. The caller
// holds mu and denies them.
func (l *Layer) detachAll() (list []*waiter) {
	for i := range l.waiting {
		for _, w := range slices.Clone(l.waiting[i]) {
			if w.waits != nil { // not yet in list
				list = append(list, w)
				l.noteRefused()
			}
			l.e.detach(w)
		}
	}
	return list
}

// end ends the layer's goroutines, records which spans are filled and closes the files.
func (l *Layer) end() error {
	l.life.Close()
	l.life.Cancel()
	err := l.life.WaitFor(closeTimeout)
	if err != nil {
		return fmt.Errorf("lazy layer %s: %w", l.name, err) // its files are in use
	}
	ctx, cancel := context.WithTimeout(context.Background(), closeTimeout)
	defer cancel()
	if !l.Complete() && l.Err() == nil {
		err = l.sync(ctx)
	}
	err = errors.Join(err, l.inflater.close(ctx), l.data.Close())
	for _, f := range []*os.File{l.record, l.bits, l.blob} {
		if f != nil {
			err = errors.Join(err, f.Close())
		}
	}
	return err
}

// pause waits before the next attempt after a failure. It returns false at the layer's end.
func (l *Layer) pause(failures int) bool {
	return l.sleep(l.e.cfg.Retry << min(failures-1, maxRetries))
}

// sleep returns false at the layer's end.
func (l *Layer) sleep(d time.Duration) bool {
	select {
	case <-l.life.Context().Done():
		return false
	case <-time.After(d):
		return true
	}
}
