package registry

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"path"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"google.golang.org/grpc/codes"

	"berth/image/registry/registrytest"
	"berth/internal/fair"
)

const (
	testPart  = 1000
	testParts = 20
)

// partServer serves a blob. The first transfer, of the whole blob, stalls after some bytes until
// enough parts have been requested.
type partServer struct {
	*registrytest.Server
	data []byte
	want ocispec.Descriptor
	// answer answers a request for a range; nil: correctly.
	answer func(w http.ResponseWriter, r *http.Request, first, last int64)

	// ignorant of ranges: it answers each request with the whole blob.
	ignorant atomic.Bool
	// silent: it supports ranges, but has no Accept-Ranges header.
	silent bool
	// refusing: it answers no more requests for a range, nor for a part.
	refusing atomic.Bool

	wholes, parts atomic.Int64
	atOnce, most  atomic.Int64  // parts that are being answered
	enough        chan struct{} // closed when await parts are being answered
	await         int64
	once          sync.Once
}

func newPartServer(t testing.TB, await int64) *partServer {
	s := &partServer{Server: registrytest.New(t), data: make([]byte, testPart*testParts+testPart/2), await: await, enough: make(chan struct{})}
	for i := range s.data {
		s.data[i] = byte(i * i >> 3)
	}
	s.want = ocispec.Descriptor{Digest: digest.FromBytes(s.data), Size: int64(len(s.data))}
	s.Before = func(w http.ResponseWriter, r *http.Request) bool { s.serveBlob(w, r); return true }
	return s
}

func (s *partServer) serveBlob(w http.ResponseWriter, r *http.Request) {
	if s.refusing.Load() && r.Header.Get("Range") != "" {
		w.WriteHeader(http.StatusRequestedRangeNotSatisfiable)
		return
	}
	first, last, inPart := askedFor(r)
	if !inPart {
		s.wholes.Add(1)
		s.whole(w, r, first)
		return
	}
	s.parts.Add(1)
	n := s.atOnce.Add(1)
	defer s.atOnce.Add(-1)
	for m := s.most.Load(); n > m && !s.most.CompareAndSwap(m, n); m = s.most.Load() {
	}
	if n >= s.await {
		s.once.Do(func() { close(s.enough) })
	}
	select {
	case <-s.enough: // then they are at once
	case <-r.Context().Done():
		return
	}
	if s.answer != nil {
		s.answer(w, r, first, last)
		return
	}
	s.rangeOf(w, first, last)
}

// askedFor returns the range of a request, and whether it is a request for a part rather than for
// the rest.
func askedFor(r *http.Request) (first, last int64, inPart bool) {
	n, _ := fmt.Sscanf(r.Header.Get("Range"), "bytes=%d-%d", &first, &last)
	return first, last, n == 2 && last-first < testPart
}

// whole sends what follows, the second half of a part only when enough parts are being asked for.
func (s *partServer) whole(w http.ResponseWriter, r *http.Request, first int64) {
	if s.ignorant.Load() {
		first = 0
	} else if !s.silent {
		w.Header().Set("Accept-Ranges", "bytes")
	}
	w.Header().Set("Content-Length", fmt.Sprint(int64(len(s.data))-first))
	if first > 0 {
		w.Header().Set("Content-Range", fmt.Sprintf("bytes %d-%d/%d", first, len(s.data)-1, len(s.data)))
		w.WriteHeader(http.StatusPartialContent)
		_, _ = w.Write(s.data[first:])
		return
	}
	_, _ = w.Write(s.data[:testPart/2])
	w.(http.Flusher).Flush()
	select {
	case <-s.enough:
	case <-r.Context().Done():
	}
	_, _ = w.Write(s.data[testPart/2:])
}

func (s *partServer) rangeOf(w http.ResponseWriter, first, last int64) {
	w.Header().Set("Content-Range", fmt.Sprintf("bytes %d-%d/%d", first, last, len(s.data)))
	w.WriteHeader(http.StatusPartialContent)
	_, _ = w.Write(s.data[first : last+1])
}

