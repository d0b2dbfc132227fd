package peers

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strconv"
	"time"

	"berth/internal/fair"
)

var (
	// ErrNone is the error of a Search if no peer has the layer. This node fetches the layer from
	// the registry, and home nodes make other nodes wait for it.
	ErrNone = errors.New("no peer has the layer")
	// ErrFetching is the error of Open if no peer has the layer any more, but a peer is fetching
	// it.
	ErrFetching = errors.New("a peer fetches the layer")

	errSlow    = errors.New("peers make no progress with the layer")
	errBusy    = errors.New("it has too many requests")
	errMissing = errors.New("it does not send the layer")
)

// leastRate is the least rate, in bytes a second, of a transfer between peers. It also applies to a
// fetch from the registry for which other nodes wait. If the rate is lower, another source is
// better.
const leastRate = 32 << 10

// Search looks for a layer at peers. Not safe for concurrent use.
//
// The caller calls Wait, which returns when a peer has the layer, and then Open. Between the two
// calls it can wait for an unpack slot and memory. It must not call Open before, because a peer has
// few uploads.
//
// A Search that makes no progress ends after Config.SearchTimeout. It ends after leaseTime. After
// an error, the caller fetches the layer from the registry.
type Search struct {
	peers    *Peers
	key      Key
	blobSize int64
	gone     []string         // peers that cannot send the layer
	sources  []string         // peers to ask next; empty: ask a home node next
	fetching bool             // the source is still fetching the layer, according to a home node
	received map[string]int64 // bytes that a fetching node has, by address
	progress int64            // bytes that fetching nodes have received in this round
	meter    fair.Meter
	waited   time.Duration // in all rounds
}

// Search begins to look for a layer whose blob has size bytes.
func (p *Peers) Search(k Key, blobSize int64) *Search {
	return &Search{
		peers: p, key: k, blobSize: blobSize, received: map[string]int64{},
		meter: fair.Meter{Window: p.cfg.SearchTimeout, Rate: leastRate},
	}
}

// Wait waits until a peer has the layer. If a peer is fetching it from the registry, Wait waits for
// that peer. It returns ErrNone if this node must fetch the layer.
func (s *Search) Wait(ctx context.Context) error {
	defer s.peers.cfg.Waits.BeginOpen("layer of a peer", "layer "+s.key.DiffID.String())()
	s.peers.members.wait(ctx)
	return s.repeat(ctx, func(address string) (later bool, err error) {
		if !s.fetching {
			return false, nil
		}
		err = s.peers.await(ctx, s, address)
		return errors.Is(err, ErrFetching) || errors.Is(err, errBusy), err
	})
}

// Open requests the layer from a peer that has it. The caller reads the result to its end, checks
// the digest, and calls Have, or Distrust if the digest is wrong. If the transfer fails, the caller
// may call Exclude and continue with Wait.
func (s *Search) Open(ctx context.Context) (d *Download, err error) {
	defer s.peers.cfg.Waits.BeginOpen("upload of a peer", "layer "+s.key.DiffID.String())()
	err = s.repeat(ctx, func(address string) (later bool, err error) {
		d = &Download{ctx: ctx, peers: s.peers, key: s.key, address: address, size: -1}
		err = d.request(s.requestTimeout() / time.Duration(len(s.sources))) // all sources may be busy
		return errors.Is(err, errBusy), err
	})
	s.sources = nil
	if err != nil {
		return nil, err
	}
	return d, nil
}

// Exclude keeps a peer from being asked again, because it failed to send the layer.
func (s *Search) Exclude(address string) {
	s.gone = append(s.gone, address)
}

// requestTimeout returns how long a request may wait at a peer.
func (s *Search) requestTimeout() time.Duration { return min(s.peers.wait, s.meter.Left()) }

// repeat calls ask for one source after the other, until it returns no error. If ask returns later,
// the source may be asked again. Otherwise an error excludes the source. ErrFetching ends repeat
// and excludes no source.
func (s *Search) repeat(ctx context.Context, ask func(address string) (later bool, err error)) error {
	for {
		began := time.Now()
		done, err := s.round(ctx, ask)
		if done || err != nil {
			return err
		}
		// Fast answers must not make a busy loop.
		if pause := s.peers.pause - time.Since(began); pause > 0 {
			select {
			case <-time.After(pause):
			case <-ctx.Done():
				return context.Cause(ctx)
			}
		}
		took := time.Since(began)
		s.waited += took
		slow := s.meter.Slow(s.progress, took)
		s.progress = 0
		if slow || s.waited > leaseTime {
			return errSlow
		}
	}
}

