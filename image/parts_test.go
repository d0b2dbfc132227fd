package image_test

import (
	"fmt"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"berth/image/pull"
	"berth/image/registry"
	"berth/image/registry/registrytest"
)

// If a registry answers ranges with wrong content, the layer is fetched again in one piece. If the
// ranges are right, it is not.
func TestLargeLayerIsFetchedInParts(t *testing.T) {
	for _, wrong := range []bool{false, true} {
		reg := registrytest.New(t)
		l := plain(t, "f", strings.Repeat("0123456789abcdef", 1<<20))
		reg.PutImage("app", "v1", "", l)
		r := &rangeServer{blob: l.Blob, wrong: wrong}
		reg.Before = func(w http.ResponseWriter, req *http.Request) bool {
			return strings.HasSuffix(req.URL.Path, diffID(l).String()) && r.serve(w, req)
		}
		s := openStore(t, pull.Config{MaxRangeRequests: 4})
		img := mustPull(t, s, reg.Host()+"/app:v1")
		if got := readFile(t, s, img, "f"); len(got) != 16<<20 {
			t.Errorf("wrong %v: the file has %d bytes", wrong, len(got))
		}
		want := int64(1)
		if wrong {
			want = 2
		}
		if r.anew.Load() != want || r.parts.Load() == 0 {
			t.Errorf("wrong %v: %d transfers from the beginning, %d of parts", wrong, r.anew.Load(), r.parts.Load())
		}
	}
}

// rangeServer serves a blob, slowly until the first request for a part. It does not count transfers
// that continue after parts, because their number depends on timing.
type rangeServer struct {
	blob  []byte
	wrong bool // parts are of zeros

	anew, parts atomic.Int64 // transfers from the beginning; of parts
}

func (s *rangeServer) serve(w http.ResponseWriter, r *http.Request) bool {
	var first, last int64
	if _, err := fmt.Sscanf(r.Header.Get("Range"), "bytes=%d-%d", &first, &last); err != nil {
		s.anew.Add(1)
		s.whole(w)
		return true
	}
	data := s.blob[first : last+1]
	if len(data) <= registry.PartSize {
		s.parts.Add(1)
		if s.wrong {
			data = make([]byte, len(data))
		}
	}
	s.partial(w, first, data)
	return true
}

func (s *rangeServer) partial(w http.ResponseWriter, first int64, data []byte) {
	w.Header().Set("Content-Range", fmt.Sprintf("bytes %d-%d/%d", first, first+int64(len(data))-1, len(s.blob)))
	w.WriteHeader(http.StatusPartialContent)
	_, _ = w.Write(data) // a client that hangs up is part of the test
}

func (s *rangeServer) whole(w http.ResponseWriter) {
	const chunk = 4 << 10
	rest := s.blob
	for ; s.parts.Load() == 0 && len(rest) > chunk; rest = rest[chunk:] { // slowly, until that is too slow
		if _, err := w.Write(rest[:chunk]); err != nil {
			return
		}
		w.(http.Flusher).Flush()
		time.Sleep(time.Millisecond)
	}
	_, _ = w.Write(rest)
}
