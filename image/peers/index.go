package peers

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"time"
)

// indexWait is how long a request for an index waits for an upload at the peer. A pull does not
// wait for an index for long: it can fetch the layer.
const indexWait = 500 * time.Millisecond

// serveIndex sends the index of a layer's blob, under the conditions for the layer itself. A HEAD
// request asks whether there is one.
func (p *Peers) serveIndex(w http.ResponseWriter, r *http.Request) {
	k, err := keyOf(r.URL, indexPath)
	if err == nil && strings.Contains(r.Header.Get("Range"), ",") {
		err = errors.New("only one range is served")
	}
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	caller := callerOf(r)
	leave, ok := p.waiting.TryAcquire(caller)
	if !ok {
		http.Error(w, "too many requests", http.StatusServiceUnavailable)
		return
	}
	finish, status := p.awaitIndexUpload(r, caller, k)
	leave()
	if status != http.StatusOK {
		http.Error(w, http.StatusText(status), status)
		return
	}
	if finish == nil {
		return
	}
	defer finish()
	p.upload(w, r, k, p.cfg.Layers.OpenIndex)
}

// awaitIndexUpload waits for a free upload of an index that this node has. A HEAD request needs
// none.
func (p *Peers) awaitIndexUpload(r *http.Request, caller string, k Key) (finish func(), status int) {
	if !p.cfg.Layers.HasIndex(k) {
		return nil, http.StatusNotFound
	}
	if r.Method == http.MethodHead {
		return nil, http.StatusOK
	}
	ctx, cancel := context.WithTimeout(r.Context(), indexWait)
	defer cancel()
	finish, err := p.uploads.Acquire(ctx, caller)
	if err != nil {
		return nil, http.StatusServiceUnavailable
	}
	return finish, http.StatusOK
}

// FindIndex returns the address of a peer that has the index of a layer's blob. Nothing of the
// layer is fetched, and other nodes do not wait for this one. ctx should have a short deadline. The
// error wraps ErrNone if no peer has an index.
func (p *Peers) FindIndex(ctx context.Context, k Key) (address string, err error) {
	p.members.wait(ctx)
	answer, err := p.find(ctx, query{Key: k, From: p.cfg.Advertise, Look: true})
	if err != nil {
		return "", err
	}
	failed := ErrNone
	for _, address := range answer.Holders[:min(len(answer.Holders), maxOffered)] {
		if !p.members.usable(address) {
			continue
		}
		response, err := p.askIndex(ctx, http.MethodHead, address, k)
		if err == nil {
			_ = response.Body.Close() // empty
			return address, nil
		}
		failed = errors.Join(failed, err)
	}
	return "", fmt.Errorf("index of %s: %w", k.Blob, failed)
}

// FetchIndex returns the index of a layer's blob from a peer, at most a number of bytes. Nothing of
// it is verified. ctx should have a short deadline.
func (p *Peers) FetchIndex(ctx context.Context, k Key, address string, most int64) ([]byte, error) {
	response, err := p.askIndex(ctx, http.MethodGet, address, k)
	if err != nil {
		return nil, err
	}
	defer response.Body.Close() // read only
	if response.ContentLength > most {
		return nil, fmt.Errorf("index of peer %s has %d bytes, more than %d", address, response.ContentLength, most)
	}
	b, err := io.ReadAll(io.LimitReader(response.Body, most+1))
	p.cfg.Observer.PeerReceived(len(b))
	if err != nil {
		return nil, fmt.Errorf("fetch index from peer %s: %w", address, err)
	}
	if int64(len(b)) > most {
		return nil, fmt.Errorf("index of peer %s has more than %d bytes", address, most)
	}
	return b, nil
}

// askIndex requests an index. The caller closes the body.
func (p *Peers) askIndex(ctx context.Context, method, address string, k Key) (*http.Response, error) {
	request, err := http.NewRequestWithContext(ctx, method, "https://"+address+k.path(indexPath), nil)
	if err != nil {
		return nil, err
	}
	response, err := p.client.Do(request)
	if err != nil {
		return nil, fmt.Errorf("ask peer %s for an index: %w", address, err)
	}
	if response.StatusCode != http.StatusOK {
		_ = response.Body.Close() // of a refusal
		return nil, fmt.Errorf("ask peer %s for an index: %w", address, refusal(response))
	}
	return response, nil
}