// round asks the sources that a home node names.
func (s *Search) round(ctx context.Context, ask func(address string) (later bool, err error)) (done bool, err error) {
	if len(s.sources) == 0 {
		if err := s.find(ctx); err != nil {
			return false, err
		}
	}
	for ; len(s.sources) > 0; s.sources = s.sources[1:] {
		address := s.sources[0]
		later, err := false, errMissing
		if s.peers.members.usable(address) {
			later, err = ask(address)
		}
		switch {
		case err == nil:
			return true, nil
		case ctx.Err() != nil:
			return false, context.Cause(ctx)
		case later:
		case errors.Is(err, ErrFetching):
			return false, err
		default:
			s.Exclude(address)
		}
		s.peers.cfg.Log.Debug("peer cannot send a layer now", "peer", address, "layer", s.key.Blob, "error", err)
	}
	return false, nil
}

// find asks the home nodes for sources. It returns a few sources, and no source twice in a Search.
func (s *Search) find(ctx context.Context) error {
	answer, err := s.peers.find(ctx, query{Key: s.key, From: s.peers.cfg.Advertise, Gone: s.gone})
	if err != nil {
		return err
	}
	offered := answer.Holders
	if s.fetching = len(offered) == 0 && answer.Fetching != ""; s.fetching {
		offered = []string{answer.Fetching}
	}
	for _, address := range offered[:min(len(offered), maxOffered)] {
		if !slices.Contains(s.gone, address) && !slices.Contains(s.sources, address) {
			s.sources = append(s.sources, address)
		}
	}
	if len(s.sources) == 0 && answer.Fetch {
		return ErrNone
	}
	return nil
}

// note records what a fetching node says of its progress.
func (s *Search) note(address, header string) error {
	now, err := strconv.ParseInt(header, 10, 64)
	if err != nil || now < 0 || now > s.blobSize {
		return fmt.Errorf("%w: it claims to have received %.30q of %d bytes", errMissing, header, s.blobSize)
	}
	if before := s.received[address]; now > before {
		s.progress += now - before
		s.received[address] = now
	}
	return ErrFetching
}

// await waits until a node has fetched the layer. It returns ErrFetching if the fetch takes longer
// than the request may wait.
func (p *Peers) await(ctx context.Context, s *Search, address string) error {
	wait := s.requestTimeout()
	ctx, cancel := context.WithTimeout(ctx, p.answerTimeout(wait))
	defer cancel()
	response, err := p.ask(ctx, http.MethodHead, address, s.key, wait, 0)
	if err != nil {
		return err
	}
	defer response.Body.Close() // empty
	switch response.StatusCode {
	case http.StatusOK:
		return nil
	case http.StatusAccepted:
		return s.note(address, response.Header.Get(receivedHeader))
	default:
		return refusal(response)
	}
}

// answerTimeout limits the time until a request that waits at the peer is answered. Connection,
// handshake and answer take at most CallTimeout each.
func (p *Peers) answerTimeout(wait time.Duration) time.Duration { return wait + 3*p.cfg.CallTimeout }

// ask requests a layer from an offset on.
func (p *Peers) ask(ctx context.Context, method, address string, k Key, wait time.Duration,
	offset int64) (*http.Response, error) {
	url := "https://" + address + k.path() + "&" + waitKey + "=" + strconv.FormatInt(wait.Milliseconds(), 10)
	request, err := http.NewRequestWithContext(ctx, method, url, nil)
	if err != nil {
		return nil, err
	}
	if offset > 0 {
		request.Header.Set("Range", fmt.Sprintf("bytes=%d-", offset))
	}
	response, err := p.client.Do(request)
	if err != nil {
		return nil, fmt.Errorf("fetch from peer %s: %w", address, err)
	}
	return response, nil
}

// refusal returns the error of a response without content.
func refusal(response *http.Response) error {
	switch response.StatusCode {
	case http.StatusAccepted:
		return ErrFetching
	case http.StatusServiceUnavailable:
		return errBusy
	default:
		return fmt.Errorf("%w: it answers %d %s", errMissing, response.StatusCode, http.StatusText(response.StatusCode))
	}
}
