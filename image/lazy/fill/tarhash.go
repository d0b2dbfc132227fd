package fill

import (
	"context"
	"errors"
	"hash"
	"io"
	"time"

	"github.com/opencontainers/go-digest"
	"google.golang.org/grpc/codes"

	"berth/image/unpack/tarsplit"
	"berth/internal/errdefs"
	"berth/internal/task"
)

const (
	defaultHashStep = 32 << 20
	// hashBuffer is the size of one read of a tar that is hashed.
	hashBuffer = 256 << 10
)

// tarHash hashes a layer's tar from its beginning on. While the layer is filled, one goroutine
// hashes the tar up to the first gap. So little is left to hash when the last span is filled.
type tarHash struct {
	tar *tarsplit.Reader
	sum hash.Hash
	at  int64
}

// openTarHash returns a tarHash at the beginning. The error is DataLoss if the record is damaged.
func (l *Layer) openTarHash(ctx context.Context) (*tarHash, error) {
	st, err := l.record.Stat()
	if err != nil {
		return nil, err
	}
	tar, err := tarsplit.Open(l.record, st.Size(), l.x.TarSize, content{ctx, l.data})
	if err != nil {
		return nil, errdefs.New(codes.DataLoss, "%w", err)
	}
	return &tarHash{tar: tar, sum: l.x.DiffID.Algorithm().Hash()}, nil
}

// to hashes the tar up to an offset.
func (h *tarHash) to(end int64) error {
	part := onlyReader{io.NewSectionReader(h.tar, h.at, end-h.at)}
	n, err := io.CopyBuffer(onlyWriter{h.sum}, part, make([]byte, hashBuffer))
	if h.at += n; err == nil && h.at < end {
		err = io.ErrUnexpectedEOF
	}
	return err
}

// onlyReader hides all methods but Read. If io.CopyBuffer found others, it would not use its
// buffer.
type onlyReader struct{ io.Reader }

// digest returns the digest of the whole tar. It hashes the rest.
func (h *tarHash) digest(kind digest.Algorithm) (digest.Digest, error) {
	if err := h.to(h.tar.Size()); err != nil {
		return "", err
	}
	return digest.NewDigest(kind, h.sum), nil
}

// hashAhead hashes the beginning of the tar while the layer is filled.
func (l *Layer) hashAhead() {
	for {
		end, wait, ok := l.nextHash()
		if !ok {
			return
		}
		if wait > 0 {
			l.sleep(wait) // nextHash sees the layer's end
			continue
		}
		err := task.Guard(l.e.cfg.Log, "hash", l.name, func() error { return l.hashTo(end) })
		l.hashed(end, err)
	}
}

// canHash returns the end of the part of the tar that can be hashed next. ok is false if the part
// is too short, or if the layer is verified in another way. The caller holds mu.
func (l *Layer) canHash() (end int64, ok bool) {
	for l.prefix < len(l.spans) && l.spans[l.prefix] == filled {
		l.prefix++
	}
	end = l.x.TarSize
	if l.prefix < len(l.spans) {
		end = l.x.Points[l.prefix].Out
	}
	end = min(end, l.hashedTo+l.e.cfg.HashStep)
	return end, l.blob == nil && !l.hashFailed && end-l.hashedTo == l.e.cfg.HashStep
}

// nextHash returns the end of the next part to hash, or how long to wait for it. If there is none
// it ends the goroutine.
func (l *Layer) nextHash() (end int64, wait time.Duration, ok bool) {
	l.e.mu.Lock()
	defer l.e.mu.Unlock()
	if l.life.Context().Err() == nil && l.failed == nil {
		if end, ok = l.canHash(); ok {
			return end, l.untilQuiet(), true
		}
	}
	l.runners[forHash]--
	if l.left == 0 {
		l.kick()
	}
	return 0, 0, false
}

// hashTo is called by one goroutine at a time.
func (l *Layer) hashTo(end int64) (err error) {
	if l.tarHash == nil {
		if l.tarHash, err = l.openTarHash(l.life.Context()); err != nil {
			return err
		}
	}
	return l.tarHash.to(end)
}

// hashed notes what was hashed. After an error, verify hashes the whole tar.
func (l *Layer) hashed(end int64, err error) {
	l.e.mu.Lock()
	defer l.e.mu.Unlock()
	if err != nil {
		l.hashFailed, l.tarHash = true, nil
		if !errors.Is(err, context.Canceled) {
			l.e.cfg.Log.Debug("the tar of a layer is hashed when the layer is filled", "layer", l.name, "error", err)
		}
		return
	}
	l.hashedTo = end
}
