package peers

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"berth/internal/fair"
	"berth/internal/task"
)

const self, other = "10.0.0.1:1", "10.0.0.2:1"

// script is a scripted peer and home node.
type script struct {
	answer func(gone []string) found
	layer  func(r *http.Request) (*http.Response, error)
	asked  int // requests for the layer
}

func (s *script) RoundTrip(r *http.Request) (*http.Response, error) {
	if strings.HasPrefix(r.URL.Path, layerPath) {
		s.asked++
		return s.layer(r)
	}
	var q query
	if err := json.NewDecoder(r.Body).Decode(&q); err != nil {
		return nil, err
	}
	body, err := json.Marshal(s.answer(q.Gone))
	return &http.Response{StatusCode: http.StatusOK, Body: io.NopCloser(strings.NewReader(string(body)))}, err
}

// fetchingNode answers that a node fetches the layer, until it is excluded.
func fetchingNode(gone []string) found {
	if slices.Contains(gone, other) {
		return found{Fetch: true}
	}
	return found{Fetching: other}
}

// holders answers with holders that are not excluded.
func holders(list ...string) func(gone []string) found {
	return func(gone []string) found {
		f := found{Holders: slices.DeleteFunc(slices.Clone(list), func(a string) bool { return slices.Contains(gone, a) })}
		f.Fetch = len(f.Holders) == 0
		return f
	}
}

// scripted returns a client of scripted peers. All home nodes are others.
func scripted(t *testing.T, s *script, members ...string) *Peers {
	t.Helper()
	p := newPeers(Config{
		Advertise: self, Stall: time.Minute, Waits: &task.Waits{}, Log: slog.New(slog.DiscardHandler),
	}, nil)
	p.members.known = slices.Sorted(slices.Values(slices.Concat(members, []string{other})))
	close(p.members.ready)
	p.client.Transport = s
	return p
}

// response is a response without content, after the time that the request may wait.
func response(r *http.Request, status int, wait time.Duration, header http.Header) (*http.Response, error) {
	select {
	case <-time.After(wait):
		return &http.Response{StatusCode: status, Header: header, Body: http.NoBody}, nil
	case <-r.Context().Done():
		return nil, r.Context().Err()
	}
}

func waitOf(t *testing.T, r *http.Request) time.Duration {
	t.Helper()
	ms, err := strconv.Atoi(r.URL.Query().Get(waitKey))
	if err != nil {
		t.Error(err)
	}
	return time.Duration(ms) * time.Millisecond
}

// A node that fetches the layer is waited for while it makes progress, and not too long.
func TestWaitForAFetchingPeer(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name     string
		received func(elapsed time.Duration, n int) string
		wait     bool // the peer lets requests wait
		want     error
		limit    time.Duration // of the search
	}{
		{"one byte more at once", func(_ time.Duration, n int) string { return fmt.Sprint(n) }, false, errSlow, 2 * DefaultSearchTimeout},
		{"the same number", func(time.Duration, int) string { return "5" }, true, errSlow, 2 * DefaultSearchTimeout},
		{"a falling number", func(_ time.Duration, n int) string { return fmt.Sprint(1<<20 - n) }, true, errSlow, 2 * DefaultSearchTimeout},
		{"a slow line", func(e time.Duration, _ int) string { return fmt.Sprint(int64(e.Seconds() * 10_000)) }, true, errSlow, 2 * DefaultSearchTimeout},
		{"more than the blob", func(time.Duration, int) string { return fmt.Sprint(blobSize + 1) }, false, ErrNone, DefaultSearchTimeout},
		{"a negative number", func(time.Duration, int) string { return "-1" }, false, ErrNone, DefaultSearchTimeout},
		{"no number", func(time.Duration, int) string { return "x" }, false, ErrNone, DefaultSearchTimeout},
		{"progress for too long", func(e time.Duration, _ int) string { return fmt.Sprint(int64(e.Seconds() * 2 * leastRate)) }, true, errSlow, leaseTime + 2*DefaultSearchTimeout},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				began := time.Now()
				s := &script{answer: fetchingNode}
				s.layer = func(r *http.Request) (*http.Response, error) {
					wait := time.Duration(0)
					if c.wait {
						wait = waitOf(t, r)
					}
					header := http.Header{receivedHeader: {c.received(time.Since(began)+wait, s.asked)}}
					return response(r, http.StatusAccepted, wait, header)
				}
				err := scripted(t, s).Search(testKey("layer"), blobSize).Wait(t.Context())
				if took := time.Since(began); !errors.Is(err, c.want) || took > c.limit {
					t.Errorf("got %v after %v, want %v within %v", err, took, c.want, c.limit)
				}
				if most := int(c.limit / pauseOfRounds); s.asked > most {
					t.Errorf("the peer was asked %d times, more than %d", s.asked, most)
				}
			})
		})
	}
}

