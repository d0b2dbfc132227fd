package process

import (
	"context"
	"errors"
	"fmt"
	"os"

	"google.golang.org/grpc/codes"

	"berth/image/blobindex"
	"berth/image/unpack"
	"berth/image/unpack/worker"
	"berth/internal/errdefs"
	"berth/internal/failpoint"
)

// Inflater decompresses the spans of one blob in a separate process, which can access no files.
// Calls must not be concurrent. After an error it cannot be used any more. The caller closes it.
type Inflater struct {
	p *Program
	w *work
}

// Inflate starts a process that decompresses spans of a blob. dir becomes the root directory of the
// process. tarSize is the length of the blob's tar in bytes, which limits its CPU time.
func (p *Program) Inflate(dir string, kind blobindex.Compression, tarSize int64) (*Inflater, error) {
	root, err := os.Open(dir)
	if err != nil {
		return nil, errdefs.Internal("start berth-unpack: %w", err)
	}
	defer root.Close() // read only
	failpoint.Reach("unpack.start-spans")
	w, err := p.start(root, true, worker.SpanArgs(kind, tarSize), nil)
	failpoint.Reach("unpack.spans-started")
	if err != nil {
		return nil, errdefs.Internal("start berth-unpack: %w", err)
	}
	return &Inflater{p, w}, nil
}

// Span returns the out bytes of the tar in a span. in is the span's verified part of the blob, from
// p.In on. The result may be false: see Unpack. The error is DataLoss if in does not decompress to
// out bytes. It is Unavailable if the process died or took longer than the limit of Open. Otherwise
// it is the error of ctx.
func (i *Inflater) Span(ctx context.Context, p blobindex.Point, in []byte, out int64) ([]byte, error) {
	if out < 0 || out > blobindex.MaxSpan {
		return nil, errdefs.New(codes.DataLoss, "span of %d bytes", out)
	}
	ctx, cancel := context.WithTimeoutCause(ctx, i.p.stall,
		errdefs.Unavailable("berth-unpack did not decompress a span within %v", i.p.stall))
	defer cancel()
	defer context.AfterFunc(ctx, i.w.Kill)()
	tar, err := i.ask(&p, in, out)
	var refused *unpack.Error
	switch {
	case err == nil:
		return tar, nil
	case ctx.Err() != nil:
		return nil, fmt.Errorf("decompress span at %d: %w", p.In, context.Cause(ctx))
	case errors.As(err, &refused):
		return nil, errdefs.New(codes.Code(refused.Code.Status()), "decompress span at %d: %w", p.In, err)
	case errors.Is(err, worker.ErrMalformed):
		return nil, errdefs.Internal("decompress span at %d: berth-unpack: %w", p.In, err)
	}
	return nil, errdefs.Unavailable("decompress span at %d: berth-unpack: %w", p.In, err)
}

// ask sends a span and receives its tar.
func (i *Inflater) ask(p *blobindex.Point, in []byte, out int64) ([]byte, error) {
	if err := worker.WriteSpan(i.w.In, p, out, in); err != nil {
		return nil, err
	}
	return worker.ReadTar(i.w.Out, out)
}

// Close ends the process and waits for it. It implements fill.Inflater, and returns nil.
func (i *Inflater) Close() error {
	state, said := i.w.End()
	i.p.log.Debug("ended decompression of spans", "cpu", state.UserTime()+state.SystemTime(), "peakKiB", peak(state),
		"said", said)
	return nil
}
