package peers

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"slices"
	"time"
)

// maxReason limits the text of a refusal, in bytes.
const maxReason = 200

// find asks the home nodes of a layer. The first node that answers decides.
func (p *Peers) find(ctx context.Context, q query) (answer found, err error) {
	err = ErrNone
	for _, home := range homes(p.members.all(), q.Key, homeCount) {
		if home == p.cfg.Advertise {
			return p.tracker.find(q.Key, identity{address: q.From}, q.Gone), nil
		}
		if !p.members.usable(home) {
			continue
		}
		if err = p.call(ctx, home, findPath, q, &answer); err == nil {
			return answer, nil
		}
		if ctx.Err() != nil {
			return found{}, context.Cause(ctx)
		}
		p.members.avoid(home, pauseTime)
	}
	return found{}, fmt.Errorf("ask the home nodes of layer %s: %w", q.Key.Blob, err)
}

// call sends JSON to a peer and decodes its answer into result, if that is not nil.
func (p *Peers) call(ctx context.Context, address, path string, body, result any) error {
	ctx, cancel := context.WithTimeout(ctx, p.cfg.CallTimeout)
	defer cancel()
	data, err := json.Marshal(body)
	if err != nil {
		return err
	}
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, "https://"+address+path, bytes.NewReader(data))
	if err != nil {
		return err
	}
	response, err := p.client.Do(request)
	if err != nil {
		return fmt.Errorf("ask peer %s: %w", address, err)
	}
	defer response.Body.Close() // read only
	if response.StatusCode/100 != 2 {
		reason, _ := io.ReadAll(io.LimitReader(response.Body, maxReason)) // as much of the text as arrives
		return fmt.Errorf("ask peer %s: it answers %s: %q", address, http.StatusText(response.StatusCode), reason)
	}
	if result == nil {
		return nil
	}
	if err := json.NewDecoder(io.LimitReader(response.Body, maxBody)).Decode(result); err != nil {
		return fmt.Errorf("decode answer of peer %s: %w", address, err)
	}
	return nil
}

// Begin says that this node fetches a layer from its registry, so that peers can wait for it.
// received returns the bytes so far. The caller calls end once: with true when the layer can be
// served. Several pulls may fetch a layer at the same time. Peers wait for the first success, or
// for the last failure.
func (p *Peers) Begin(k Key, received func() int64) (end func(have bool)) {
	p.mu.Lock()
	defer p.mu.Unlock()
	f := p.fetching[k]
	if f == nil {
		f = &fetch{done: make(chan struct{})}
		p.fetching[k] = f
	}
	f.received = append(f.received, received)
	f.running++
	return func(have bool) {
		if p.end(k, f, have) {
			p.tell(k, have)
		}
	}
}

// end notes the end of one fetch. It reports whether peers have to know the result.
func (p *Peers) end(k Key, f *fetch, have bool) (tell bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	f.running--
	current := p.fetching[k] == f
	if !have && (f.running > 0 || !current) {
		return false
	}
	if current {
		delete(p.fetching, k)
		close(f.done)
	}
	return true
}

// running returns a channel that is closed when a layer has been fetched. It returns nil if this
// node does not fetch the layer. received returns the bytes so far.
func (p *Peers) running(k Key) (done <-chan struct{}, received func() int64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	f := p.fetching[k]
	if f == nil {
		return nil, nil
	}
	each := f.received
	return f.done, func() (most int64) {
		for _, of := range each {
			most = max(most, of())
		}
		return most
	}
}

// Have announces a layer that this node has.
func (p *Peers) Have(k Key) { p.tell(k, true) }

// tell announces the result of a fetch in the background.
func (p *Peers) tell(k Key, have bool) {
	p.spawn("announce layer", func(ctx context.Context) { p.announce(ctx, []Key{k}, !have) })
}

// announceAll announces all layers periodically, because home nodes forget and change. Each time,
// it also forgets layers that other nodes have not announced again.
func (p *Peers) announceAll(ctx context.Context) {
	p.members.wait(ctx)
	tick := time.NewTicker(announcePeriod)
	defer tick.Stop()
	for {
		p.guard("announce layers", func() { p.announce(ctx, p.cfg.Layers.SharedLayers(), false) })
		p.tracker.sweep()
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
	}
}

// announce tells the home nodes of layers. A home node that cannot be reached gets a later
// announcement.
func (p *Peers) announce(ctx context.Context, keys []Key, failed bool) {
	byHome := map[string][]Key{}
	members := p.members.all()
	for _, k := range keys {
		for _, home := range homes(members, k, homeCount) {
			byHome[home] = append(byHome[home], k)
		}
	}
	for home, keys := range byHome {
		for part := range slices.Chunk(keys, maxAnnounced) {
			a := announcement{From: p.cfg.Advertise, Keys: part, Failed: failed}
			if err := p.announceTo(ctx, home, a); err != nil {
				p.cfg.Log.Debug("announce layers to a peer", "peer", home, "error", err)
				break
			}
		}
	}
}

func (p *Peers) announceTo(ctx context.Context, home string, a announcement) error {
	if home != p.cfg.Advertise {
		return p.call(ctx, home, announcePath, a, nil)
	}
	p.tracker.note(a, "")
	return nil
}
