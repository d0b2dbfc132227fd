package peers

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"time"

	"berth/internal/fair"
)

// maxResumes limits how often a broken transfer is resumed.
const maxResumes = 3

// Download is the tar of a layer that a peer sends. A broken transfer is resumed. A transfer that
// is slower than leastRate fails. The tar is not verified. Not safe for concurrent use.
type Download struct {
	ctx     context.Context
	peers   *Peers
	key     Key
	address string

	body    *fair.Body // of the current transfer; nil: none
	size    int64      // -1: not known yet
	offset  int64
	resumes int
}

// Address returns the peer's address.
func (d *Download) Address() string { return d.address }

// Size returns the length of the tar in bytes, as the peer says.
func (d *Download) Size() int64 { return d.size }

// request requests the rest of the tar. The peer may delay the answer until it has a free upload.
func (d *Download) request(wait time.Duration) error {
	ctx, cancel := context.WithCancelCause(d.ctx)
	late := time.AfterFunc(d.peers.answerTimeout(wait), func() { cancel(fair.ErrStalled) })
	response, err := d.peers.ask(ctx, http.MethodGet, d.address, d.key, wait, d.offset)
	late.Stop()
	if err != nil {
		cancel(nil)
		return err
	}
	d.body = fair.NewBody(ctx, cancel, response.Body, fair.Meter{Window: d.peers.cfg.Stall, Rate: leastRate})
	if err := d.accept(response); err != nil {
		return errors.Join(err, d.Close())
	}
	return nil
}

// accept checks the header of a response.
func (d *Download) accept(response *http.Response) error {
	want := http.StatusOK
	if d.offset > 0 {
		want = http.StatusPartialContent
	}
	switch length := response.ContentLength; {
	case response.StatusCode != want:
		return refusal(response)
	case length < 0:
		return fmt.Errorf("%w: it does not say its length", errMissing)
	case d.size >= 0 && length != d.size-d.offset:
		return fmt.Errorf("%w: its length has changed", errMissing)
	default:
		d.size = d.offset + length
		return nil
	}
}

// Read implements io.Reader. It returns io.EOF after Size bytes only.
func (d *Download) Read(b []byte) (int, error) {
	if len(b) == 0 {
		return 0, nil
	}
	for {
		if d.offset == d.size {
			return 0, io.EOF
		}
		if d.body == nil {
			if err := d.request(d.peers.wait); err != nil {
				return 0, err
			}
		}
		n, err := d.body.Read(b[:min(int64(len(b)), d.size-d.offset)])
		d.offset += int64(n)
		d.peers.cfg.Observer.PeerReceived(n)
		if n > 0 {
			return n, nil // an error comes again
		}
		if err == nil {
			continue
		}
		_ = d.Close() // this transfer is given up
		if d.ctx.Err() != nil {
			return 0, context.Cause(d.ctx)
		}
		if errors.Is(err, fair.ErrStalled) || d.resumes == maxResumes {
			return 0, fmt.Errorf("fetch from peer %s: %w", d.address, err)
		}
		d.resumes++
	}
}

// Close ends the transfer.
func (d *Download) Close() error {
	if d.body == nil {
		return nil
	}
	err := d.body.Close()
	d.body = nil
	return err
}

// Distrust says that the peer sent wrong bytes. It is not asked for banTime.
func (d *Download) Distrust() {
	d.peers.cfg.Log.Error("a peer sent a layer with a wrong digest", "peer", d.address, "layer", d.key.Blob,
		"diff_id", d.key.DiffID)
	d.peers.members.avoid(d.address, banTime)
}