func TestWaitUntilAPeerHasTheLayer(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		began := time.Now()
		s := &script{answer: fetchingNode}
		s.layer = func(r *http.Request) (*http.Response, error) {
			if took := time.Since(began); took < 5*DefaultSearchTimeout {
				header := http.Header{receivedHeader: {fmt.Sprint(int64(took.Seconds() * 2 * leastRate))}}
				return response(r, http.StatusAccepted, waitOf(t, r), header)
			}
			return response(r, http.StatusOK, 0, nil)
		}
		if err := scripted(t, s).Search(testKey("layer"), blobSize).Wait(t.Context()); err != nil {
			t.Error(err)
		}
	})
}

// Busy holders delay the registry by little, and stay holders for others.
func TestBusyHolders(t *testing.T) {
	t.Parallel()
	list := []string{"10.0.0.3:1", "10.0.0.4:1", "10.0.0.5:1", "10.0.0.6:1"}
	synctest.Test(t, func(t *testing.T) {
		began := time.Now()
		s := &script{answer: func(gone []string) found {
			if len(gone) > 0 {
				t.Errorf("%v are reported as gone", gone)
			}
			return found{Holders: list}
		}}
		s.layer = func(r *http.Request) (*http.Response, error) {
			return response(r, http.StatusServiceUnavailable, waitOf(t, r), nil)
		}
		search := scripted(t, s, list...).Search(testKey("layer"), blobSize)
		if err := search.Wait(t.Context()); err != nil {
			t.Fatal(err)
		}
		_, err := search.Open(t.Context())
		if took := time.Since(began); !errors.Is(err, errSlow) || took > 2*DefaultSearchTimeout {
			t.Errorf("got %v after %v", err, took)
		}
	})
}

// A home node cannot make a node ask many peers, or one peer many times.
func TestFewHoldersAreAsked(t *testing.T) {
	t.Parallel()
	var many []string
	for i := range 1000 {
		many = append(many, fmt.Sprintf("10.0.1.%d:%d", i%250, i+1))
	}
	for name, list := range map[string][]string{"many holders": many, "one holder": slices.Repeat([]string{other}, 1000)} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				s := &script{}
				s.answer = func(gone []string) found {
					if len(gone) > maxOffered {
						t.Errorf("%d peers were asked after one answer", len(gone))
					}
					return found{Holders: list, Fetch: len(gone) > 0}
				}
				s.layer = func(r *http.Request) (*http.Response, error) { return response(r, http.StatusNotFound, 0, nil) }
				p := scripted(t, s, many...)
				search := p.Search(testKey("layer"), blobSize)
				if _, err := search.round(t.Context(), func(address string) (bool, error) {
					return false, search.peers.await(t.Context(), search, address)
				}); err != nil {
					t.Error(err)
				}
				if len(search.gone) != s.asked || s.asked > maxOffered {
					t.Errorf("%d requests, excluded %d peers", s.asked, len(search.gone))
				}
			})
		})
	}
}

// piece is a step of a scripted transfer.
type piece struct {
	after time.Duration
	bytes int
}

// transferBody is a body that sends pieces and then fails.
type transferBody struct {
	ctx    context.Context
	pieces []piece
}

