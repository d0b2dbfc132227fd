package registry

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net/http"
	"path/filepath"
	"testing"
	"time"

	"google.golang.org/grpc/codes"

	"berth/image/registry/registrytest"
	"berth/internal/errdefs"
)

// rangeServer serves ranges of data by answer, which gets the number of the request, from 1.
func rangeServer(t *testing.T, data []byte, answer func(s *blobServer, w http.ResponseWriter, n int, first, last int64)) *blobServer {
	t.Helper()
	s := newBlobServer(t, data, nil)
	n := 0
	s.Before = func(w http.ResponseWriter, r *http.Request) bool {
		var first, last int64
		if _, err := fmt.Sscanf(r.Header.Get("Range"), "bytes=%d-%d", &first, &last); err != nil {
			t.Errorf("Range %q: %v", r.Header.Get("Range"), err)
		}
		s.mu.Lock()
		n++
		request := n
		s.mu.Unlock()
		answer(s, w, request, first, last)
		return true
	}
	return s
}

// send answers with a range, of which it sends the first n bytes.
func (s *blobServer) send(w http.ResponseWriter, first, last, n int64) {
	w.Header().Set("Content-Length", fmt.Sprint(last+1-first))
	w.Header().Set("Content-Range", fmt.Sprintf("bytes %d-%d/%d", first, last, len(s.data)))
	w.WriteHeader(http.StatusPartialContent)
	_, _ = w.Write(s.data[first:min(first+n, last+1)])
}

func TestRange(t *testing.T) {
	t.Parallel()
	data := randomBytes(t, 300_000)
	const offset, size = 100_000, 150_000
	type answer = func(s *blobServer, w http.ResponseWriter, n int, first, last int64)
	for name, c := range map[string]struct {
		answer answer
		code   codes.Code
		want   error // nil: the bytes, or an error of any kind if code is set
	}{
		"whole": {answer: func(s *blobServer, w http.ResponseWriter, _ int, first, last int64) { s.send(w, first, last, size) }},
		"broken off": {answer: func(s *blobServer, w http.ResponseWriter, _ int, first, last int64) {
			s.send(w, first, last, 40_000)
		}},
		"broken off too often": {answer: func(s *blobServer, w http.ResponseWriter, _ int, first, last int64) {
			s.send(w, first, last, 1)
		}, code: codes.Unknown},
		"no ranges": {answer: func(s *blobServer, w http.ResponseWriter, _ int, _, _ int64) { s.part(w, 0, int64(len(s.data))) },
			code: codes.FailedPrecondition, want: ErrNoRanges},
		"refused": {answer: func(_ *blobServer, w http.ResponseWriter, _ int, _, _ int64) {
			w.WriteHeader(http.StatusRequestedRangeNotSatisfiable)
		}, code: codes.FailedPrecondition, want: ErrNoRanges},
		"another range": {answer: func(s *blobServer, w http.ResponseWriter, _ int, first, last int64) { s.send(w, first+1, last, size) },
			code: codes.DataLoss},
		"shorter range": {answer: func(s *blobServer, w http.ResponseWriter, _ int, first, last int64) { s.send(w, first, last-1, size) },
			code: codes.DataLoss},
		"gone": {answer: func(_ *blobServer, w http.ResponseWriter, _ int, _, _ int64) { w.WriteHeader(http.StatusNotFound) },
			code: codes.NotFound},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := rangeServer(t, data, c.answer)
			repo := s.open(t, Config{})
			var got []byte
			received := 0
			body, err := repo.Range(t.Context(), s.want, 0, offset, size, func(n int) { received += n })
			if err == nil {
				got, err = io.ReadAll(body)
				if err := body.Close(); err != nil {
					t.Error(err)
				}
			}
			switch failed := c.code != codes.OK; {
			case (err != nil) != failed, failed && errdefs.Code(err) != c.code, c.want != nil && !errors.Is(err, c.want):
				t.Errorf("%v: %v", errdefs.Code(err), err)
			case !failed && (!bytes.Equal(got, data[offset:offset+size]) || received != size):
				t.Errorf("%d bytes, %d received", len(got), received)
			}
		})
	}
}

// A host that does not answer, or not all, is left for the next one.
func TestRangeOfSeveralHosts(t *testing.T) {
	t.Parallel()
	data := randomBytes(t, 100_000)
	for name, answer := range map[string]func(s *blobServer, w http.ResponseWriter, r *http.Request){
		"silent": func(_ *blobServer, _ http.ResponseWriter, r *http.Request) { <-r.Context().Done() },
		"stalls": func(s *blobServer, w http.ResponseWriter, r *http.Request) {
			s.send(w, 10, 50_009, 1000)
			_ = http.NewResponseController(w).Flush()
			<-r.Context().Done()
		},
		"broken off": func(s *blobServer, w http.ResponseWriter, _ *http.Request) { s.send(w, 10, 50_009, 1000) },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			good := rangeServer(t, data, func(s *blobServer, w http.ResponseWriter, _ int, first, last int64) {
				s.send(w, first, last, last+1-first)
			})
			bad := newBlobServer(t, data, nil)
			bad.Before = func(w http.ResponseWriter, r *http.Request) bool {
				answer(bad, w, r)
				return true
			}
			dir := t.TempDir()
			registrytest.WriteFile(t, filepath.Join(dir, good.Host(), "hosts.toml"), fmt.Sprintf("[host.%q]\n", "http://"+bad.Host()))
			repo := open(t, Config{Sources: Sources{Dirs: []string{dir}}, StallTimeout: 200 * time.Millisecond}, good.Host()+"/app:v1", Credentials{})
			body, err := repo.Range(t.Context(), good.want, 0, 10, 50_000, func(int) {})
			if err != nil {
				t.Fatal(err)
			}
			defer body.Close()
			got, err := io.ReadAll(body)
			if err != nil || !bytes.Equal(got, data[10:50_010]) || body.Host() != 1 {
				t.Errorf("%d bytes of host %d: %v", len(got), body.Host(), err)
			}
		})
	}
}