// leave is what Spare gives.
type leave struct {
	most  int64
	taken atomic.Int64
}

func (l *leave) take(string) (func(), bool) {
	if l.taken.Add(1) > l.most {
		l.taken.Add(-1)
		return nil, false
	}
	return func() { l.taken.Add(-1) }, true
}

// blob opens the blob of a server, in small parts and without watching first.
func (s *partServer) blob(t testing.TB, l *leave, first int) *Blob {
	t.Helper()
	ref, err := ParseReference(s.Host() + "/app:v1")
	if err != nil {
		t.Fatal(err)
	}
	c := newClient(t, Config{Spare: l.take, StallTimeout: time.Minute})
	c.parts = partsConfig{spare: l.take, size: testPart, trial: time.Hour}
	c.pause = time.Millisecond
	repo, err := c.Open(ref, Credentials{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(repo.Close)
	b, err := repo.Blob(t.Context(), s.want, first, nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { b.Close() })
	return b
}

// If the transfer of a blob stalls, the rest is fetched in parts, as many at once as allowed. The
// transfer ends where the parts begin.
func TestBlobInParts(t *testing.T) {
	for _, most := range []int64{1, 4, 30} {
		l := &leave{most: most}
		s := newPartServer(t, min(most, testParts-1))
		b := s.blob(t, l, 0)
		got, err := io.ReadAll(b)
		if err != nil || !bytes.Equal(got, s.data) {
			t.Errorf("%d at once: %d bytes, %v", most, len(got), err)
		}
		if n := s.most.Load(); n < min(most, testParts-1) {
			t.Errorf("%d at once: %d were", most, n)
		}
		if whole, parts := s.wholes.Load(), s.parts.Load(); !b.InPieces() || most > 1 && (whole != 1 || parts < testParts-1) {
			t.Errorf("%d at once: %d transfers, and %d of parts", most, whole, parts)
		}
		if err := b.Close(); err != nil || l.taken.Load() != 0 {
			t.Errorf("%d at once: %d not given back, %v", most, l.taken.Load(), err)
		}
	}
}

// The blob arrives although parts fail, and pointless requests are not repeated.
func TestPartsThatFail(t *testing.T) {
	for name, answer := range map[string]func(s *partServer, w http.ResponseWriter, r *http.Request, first, last int64){
		"ranges with an end are ignored": func(s *partServer, w http.ResponseWriter, r *http.Request, first, last int64) { _, _ = w.Write(s.data) },
		"too many requests": func(s *partServer, w http.ResponseWriter, r *http.Request, first, last int64) {
			w.Header().Set("Retry-After", "3600")
			w.WriteHeader(http.StatusTooManyRequests)
		},
		"forbidden": func(s *partServer, w http.ResponseWriter, r *http.Request, first, last int64) {
			w.WriteHeader(http.StatusForbidden)
		},
		"no such range": func(s *partServer, w http.ResponseWriter, r *http.Request, first, last int64) {
			w.WriteHeader(http.StatusRequestedRangeNotSatisfiable)
		},
		"another range": func(s *partServer, w http.ResponseWriter, r *http.Request, first, last int64) {
			s.rangeOf(w, first-1, last-1)
		},
		"a shorter range": func(s *partServer, w http.ResponseWriter, r *http.Request, first, last int64) {
			s.rangeOf(w, first, last-1)
		},
		"of another blob": func(s *partServer, w http.ResponseWriter, r *http.Request, first, last int64) {
			w.Header().Set("Content-Range", fmt.Sprintf("bytes %d-%d/%d", first, last, len(s.data)+1))
			w.WriteHeader(http.StatusPartialContent)
			_, _ = w.Write(make([]byte, last+1-first))
		},
		"ends early": func(s *partServer, w http.ResponseWriter, r *http.Request, first, last int64) {
			w.Header().Set("Content-Range", fmt.Sprintf("bytes %d-%d/%d", first, last, len(s.data)))
			w.Header().Set("Content-Length", fmt.Sprint(last+1-first))
			w.WriteHeader(http.StatusPartialContent)
			_, _ = w.Write(s.data[first:last])
		},
		"some": func(s *partServer, w http.ResponseWriter, r *http.Request, first, last int64) {
			if first/testPart%2 == 1 {
				w.WriteHeader(http.StatusInternalServerError)
				return
			}
			s.rangeOf(w, first, last)
		},
	} {
		t.Run(name, func(t *testing.T) {
			l := &leave{most: 4}
			s := newPartServer(t, l.most)
			s.answer = func(w http.ResponseWriter, r *http.Request, first, last int64) { answer(s, w, r, first, last) }
			b := s.blob(t, l, 0)
			got, err := io.ReadAll(b)
			if err != nil || !bytes.Equal(got, s.data) {
				t.Errorf("%d bytes, %v", len(got), err)
			}
			if n := s.parts.Load(); n > 2*l.most {
				t.Errorf("%d parts were asked for", n)
			}
			if n := s.wholes.Load(); name != "some" && name != "ends early" && n != 1 {
				t.Errorf("%d transfers of the whole", n)
			}
			if err := b.Close(); err != nil || l.taken.Load() != 0 {
				t.Errorf("%d not given back, %v", l.taken.Load(), err)
			}
		})
	}
}

// failSecond fails the second part with a status. From then on the registry ignores or refuses
// ranges.
func (s *partServer) failSecond(status int, from *atomic.Bool) {
	s.answer = func(w http.ResponseWriter, _ *http.Request, first, last int64) {
		if first == testPart/2+2*testPart {
			from.Store(true) // before the reader comes here
			w.WriteHeader(status)
			return
		}
		s.rangeOf(w, first, last)
	}
}

// wantInParts reads the blob, some of it in parts.
func (s *partServer) wantInParts(t *testing.T, l *leave) {
	t.Helper()
	b := s.blob(t, l, 0)
	got, err := io.ReadAll(b)
	if err != nil || !bytes.Equal(got, s.data) || !b.InPieces() {
		t.Errorf("%d bytes, %v", len(got), err)
	}
}

// If a registry ignores ranges, one part is tried, and the transfer continues.
func TestRangesIgnored(t *testing.T) {
	l := &leave{most: 8}
	s := newPartServer(t, 1)
	s.ignorant.Store(true)
	s.answer = func(w http.ResponseWriter, r *http.Request, _, _ int64) { s.whole(w, r, 0) }
	s.wantInParts(t, l)
	if whole, parts := s.wholes.Load(), s.parts.Load(); whole != 1 || parts != 1 {
		t.Errorf("%d transfers, and %d of parts", whole, parts)
	}
}

// If a registry answers a resumed transfer with the whole blob, no more parts are requested,
// although some have arrived.
func TestRangesIgnoredAfterFirstPart(t *testing.T) {
	l := &leave{most: 4}
	s := newPartServer(t, l.most)
	s.failSecond(http.StatusServiceUnavailable, &s.ignorant)
	s.wantInParts(t, l)
	if whole, parts := s.wholes.Load(), s.parts.Load(); whole != 2 || parts > 2*l.most {
		t.Errorf("%d transfers, and %d of parts", whole, parts)
	}
}

// If a registry stops to support ranges after parts of a blob have arrived, the whole blob is
// requested.
func TestRangesRefusedAfterFirstPart(t *testing.T) {
	l := &leave{most: 4}
	s := newPartServer(t, l.most)
	s.failSecond(http.StatusRequestedRangeNotSatisfiable, &s.refusing)
	s.wantInParts(t, l)
	if whole := s.wholes.Load(); whole != 2 {
		t.Errorf("%d transfers", whole)
	}
}

// Every requested range has an end, because registries like go-containerregistry's accept no other.
func TestRangesHaveEnds(t *testing.T) {
	l := &leave{most: 4}
	s := newPartServer(t, l.most)
	serve := s.Before
	s.Before = func(w http.ResponseWriter, r *http.Request) bool {
		if strings.HasSuffix(r.Header.Get("Range"), "-") {
			w.WriteHeader(http.StatusRequestedRangeNotSatisfiable)
			t.Errorf("asked for %s", r.Header.Get("Range"))
			return true
		}
		return serve(w, r)
	}
	s.answer = func(w http.ResponseWriter, r *http.Request, first, last int64) {
		if first/testPart%2 == 1 { // the rest is requested again and again
			w.WriteHeader(http.StatusInternalServerError)
			return
		}
		s.rangeOf(w, first, last)
	}
	got, err := io.ReadAll(s.blob(t, l, 0))
	if err != nil || !bytes.Equal(got, s.data) || s.wholes.Load() < 2 {
		t.Errorf("%d bytes by %d transfers, %v", len(got), s.wholes.Load(), err)
	}
}

// A registry that has not said that it has ranges gets one part, and more when it has answered
// that.
func TestTrialPart(t *testing.T) {
	a := ahead{leave: func() (func(), bool) { return func() {}, true }, partsConfig: partsConfig{size: 10}}
	defer a.clear()
	fetch := func(ctx context.Context, p *part) error { <-ctx.Done(); return ctx.Err() }
	for _, step := range []struct {
		ranges bool
		want   int
	}{{false, 1}, {false, 1}, {true, 9}} {
		a.ranges.Store(step.ranges)
		if a.extend(t.Context(), 0, 100, fetch); len(a.parts) != step.want {
			t.Errorf("ranges known %v: %d parts, not %d", step.ranges, len(a.parts), step.want)
		}
	}
}

// The trial part is followed by others, also if the reader reaches its end before the registry's
// support of ranges is confirmed. No transfer of the rest is started then.
func TestTrialIsFollowed(t *testing.T) {
	l := &leave{most: 4}
	s := newPartServer(t, 1)
	s.silent = true
	b := s.blob(t, l, 0)
	var offset atomic.Int64
	moved := make(chan struct{}, 1)
	b.onBytes = func(n int) {
		offset.Add(int64(n))
		select {
		case moved <- struct{}{}:
		default:
		}
	}
	var trial sync.Once
	s.answer = func(w http.ResponseWriter, r *http.Request, first, last int64) {
		trial.Do(func() {
			for offset.Load() < first {
				select {
				case <-moved:
				case <-r.Context().Done():
					return
				}
			}
		})
		s.rangeOf(w, first, last)
	}
	got, err := io.ReadAll(b)
	if err != nil || !bytes.Equal(got, s.data) {
		t.Errorf("%d bytes, %v", len(got), err)
	}
	if whole, parts := s.wholes.Load(), s.parts.Load(); whole != 1 || parts < testParts-1 {
		t.Errorf("%d transfers, and %d of parts", whole, parts)
	}
}

// On a line that is slow as a whole no parts are fetched: they would share it with the transfer.
func TestSlowLine(t *testing.T) {
	const rate = 32 << 10
	l := &leave{most: 8}
	s := newPartServer(t, 1)
	line := make(chan struct{}, 1) // one sends at a time
	s.Before = func(w http.ResponseWriter, r *http.Request) bool {
		first, _, inPart := askedFor(r)
		if inPart {
			s.parts.Add(1)
		}
		w.Header().Set("Accept-Ranges", "bytes")
		if first > 0 {
			w.Header().Set("Content-Range", fmt.Sprintf("bytes %d-%d/%d", first, len(s.data)-1, len(s.data)))
			w.WriteHeader(http.StatusPartialContent)
		}
		w.(http.Flusher).Flush()
		for chunk := range slices.Chunk(s.data[first:], 512) {
			line <- struct{}{}
			time.Sleep(time.Duration(len(chunk)) * time.Second / rate)
			<-line
			if _, err := w.Write(chunk); err != nil {
				return true
			}
			w.(http.Flusher).Flush()
		}
		return true
	}
	b := s.blob(t, l, 0)
	b.ahead.watch, b.ahead.enough = 100*time.Millisecond, fastEnough // even the whole blob would be too little in that time
	got, err := io.ReadAll(b)
	if err != nil || !bytes.Equal(got, s.data) || s.parts.Load() > 0 {
		t.Errorf("%d bytes, %v, and %d parts", len(got), err, s.parts.Load())
	}
}

// Parts start if the reader waits for the transfer most of the time, and if the transfer is fast
// enough for a line that parts share.
func TestPartsWanted(t *testing.T) {
	for _, c := range []struct {
		rate    int     // bytes a second
		waiting float64 // share of the time
		want    bool
	}{{fastEnough - 1, 1, false}, {fastEnough, 1, true}, {100 << 20, 1, true}, {100 << 20, 0.4, false}, {100 << 20, 0.6, true}} {
		a := ahead{leave: func() (func(), bool) { return nil, false }, partsConfig: partsConfig{watch: watchTime, enough: fastEnough}}
		start := time.Now()
		a.since.at = start
		end := start.Add(time.Second)
		if got := a.waits(end.Add(-time.Duration(c.waiting*float64(time.Second))), end, c.rate); got != c.want {
			t.Errorf("%d bytes a second, waited for %v: %v", c.rate, c.waiting, got)
		}
	}
}

// Parts go on as long as the blob comes faster with them, and none crawls.
func TestPartsJudged(t *testing.T) {
	const alone = 1 << 20
	for name, c := range map[string]struct {
		after   time.Duration // they began
		waited  time.Duration // of that, by the reader
		arrived int64         // since then
		took    time.Duration // the part
		over    bool
	}{
		"faster":                  {2 * trialTime, 2 * trialTime, 2 * alone * int64(2*trialTime) / int64(time.Second), time.Second, false},
		"no faster":               {2 * trialTime, 2 * trialTime, alone * int64(2*trialTime) / int64(time.Second), time.Second, true},
		"the reader is slow":      {2 * trialTime, trialTime, alone * int64(2*trialTime) / int64(time.Second), time.Second, false},
		"it does not wait at all": {2 * trialTime, 0, alone, time.Second, false},
		"no faster, in the trial": {trialTime / 2, trialTime / 2, alone * int64(trialTime) / 2 / int64(time.Second), time.Second, false},
		"a part crawled":          {time.Hour, time.Hour, 2 * alone * 3600, PartSize * time.Second / (fastEnough / crawling) * 2, true},
	} {
		a := ahead{alone: alone, partsConfig: partsConfig{trial: trialTime, enough: fastEnough}}
		now := time.Now()
		a.begun.at, a.waited = now.Add(-c.after), c.waited
		a.arrived.Store(c.arrived)
		a.parts = []*part{{buf: make([]byte, PartSize), began: now.Add(-c.took), whole: now}}
		if a.judge(now); a.over.Load() != c.over {
			t.Errorf("%s: over is %v", name, !c.over)
		}
	}
}

// A transfer that stalls while parts run is repeated without parts, because they may have taken its
// bandwidth.
func TestStallBesideParts(t *testing.T) {
	l := &leave{most: 4}
	s := newPartServer(t, l.most+1) // it answers nothing
	b := s.blob(t, l, 0)
	got := make([]byte, testPart/2)
	if _, err := io.ReadFull(b, got); err != nil {
		t.Fatal(err)
	}
	for s.parts.Load() < l.most { // asked for, though not answered
		time.Sleep(time.Millisecond)
	}
	b.body.(*fair.Body).SetWindow(200 * time.Millisecond) // of this transfer alone
	rest, err := io.ReadAll(b)
	if got = append(got, rest...); err != nil || !bytes.Equal(got, s.data) {
		t.Errorf("%d bytes, %v", len(got), err)
	}
	if whole, parts := s.wholes.Load(), s.parts.Load(); whole != 2 || parts != l.most || l.taken.Load() != 0 {
		t.Errorf("%d transfers, and %d of parts, %d not given back", whole, parts, l.taken.Load())
	}
}

// A wrong part fails the blob. The next attempt fetches it in one piece.
func TestWrongPart(t *testing.T) {
	l := &leave{most: 4}
	s := newPartServer(t, l.most)
	s.answer = func(w http.ResponseWriter, r *http.Request, first, last int64) {
		w.Header().Set("Content-Range", fmt.Sprintf("bytes %d-%d/%d", first, last, len(s.data)))
		w.WriteHeader(http.StatusPartialContent)
		_, _ = w.Write(make([]byte, last+1-first))
	}
	b := s.blob(t, l, 0)
	_, err := io.ReadAll(b)
	wantCode(t, err, codes.DataLoss, "digest of the content")
	before := s.parts.Load()
	b = s.blob(t, l, 1)
	if got, err := io.ReadAll(b); err != nil || !bytes.Equal(got, s.data) || b.InPieces() || s.parts.Load() != before {
		t.Errorf("%d bytes, %v, in %d parts", len(got), err, s.parts.Load()-before)
	}
}

// A registry that says that it has no ranges, or keeps no connection, is not asked for any.
func TestNoParts(t *testing.T) {
	for name, header := range map[string]string{"says so": "HTTP/1.1 200 OK\r\nAccept-Ranges: none", "HTTP/1.0": "HTTP/1.0 200 OK"} {
		l := &leave{most: 4}
		s := newPartServer(t, 1)
		s.Before = func(w http.ResponseWriter, r *http.Request) bool {
			if _, _, inPart := askedFor(r); inPart {
				s.parts.Add(1)
			}
			conn, out, err := w.(http.Hijacker).Hijack()
			if err != nil {
				t.Error(err)
				return true
			}
			defer conn.Close()
			fmt.Fprintf(out, "%s\r\nConnection: close\r\nContent-Length: %d\r\n\r\n", header, len(s.data))
			for chunk := range bytes.SplitAfterSeq(s.data, []byte{0}) {
				_, _ = out.Write(chunk)
				_ = out.Flush()
			}
			return true
		}
		got, err := io.ReadAll(s.blob(t, l, 0))
		if err != nil || !bytes.Equal(got, s.data) || s.parts.Load() > 0 {
			t.Errorf("%s: %d bytes, %v, %d parts", name, len(got), err, s.parts.Load())
		}
	}
}

// A blob that is stopped between its parts is read on; one that is closed there leaves nothing.
func TestStopBetweenParts(t *testing.T) {
	l := &leave{most: 4}
	s := newPartServer(t, l.most)
	release := make(chan struct{})
	s.answer = func(w http.ResponseWriter, r *http.Request, first, last int64) {
		if first >= 3*testPart {
			select {
			case <-release:
			case <-r.Context().Done():
				return
			}
		}
		s.rangeOf(w, first, last)
	}
	b := s.blob(t, l, 0)
	got := make([]byte, 2*testPart)
	if _, err := io.ReadFull(b, got); err != nil {
		t.Fatal(err)
	}
	b.Stop()
	if _, err := io.Copy(io.Discard, b); err == nil {
		t.Error("it was read to its end after it was stopped")
	}
	b.Resume()
	if n := l.taken.Load(); n != 0 {
		t.Errorf("%d not given back", n)
	}
	if n, err := io.ReadFull(b, make([]byte, testPart/2)); err != nil {
		t.Errorf("read on: %d bytes, %v", n, err)
	}
	if err := b.Close(); err != nil || l.taken.Load() != 0 {
		t.Errorf("%d not given back, %v", l.taken.Load(), err)
	}
	if _, err := b.Read(make([]byte, 1)); err == nil || errors.Is(err, io.EOF) {
		t.Errorf("a closed blob: %v", err)
	}
	close(release)
}

// BenchmarkSlowRegistry reads a blob from a registry that limits the rate of each connection.
func BenchmarkSlowRegistry(b *testing.B) {
	const (
		size = 64 << 20
		rate = 20 << 20
	)
	s := newBenchRegistry(b, func() *line { return &line{rate: rate} }, size)
	for _, most := range []int64{0, 2, 8} {
		b.Run(fmt.Sprintf("%d-parts", most), func(b *testing.B) {
			b.SetBytes(size)
			for b.Loop() {
				s.read(b, most)
			}
		})
	}
}

// BenchmarkSharedLine reads three blobs at once over a line of limited bandwidth that all
// connections share. A blob that is fetched in parts gets more of it. All together take as long as
// without parts.
func BenchmarkSharedLine(b *testing.B) {
	if testing.Short() {
		b.Skip("its line is slow: 20 s")
	}
	const rate = 4 << 20
	sizes := []int64{32 << 20, 8 << 20, 1 << 20}
	shared := &line{rate: rate}
	s := newBenchRegistry(b, func() *line { return shared }, sizes...)
	for _, most := range []int64{0, 8} {
		b.Run(fmt.Sprintf("%d-parts", most), func(b *testing.B) {
			took := make([]time.Duration, len(sizes))
			for b.Loop() {
				for i, d := range s.read(b, most) {
					took[i] += d
				}
			}
			for i, size := range sizes {
				b.ReportMetric(took[i].Seconds()/float64(b.N), fmt.Sprintf("s-for-%d-MiB", size>>20))
			}
		})
	}
}

// benchRegistry has blobs of some sizes.
type benchRegistry struct {
	*registrytest.Server
	blobs []ocispec.Descriptor
}

func newBenchRegistry(b *testing.B, lineOf func() *line, sizes ...int64) *benchRegistry {
	s := &benchRegistry{Server: registrytest.Start(b, func(s *httptest.Server) {
		s.Listener = slowListener{s.Listener, lineOf}
		s.Start()
	})}
	content := map[string][]byte{}
	for _, size := range sizes {
		data := []byte(strings.Repeat("0123456789abcdef", int(size/16)))
		d := digest.FromBytes(data)
		content[d.String()] = data
		s.blobs = append(s.blobs, ocispec.Descriptor{Digest: d, Size: size})
	}
	s.Before = func(w http.ResponseWriter, r *http.Request) bool {
		http.ServeContent(w, r, "", time.Time{}, bytes.NewReader(content[path.Base(r.URL.Path)]))
		return true
	}
	return s
}

// read reads all blobs concurrently and returns the time of each.
func (s *benchRegistry) read(b *testing.B, most int64) []time.Duration {
	ref, err := ParseReference(s.Host() + "/app:v1")
	if err != nil {
		b.Fatal(err)
	}
	repo, err := newClient(b, Config{Spare: (&leave{most: most}).take}).Open(ref, Credentials{})
	if err != nil {
		b.Fatal(err)
	}
	defer repo.Close()
	took := make([]time.Duration, len(s.blobs))
	var readers sync.WaitGroup
	began := time.Now()
	for i, want := range s.blobs {
		readers.Go(func() {
			blob, err := repo.Blob(b.Context(), want, 0, nil)
			if err != nil {
				b.Error(err)
				return
			}
			defer blob.Close()
			if _, err := io.Copy(io.Discard, blob); err != nil {
				b.Error(err)
			}
			took[i] = time.Since(began)
		})
	}
	readers.Wait()
	return took
}

// line sends so many bytes a second.
type line struct {
	mu   sync.Mutex // guards free
	rate int
	free time.Time // when the earlier data has been transferred
}

// send waits until there is room for n bytes.
func (l *line) send(n int) {
	l.mu.Lock()
	if now := time.Now(); l.free.Before(now) {
		l.free = now
	}
	turn := l.free
	l.free = l.free.Add(time.Duration(n) * time.Second / time.Duration(l.rate))
	l.mu.Unlock()
	time.Sleep(time.Until(turn))
}

// slowListener accepts connections with limited bandwidth, each with its own line or a shared one.
type slowListener struct {
	net.Listener
	lineOf func() *line
}

func (l slowListener) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	return &slowConn{c, l.lineOf()}, err
}

type slowConn struct {
	net.Conn
	line *line
}

func (c *slowConn) Write(p []byte) (sent int, err error) {
	const most = 64 << 10
	for len(p) > 0 {
		chunk := p[:min(len(p), most)]
		c.line.send(len(chunk))
		n, err := c.Conn.Write(chunk)
		if sent += n; err != nil {
			return sent, err
		}
		p = p[n:]
	}
	return sent, nil
}