func (b *transferBody) Read(p []byte) (int, error) {
	if len(b.pieces) == 0 {
		return 0, io.ErrUnexpectedEOF
	}
	next := b.pieces[0]
	select {
	case <-time.After(next.after):
	case <-b.ctx.Done():
		return 0, b.ctx.Err()
	}
	n := min(next.bytes, len(p))
	if b.pieces[0] = (piece{bytes: next.bytes - n}); n == next.bytes {
		b.pieces = b.pieces[1:]
	}
	clear(p[:n])
	return n, nil
}

func (b *transferBody) Close() error { return nil }

func TestTransfersThatFail(t *testing.T) {
	t.Parallel()
	const size = 1 << 20
	all := piece{bytes: size}
	for _, c := range []struct {
		name      string
		transfers [][]piece           // of one request each; the last one repeats
		length    func(n int) []int64 // what the response n says instead of its length
		want      error               // nil: the tar arrives
		requests  int
	}{
		{"broken before the first byte", [][]piece{{}, {all}}, nil, nil, 2},
		{"broken once", [][]piece{{{bytes: 1000}}, {all}}, nil, nil, 2},
		{"broken after each byte", [][]piece{{{bytes: 1}}}, nil, io.ErrUnexpectedEOF, maxResumes + 1},
		{"one byte a second", [][]piece{slices.Repeat([]piece{{after: time.Second, bytes: 1}}, 1000)}, nil, fair.ErrStalled, 1},
		{"no byte", [][]piece{{{after: time.Hour, bytes: 1}}}, nil, fair.ErrStalled, 1},
		{"another length", [][]piece{{{bytes: 1000}}, {all}}, func(n int) []int64 { return []int64{size, size}[n:] }, errMissing, 2},
		{"another length before the first byte", [][]piece{{}, {all}}, func(n int) []int64 { return []int64{size, size - 1}[n:] }, errMissing, 2},
		{"no length", [][]piece{{all}}, func(int) []int64 { return []int64{-1} }, ErrNone, 1},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				s := &script{answer: holders(other)}
				s.layer = func(r *http.Request) (*http.Response, error) {
					n := s.asked - 1
					offset := int64(0)
					status := http.StatusOK
					if _, err := fmt.Sscanf(r.Header.Get("Range"), "bytes=%d-", &offset); err == nil {
						status = http.StatusPartialContent
					}
					length := size - offset
					if c.length != nil {
						length = c.length(n)[0]
					}
					pieces := slices.Clone(c.transfers[min(n, len(c.transfers)-1)])
					return &http.Response{StatusCode: status, ContentLength: length, Body: &transferBody{r.Context(), pieces}}, nil
				}
				search := scripted(t, s).Search(testKey("layer"), blobSize)
				d, err := search.Open(t.Context())
				var n int64
				if err == nil {
					n, err = io.Copy(io.Discard, onlyReader{d})
				}
				if !errors.Is(err, c.want) || err == nil && n != size {
					t.Errorf("%d bytes and %v, want %v", n, err, c.want)
				}
				if s.asked != c.requests {
					t.Errorf("%d requests, want %d", s.asked, c.requests)
				}
			})
		})
	}
}

type onlyReader struct{ io.Reader }

func TestSeveralFetchesOfALayer(t *testing.T) {
	t.Parallel()
	k := testKey("layer")
	for name, c := range map[string]struct {
		first, second bool // results
		waits         bool // peers still wait after the first end
	}{
		"first succeeds": {first: true},
		"first fails":    {second: true, waits: true},
		"both fail":      {waits: true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			p := scripted(t, &script{answer: holders()})
			one := p.Begin(k, func() int64 { return 5 })
			two := p.Begin(k, func() int64 { return 7 })
			_, received := p.running(k)
			if n := received(); n != 7 {
				t.Errorf("%d bytes received", n)
			}
			one(c.first)
			if done, _ := p.running(k); (done != nil) != c.waits {
				t.Errorf("peers wait: %t", done != nil)
			}
			two(c.second)
			if done, _ := p.running(k); done != nil {
				t.Error("peers wait after the last end")
			}
			p.life.Cancel()
			if err := p.life.Wait(t.Context()); err != nil {
				t.Error(err)
			}
		})
	}
}
