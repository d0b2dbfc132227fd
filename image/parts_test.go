package image

import (
	"fmt"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"berth/image/registry/registrytest"
)

// A registry whose ranges are not what they say has its layers fetched anew, in one piece. One whose ranges are right does not.
func TestRangesOfALayer(t *testing.T) {
	for _, wrong := range []bool{false, true} {
		reg := registrytest.New(t)
		l := plain(t, "f", strings.Repeat("0123456789abcdef", 1<<20))
		reg.PutImage("app", "v1", "", l)
		var wholes, parts atomic.Int64
		reg.Before = func(w http.ResponseWriter, r *http.Request) bool {
			if !strings.HasSuffix(r.URL.Path, diffID(l).String()) {
				return false
			}
			var first, last int64
			if n, _ := fmt.Sscanf(r.Header.Get("Range"), "bytes=%d-%d", &first, &last); n == 2 {
				parts.Add(1)
				w.Header().Set("Content-Range", fmt.Sprintf("bytes %d-%d/%d", first, last, len(l.Blob)))
				w.WriteHeader(http.StatusPartialContent)
				data := l.Blob[first : last+1]
				if wrong {
					data = make([]byte, last+1-first)
				}
				_, _ = w.Write(data)
				return true
			}
			rest := l.Blob
			if wholes.Add(1) == 1 {
				const chunk = 4 << 10
				for ; parts.Load() == 0; rest = rest[chunk:] { // slowly, until that is too slow
					if _, err := w.Write(rest[:chunk]); err != nil || len(rest) == chunk {
						return true
					}
					w.(http.Flusher).Flush()
					time.Sleep(time.Millisecond)
				}
			}
			_, _ = w.Write(rest)
			return true
		}
		s := openStore(t, Config{MaxRangeRequests: 4})
		img := pull(t, s, reg.Host()+"/app:v1")
		if got := readFile(t, s, img, "f"); len(got) != 16<<20 {
			t.Errorf("wrong %v: the file has %d bytes", wrong, len(got))
		}
		want := int64(1)
		if wrong {
			want = 2
		}
		if wholes.Load() != want || parts.Load() == 0 {
			t.Errorf("wrong %v: %d transfers of the whole, %d of parts", wrong, wholes.Load(), parts.Load())
		}
	}
}
