package peers

import (
	"encoding/json"
	"io"
	"net/http"
	"net/http/httptest"
	"net/url"
	"slices"
	"strings"
	"testing"

	"berth/internal/task"
)

// fuzzPeers is a node with one other member.
func fuzzPeers() *Peers {
	p := newPeers(Config{Advertise: self, Waits: &task.Waits{}, Log: discard}, nil)
	p.members.known = []string{self, other}
	close(p.members.ready)
	return p
}

func addJSON(f *testing.F, values ...any) {
	f.Helper()
	for _, v := range values {
		body, err := json.Marshal(v)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(body)
	}
	f.Add([]byte(`{"key":{}}`))
	f.Add([]byte(`[`))
}

// post sends a body to a handler and returns the status.
func post(handler http.HandlerFunc, body []byte) int {
	w := httptest.NewRecorder()
	handler(w, httptest.NewRequest(http.MethodPost, "/", strings.NewReader(string(body))))
	return w.Code
}

// checkTracked fails if a home node remembers something that is not valid.
func checkTracked(t *testing.T, p *Peers) {
	t.Helper()
	for k, l := range p.tracker.layers {
		if err := k.Validate(); err != nil {
			t.Errorf("tracks %+v: %v", k, err)
		}
		if l.fetching != (identity{}) && !p.members.has(l.fetching.address) {
			t.Errorf("%q has the lease", l.fetching.address)
		}
		for address := range l.holders {
			if !p.members.has(address) {
				t.Errorf("%q is a holder", address)
			}
		}
	}
}

func FuzzQuery(f *testing.F) {
	k := testKey("layer")
	addJSON(f, query{Key: k, From: other}, query{Key: k, From: other, Gone: []string{self, "x"}}, query{Key: k, From: "192.0.2.1:80"})
	f.Fuzz(func(t *testing.T, body []byte) {
		p := fuzzPeers()
		p.tracker.hold(k, by(self))
		if status := post(p.serveFind, body); status != http.StatusOK && status != http.StatusBadRequest {
			t.Errorf("status %d", status)
		}
		checkTracked(t, p)
	})
}

func FuzzAnnouncement(f *testing.F) {
	k := testKey("layer")
	addJSON(f, announcement{From: other, Keys: []Key{k, testKey("second")}}, announcement{From: other, Keys: []Key{k}, Failed: true},
		announcement{From: "192.0.2.1:80", Keys: []Key{k}})
	f.Fuzz(func(t *testing.T, body []byte) {
		p := fuzzPeers()
		p.tracker.find(k, by(other), nil)
		if status := post(p.serveAnnounce, body); status != http.StatusNoContent && status != http.StatusBadRequest {
			t.Errorf("status %d", status)
		}
		if n := len(p.tracker.layers); n > maxAnnounced+1 {
			t.Errorf("%d layers are tracked after one announcement", n)
		}
		checkTracked(t, p)
	})
}

// rawAnswer answers each request with a body.
type rawAnswer []byte

func (b rawAnswer) RoundTrip(*http.Request) (*http.Response, error) {
	return &http.Response{StatusCode: http.StatusOK, Body: io.NopCloser(strings.NewReader(string(b)))}, nil
}

func FuzzFound(f *testing.F) {
	addJSON(f, found{Holders: []string{other, other, "x"}}, found{Fetching: other}, found{Fetch: true},
		found{Holders: []string{other}, Fetching: "x", Fetch: true})
	f.Fuzz(func(t *testing.T, body []byte) {
		p := fuzzPeers()
		p.members.known = []string{other} // all home nodes are others
		p.client.Transport = rawAnswer(body)
		s := p.Search(testKey("layer"), blobSize)
		if s.find(t.Context()) != nil {
			return
		}
		if len(s.sources) > maxOffered {
			t.Errorf("%d sources", len(s.sources))
		}
		asked := map[string]bool{}
		if _, err := s.round(t.Context(), func(address string) (bool, error) {
			if asked[address] || !p.members.has(address) {
				t.Errorf("%q is asked", address)
			}
			asked[address] = true
			return false, errMissing
		}); err != nil {
			if len(s.sources) > 0 {
				t.Errorf("%d sources are left after %v", len(s.sources), err)
			}
		}
	})
}

// FuzzReceived reads the header of a 202.
func FuzzReceived(f *testing.F) {
	for _, text := range []string{"", "0", "5", "-1", "67108864", "67108865", "99999999999999999999", "0x5", "5 "} {
		f.Add(text, "7")
	}
	f.Fuzz(func(t *testing.T, first, second string) {
		s := fuzzPeers().Search(testKey("layer"), blobSize)
		for _, text := range []string{first, second} {
			if err := s.note(other, text); err == nil {
				t.Errorf("%q is a layer", text)
			}
		}
		if most := s.received[other]; s.progress < 0 || s.progress != most || most > blobSize {
			t.Errorf("after %q and %q: progress %d, received %d", first, second, s.progress, most)
		}
	})
}

// FuzzLayerRequest reads the URL and the header of a request for a layer.
func FuzzLayerRequest(f *testing.F) {
	f.Add(testKey("layer").path()+"&wait=5", "bytes=5-")
	f.Add(testKey("layer").path()+"&wait=99999999999", "bytes=0-1,2-3")
	f.Add(layerPath+"x?wait=-1", "")
	f.Fuzz(func(t *testing.T, target, ranges string) {
		r := &http.Request{Method: http.MethodGet, Header: http.Header{"Range": {ranges}}}
		var err error
		if r.URL, err = url.Parse("https://10.0.0.1:1" + target); err != nil {
			return
		}
		k, wait, err := parseLayerRequest(r)
		if err != nil {
			return
		}
		if err := k.Validate(); err != nil || wait < 0 || wait > longestWait || slices.Contains([]byte(ranges), ',') {
			t.Errorf("%+v, %v, %q: %v", k, wait, ranges, err)
		}
	})
}
