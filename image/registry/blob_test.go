package registry

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"google.golang.org/grpc/codes"

	"berth/image/registry/registrytest"
	"berth/internal/errdefs"
)

// blobServer serves one blob in ways a test chooses.
type blobServer struct {
	*registrytest.Server
	data []byte
	want ocispec.Descriptor

	done chan struct{} // closed at the end of the test, before the server

	mu     sync.Mutex // guards ranges
	ranges []string   // the Range headers that were sent
}

// asked returns the Range headers that were sent.
func (s *blobServer) asked() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.ranges)
}

// newBlobServer serves data by answer, which gets the number of the request, from
// 1, and the offset asked for.
func newBlobServer(t *testing.T, data []byte, answer func(s *blobServer, w http.ResponseWriter, n int, offset int64)) *blobServer {
	s := &blobServer{Server: registrytest.New(t), data: data, done: make(chan struct{})}
	t.Cleanup(func() { close(s.done) })
	s.want = ocispec.Descriptor{Digest: digest.FromBytes(data), Size: int64(len(data))}
	s.Before = func(w http.ResponseWriter, r *http.Request) bool {
		var offset int64
		if v := r.Header.Get("Range"); v != "" {
			var last int64
			if _, err := fmt.Sscanf(v, "bytes=%d-%d", &offset, &last); err != nil || last != s.want.Size-1 {
				t.Errorf("Range %q: %v", v, err)
			}
		}
		s.mu.Lock()
		s.ranges = append(s.ranges, r.Header.Get("Range"))
		n := len(s.ranges)
		s.mu.Unlock()
		answer(s, w, n, offset)
		return true
	}
	return s
}

// part answers with the bytes from offset to end, with status 206 if offset is not 0. It breaks off
// before the announced end.
func (s *blobServer) part(w http.ResponseWriter, offset, end int64) {
	w.Header().Set("Content-Length", fmt.Sprint(int64(len(s.data))-offset))
	if offset > 0 {
		w.Header().Set("Content-Range", fmt.Sprintf("bytes %d-%d/%d", offset, len(s.data)-1, len(s.data)))
		w.WriteHeader(http.StatusPartialContent)
	}
	_, _ = w.Write(s.data[offset:end])
}

func (s *blobServer) open(t *testing.T, cfg Config) *Repository {
	return open(t, cfg, s.Host()+"/app:v1", Credentials{})
}

func TestBlobResumes(t *testing.T) {
	data := randomBytes(t, 300_000)
	for name, answer := range map[string]func(s *blobServer, w http.ResponseWriter, n int, offset int64){
		"by range": func(s *blobServer, w http.ResponseWriter, n int, offset int64) {
			s.part(w, offset, min(offset+120_000, int64(len(s.data))))
		},
		"range ignored": func(s *blobServer, w http.ResponseWriter, n int, offset int64) {
			s.part(w, 0, min(int64(n)*120_000, int64(len(s.data))))
		},
		"total unknown": func(s *blobServer, w http.ResponseWriter, n int, offset int64) {
			if offset == 0 {
				s.part(w, 0, 100)
				return
			}
			w.Header().Set("Content-Range", fmt.Sprintf("bytes %d-%d/*", offset, len(s.data)-1))
			w.WriteHeader(http.StatusPartialContent)
			_, _ = w.Write(s.data[offset:])
		},
		"shorter ranges": func(s *blobServer, w http.ResponseWriter, n int, offset int64) {
			if offset == 0 {
				s.part(w, 0, 100)
				return
			}
			end := min(offset+150_000, int64(len(s.data)))
			w.Header().Set("Content-Range", fmt.Sprintf("bytes %d-%d/%d", offset, end-1, len(s.data)))
			w.WriteHeader(http.StatusPartialContent)
			_, _ = w.Write(s.data[offset:end])
		},
		"range refused": func(s *blobServer, w http.ResponseWriter, n int, offset int64) {
			if offset > 0 {
				w.WriteHeader(http.StatusRequestedRangeNotSatisfiable)
				return
			}
			s.part(w, 0, min(int64(n)*120_000, int64(len(s.data))))
		},
		"range of what is not said": func(s *blobServer, w http.ResponseWriter, n int, offset int64) {
			if offset > 0 {
				w.WriteHeader(http.StatusPartialContent)
				_, _ = w.Write(s.data[offset:])
				return
			}
			s.part(w, 0, min(int64(n)*120_000, int64(len(s.data))))
		},
		"all said to be a part": func(s *blobServer, w http.ResponseWriter, n int, offset int64) {
			if offset > 0 {
				w.Header().Set("Content-Range", fmt.Sprintf("bytes 0-%d/%d", len(s.data)-1, len(s.data)))
				w.WriteHeader(http.StatusPartialContent)
				_, _ = w.Write(s.data)
				return
			}
			s.part(w, 0, min(int64(n)*120_000, int64(len(s.data))))
		},
		"everything is said to be a part": func(s *blobServer, w http.ResponseWriter, n int, offset int64) {
			w.Header().Set("Content-Range", fmt.Sprintf("bytes 0-%d/%d", len(s.data)-1, len(s.data)))
			w.Header().Set("Content-Length", fmt.Sprint(len(s.data)))
			w.WriteHeader(http.StatusPartialContent)
			_, _ = w.Write(s.data[:min(n*120_000, len(s.data))])
		},
		"everything is said to be some part": func(s *blobServer, w http.ResponseWriter, n int, offset int64) {
			w.Header().Set("Content-Length", fmt.Sprint(len(s.data)))
			w.WriteHeader(http.StatusPartialContent)
			_, _ = w.Write(s.data[:min(n*120_000, len(s.data))])
		},
		"range fails": func(s *blobServer, w http.ResponseWriter, n int, offset int64) {
			if offset > 0 {
				w.WriteHeader(http.StatusInternalServerError)
				return
			}
			s.part(w, 0, min(int64(n)*120_000, int64(len(s.data))))
		},
		"after errors": func(s *blobServer, w http.ResponseWriter, n int, offset int64) {
			switch n {
			case 1:
				w.WriteHeader(http.StatusServiceUnavailable)
			case 2:
				s.part(w, 0, 1000)
			case 3:
				w.WriteHeader(http.StatusTooManyRequests)
			default:
				s.part(w, offset, int64(len(s.data)))
			}
		},
		"chunked": func(s *blobServer, w http.ResponseWriter, n int, offset int64) {
			if n == 1 {
				s.part(w, 0, 1000)
				return
			}
			w.(http.Flusher).Flush() // no Content-Length
			_, _ = w.Write(s.data)
		},
	} {
		t.Run(name, func(t *testing.T) {
			s := newBlobServer(t, data, answer)
			var received int
			b, err := s.open(t, Config{}).Blob(t.Context(), s.want, 0, func(n int) { received += n })
			if err != nil {
				t.Fatal(err)
			}
			defer b.Close()
			got, err := io.ReadAll(b)
			if err != nil || !bytes.Equal(got, data) || received != len(data) {
				t.Errorf("%d bytes, %d counted, %v", len(got), received, err)
			}
			if asked := s.asked(); len(asked) < 2 || asked[0] != "" || asked[1] == "" && name != "after errors" {
				t.Errorf("ranges asked for: %q", asked)
			}
		})
	}
}

func TestBlobGivesUp(t *testing.T) {
	s := newBlobServer(t, randomBytes(t, 1000), func(s *blobServer, w http.ResponseWriter, n int, offset int64) {
		s.part(w, offset, min(offset+1, 1000)) // a byte a time
	})
	_, err := readBlob(t, s.open(t, Config{}), s.want)
	wantUnavailable(t, err, s.want.Digest.String(), "/app:v1", fmt.Sprintf("at byte %d of 1000", maxFailures), s.URL, "unexpected EOF")
	if n := len(s.asked()); n != maxFailures {
		t.Errorf("asked %d times, want %d", n, maxFailures)
	}
}

func TestBlobWrongContent(t *testing.T) {
	data := randomBytes(t, 1000)
	for name, c := range map[string]struct {
		answer func(s *blobServer, w http.ResponseWriter, n int, offset int64)
		text   string
	}{
		"corrupted": {func(s *blobServer, w http.ResponseWriter, n int, offset int64) {
			bad := bytes.Clone(s.data)
			bad[500] ^= 1
			_, _ = w.Write(bad)
		}, "digest of the content from"},
		"longer": {func(s *blobServer, w http.ResponseWriter, n int, offset int64) {
			_, _ = w.Write(append(bytes.Clone(s.data), 'x'))
		}, "size is 1001 bytes, not 1000"},
		"shorter": {func(s *blobServer, w http.ResponseWriter, n int, offset int64) {
			_, _ = w.Write(s.data[:999])
		}, "size is 999 bytes, not 1000"},
		"range of another blob": {func(s *blobServer, w http.ResponseWriter, n int, offset int64) {
			if n == 1 {
				s.part(w, 0, 500)
				return
			}
			w.Header().Set("Content-Range", "bytes 500-1000/1001")
			w.WriteHeader(http.StatusPartialContent)
		}, "Content-Range"},
		"another range": {func(s *blobServer, w http.ResponseWriter, n int, offset int64) {
			if n == 1 {
				s.part(w, 0, 500)
				return
			}
			w.Header().Set("Content-Range", "bytes 1-999/1000")
			w.WriteHeader(http.StatusPartialContent)
		}, "Content-Range"},
	} {
		s := newBlobServer(t, data, c.answer)
		_, err := readBlob(t, s.open(t, Config{}), s.want)
		wantCode(t, err, codes.DataLoss, s.want.Digest.String(), c.text)
		if t.Failed() {
			t.Fatal(name)
		}
	}
}

func TestBlobRefusesBadDescriptor(t *testing.T) {
	repo := open(t, Config{}, "example.com/app:v1", Credentials{})
	for _, d := range []ocispec.Descriptor{{Digest: "sha256:../x", Size: 1}, {Digest: sha256Of0, Size: -1}, {Size: 1}} {
		_, err := repo.Blob(t.Context(), d, 0, nil)
		wantCode(t, err, codes.InvalidArgument)
	}
}

func TestEmptyBlob(t *testing.T) {
	repo := open(t, Config{}, "example.com/app:v1", Credentials{})
	got, err := readBlob(t, repo, ocispec.Descriptor{Digest: digest.FromString("")})
	if err != nil || len(got) != 0 {
		t.Errorf("%d bytes, %v", len(got), err)
	}
	_, err = readBlob(t, repo, ocispec.Descriptor{Digest: sha256Of0})
	wantCode(t, err, codes.DataLoss)
}

// soon is the timeout for servers that stall on purpose. It is long enough for the steps before
// that on a slow machine.
const soon = time.Second

// The only host is asked again once, because a new connection may work.
func TestStalledTransfer(t *testing.T) {
	release := make(chan struct{})
	s := newBlobServer(t, randomBytes(t, 1000), func(s *blobServer, w http.ResponseWriter, n int, offset int64) {
		s.part(w, 0, 700)
		w.(http.Flusher).Flush()
		<-release
	})
	defer close(release)
	repo := s.open(t, Config{})
	repo.endpoints[0].stall = 100 * time.Millisecond // once there are headers
	_, err := readBlob(t, repo, s.want)
	wantUnavailable(t, err, s.want.Digest.String(), s.Host()+"/app:v1", "at byte 700 of 1000", "transfer stalled: no bytes for 100ms", s.URL)
	if asked := s.asked(); !slices.Equal(asked, []string{"", "bytes=700-999"}) {
		t.Errorf("a stalled transfer was asked for %q", asked)
	}
}

func TestStalledBeforeAnswer(t *testing.T) {
	t.Parallel()
	release := make(chan struct{})
	s := newBlobServer(t, []byte("x"), func(s *blobServer, w http.ResponseWriter, n int, offset int64) { <-release })
	defer close(release)
	_, err := readBlob(t, s.open(t, Config{StallTimeout: soon}), s.want)
	wantUnavailable(t, err, s.want.Digest.String(), "at byte 0 of 1", "timeout awaiting response headers")
	if n := len(s.asked()); n > 1 { // 0: the server has not noted the request yet
		t.Errorf("a host that does not answer was asked %d times", n)
	}
}

func TestStalledManifest(t *testing.T) {
	t.Parallel()
	release := make(chan struct{})
	s := newBlobServer(t, []byte("x"), func(s *blobServer, w http.ResponseWriter, n int, offset int64) {
		w.(http.Flusher).Flush()
		<-release
	})
	defer close(release)
	repo := s.open(t, Config{})
	repo.endpoints[0].stall = soon // once there are headers
	_, err := repo.Resolve(t.Context(), DefaultPlatform())
	wantUnavailable(t, err, "fetch manifest", "transfer stalled")
}

// A manifest that comes slowly but never stalls is read to its end.
func TestSlowManifest(t *testing.T) {
	s := newBlobServer(t, []byte("x"), func(s *blobServer, w http.ResponseWriter, n int, offset int64) {
		for { // ends when the client has gone
			if _, err := w.Write([]byte(" ")); err != nil {
				return
			}
			w.(http.Flusher).Flush()
			time.Sleep(time.Millisecond)
		}
	})
	c := newClient(t, Config{StallTimeout: time.Minute})
	c.document = 100 * time.Millisecond
	ref, err := ParseReference(s.Host() + "/app:v1")
	if err != nil {
		t.Fatal(err)
	}
	repo, err := c.Open(ref, Credentials{})
	if err != nil {
		t.Fatal(err)
	}
	defer repo.Close()
	_, err = repo.Resolve(t.Context(), DefaultPlatform())
	wantUnavailable(t, err, "fetch manifest", "not complete after 100ms")
}

func TestBlobCancelled(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	release := make(chan struct{})
	s := newBlobServer(t, randomBytes(t, 1000), func(s *blobServer, w http.ResponseWriter, n int, offset int64) {
		s.part(w, 0, 700)
		w.(http.Flusher).Flush()
		<-release
	})
	defer close(release)
	b, err := s.open(t, Config{}).Blob(ctx, s.want, 0, func(int) { cancel() })
	if err != nil {
		t.Fatal(err)
	}
	defer b.Close()
	_, err = io.ReadAll(b)
	if !errors.Is(err, context.Canceled) {
		t.Errorf("got %v", err)
	}
}

// A Read that waits for a host that is silent ends when the blob is stopped. It can be read on,
// then.
func TestBlobStops(t *testing.T) {
	release := make(chan struct{})
	s := newBlobServer(t, randomBytes(t, 1000), func(s *blobServer, w http.ResponseWriter, n int, offset int64) {
		if n == 1 {
			s.part(w, 0, 700)
			w.(http.Flusher).Flush()
			<-release
			return
		}
		s.part(w, offset, int64(len(s.data)))
	})
	defer close(release)
	var once sync.Once
	arrived := make(chan struct{})
	b, err := s.open(t, Config{}).Blob(t.Context(), s.want, 0, func(int) { once.Do(func() { close(arrived) }) })
	if err != nil {
		t.Fatal(err)
	}
	defer b.Close()
	ended := make(chan error)
	go func() {
		_, err := io.ReadAll(b)
		ended <- err
	}()
	<-arrived
	b.Stop()
	if err := <-ended; !errors.Is(err, context.Canceled) {
		t.Errorf("got %v", err)
	}
	if _, err := b.Read(make([]byte, 1)); !errors.Is(err, context.Canceled) {
		t.Errorf("read on: %v", err)
	}
	for range 2 { // the second time it is whole
		b.Resume()
		if _, err := io.ReadAll(b); err != nil {
			t.Errorf("resumed: %v", err)
		}
		b.Stop()
	}
	if asked := s.asked(); !slices.Equal(asked, []string{"", "bytes=700-999"}) {
		t.Errorf("it was asked for %q", asked)
	}
}

// A corrupt blob remains corrupt after it was stopped.
func TestStoppedBlobStaysCorrupt(t *testing.T) {
	s := newBlobServer(t, randomBytes(t, 1000), func(s *blobServer, w http.ResponseWriter, n int, offset int64) {
		_, _ = w.Write(make([]byte, 1000))
	})
	b, err := s.open(t, Config{}).Blob(t.Context(), s.want, 0, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer b.Close()
	for range 2 {
		_, err := io.ReadAll(b)
		wantCode(t, err, codes.DataLoss, "digest of the content")
		b.Stop()
		b.Resume()
	}
	if n := len(s.asked()); n != 1 {
		t.Errorf("it was asked for %d times", n)
	}
}

// TestBlobChangesHosts: a blob arrives although a mirror always breaks off or serves other content.
// A host that refuses a range once is asked again, if the whole blob fails too, and so are others.
func TestRangeRefusedOnce(t *testing.T) {
	data := randomBytes(t, 300_000)
	all := fmt.Sprintf("bytes=%%d-%d", len(data)-1)
	t.Run("by one of two hosts", func(t *testing.T) {
		server := newBlobServer(t, data, func(s *blobServer, w http.ResponseWriter, n int, offset int64) {
			if offset < 1000 {
				s.part(w, offset, 1000)
				return
			}
			s.part(w, offset, int64(len(s.data)))
		})
		mirror := newBlobServer(t, data, func(s *blobServer, w http.ResponseWriter, n int, offset int64) {
			switch n {
			case 1:
				s.part(w, 0, 500)
			case 2:
				w.WriteHeader(http.StatusForbidden)
			default:
				s.part(w, 0, 2000)
			}
		})
		dir := t.TempDir()
		registrytest.WriteFile(t, filepath.Join(dir, "example.com/hosts.toml"), fmt.Sprintf("server = %q\n[host.%q]", server.URL, mirror.URL))
		got, err := readBlob(t, open(t, Config{Sources: Sources{Dirs: []string{dir}}}, "example.com/app:v1", Credentials{}), mirror.want)
		if err != nil || !bytes.Equal(got, data) {
			t.Errorf("%d bytes, %v", len(got), err)
		}
		if asked, want := server.asked(), []string{fmt.Sprintf(all, 500), fmt.Sprintf(all, 2000)}; !slices.Equal(asked, want) {
			t.Errorf("server was asked for %q, want %q; mirror for %q", asked, want, mirror.asked())
		}
	})
	t.Run("that does not get as far", func(t *testing.T) {
		s := newBlobServer(t, data, func(s *blobServer, w http.ResponseWriter, n int, offset int64) {
			switch n {
			case 1:
				s.part(w, 0, 200_000)
			case 2:
				w.WriteHeader(http.StatusForbidden)
			case 3:
				s.part(w, 0, 1000)
			default:
				s.part(w, offset, int64(len(s.data)))
			}
		})
		got, err := readBlob(t, s.open(t, Config{}), s.want)
		if err != nil || !bytes.Equal(got, data) {
			t.Errorf("%d bytes, %v", len(got), err)
		}
		rest := fmt.Sprintf(all, 200_000)
		if asked, want := s.asked(), []string{"", rest, "", rest}; !slices.Equal(asked, want) {
			t.Errorf("asked for %q, want %q", asked, want)
		}
	})
}

func TestBlobChangesHosts(t *testing.T) {
	data := randomBytes(t, 1000)
	var broken atomic.Int64
	mirror := newBlobServer(t, data, func(s *blobServer, w http.ResponseWriter, n int, offset int64) {
		broken.Add(1)
		if offset > 0 {
			w.WriteHeader(http.StatusInternalServerError)
			return
		}
		s.part(w, 0, 10)
	})
	server := newBlobServer(t, data, func(s *blobServer, w http.ResponseWriter, n int, offset int64) {
		s.part(w, offset, int64(len(s.data)))
	})
	dir := t.TempDir()
	registrytest.WriteFile(t, filepath.Join(dir, "example.com/hosts.toml"), fmt.Sprintf("server = %q\n[host.%q]", server.URL, mirror.URL))
	repo := open(t, Config{Sources: Sources{Dirs: []string{dir}}}, "example.com/app:v1", Credentials{})
	if repo.Hosts() != 2 {
		t.Fatalf("%d hosts", repo.Hosts())
	}
	got, err := readBlob(t, repo, mirror.want)
	if err != nil || !bytes.Equal(got, data) {
		t.Errorf("%d bytes, %v", len(got), err)
	}
	if asked := server.asked(); broken.Load() != 1 || !slices.Equal(asked, []string{"bytes=10-999"}) {
		t.Errorf("mirror was asked %d times, server for %q", broken.Load(), asked)
	}
	b, err := repo.Blob(t.Context(), mirror.want, 1, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer b.Close()
	if _, err := io.ReadAll(b); err != nil || broken.Load() != 1 {
		t.Errorf("beginning with the server: %v", err)
	}
}

// interruptions are ways in which a host stops sending a blob at a position. offset is the first
// byte of the request.
var interruptions = map[string]func(s *blobServer, w http.ResponseWriter, offset, position int64){
	"stall": func(s *blobServer, w http.ResponseWriter, offset, position int64) {
		s.part(w, offset, max(offset, position))
		_ = http.NewResponseController(w).Flush()
		<-s.done
	},
	"stall before the answer": func(s *blobServer, w http.ResponseWriter, offset, position int64) {
		if offset >= position {
			<-s.done
		}
		s.part(w, offset, position)
	},
	"reset": func(s *blobServer, w http.ResponseWriter, offset, position int64) {
		s.part(w, offset, max(offset, position))
		_ = http.NewResponseController(w).Flush()
		conn, _, err := http.NewResponseController(w).Hijack()
		if err == nil {
			_ = conn.(*net.TCPConn).SetLinger(0)
			_ = conn.Close()
		}
	},
	"short body": func(s *blobServer, w http.ResponseWriter, offset, position int64) {
		s.part(w, offset, max(offset, position))
	},
	"short body without a length": func(s *blobServer, w http.ResponseWriter, offset, position int64) {
		_ = http.NewResponseController(w).Flush()
		_, _ = w.Write(s.data[:position])
	},
	"malformed chunks": func(s *blobServer, w http.ResponseWriter, offset, position int64) {
		conn, buf, err := http.NewResponseController(w).Hijack()
		if err == nil {
			_, _ = fmt.Fprintf(buf, "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\nnone\r\n", max(position, 1), s.data[:max(position, 1)])
			_ = buf.Flush()
			_ = conn.Close()
		}
	},
	"503 for the rest": func(s *blobServer, w http.ResponseWriter, offset, position int64) {
		if offset >= position {
			w.WriteHeader(http.StatusServiceUnavailable)
			return
		}
		s.part(w, offset, position)
	},
	"404 for the rest": func(s *blobServer, w http.ResponseWriter, offset, position int64) {
		if offset >= position {
			w.WriteHeader(http.StatusNotFound)
			return
		}
		s.part(w, offset, position)
	},
	"another size": func(s *blobServer, w http.ResponseWriter, offset, position int64) {
		w.Header().Set("Content-Length", fmt.Sprint(s.want.Size+1))
		_, _ = w.Write(s.data[:position])
	},
	"another range": func(s *blobServer, w http.ResponseWriter, offset, position int64) {
		if offset == 0 {
			s.part(w, 0, position)
			return
		}
		w.Header().Set("Content-Range", fmt.Sprintf("bytes 0-%d/%d", s.want.Size-1, s.want.Size))
		w.WriteHeader(http.StatusPartialContent)
		_, _ = w.Write(s.data[:position])
	},
	"range of another blob": func(s *blobServer, w http.ResponseWriter, offset, position int64) {
		if offset == 0 {
			s.part(w, 0, position)
			return
		}
		w.Header().Set("Content-Range", fmt.Sprintf("bytes %d-%d/%d", offset, s.want.Size, s.want.Size+1))
		w.WriteHeader(http.StatusPartialContent)
	},
	"wrong bytes": func(s *blobServer, w http.ResponseWriter, offset, position int64) {
		bad := bytes.Clone(s.data[offset:])
		bad[max(position-offset-1, 0)] ^= 1
		if offset > 0 {
			w.Header().Set("Content-Range", fmt.Sprintf("bytes %d-%d/%d", offset, s.want.Size-1, s.want.Size))
			w.WriteHeader(http.StatusPartialContent)
		}
		_, _ = w.Write(bad)
	},
}

// Whatever interrupts a transfer, and wherever: it goes on with the next host and what has arrived.
func TestInterruptedBlobGoesOnAtNextHost(t *testing.T) {
	const size = 1<<20 + 300_000
	data := randomBytes(t, size)
	for name, interrupt := range interruptions {
		for _, position := range []int64{0, 1, 300_000, size - 1} {
			for _, bad := range []int{1, 2, 6} {
				t.Run(fmt.Sprintf("%s at %d, %d hosts", name, position, bad), func(t *testing.T) {
					t.Parallel()
					testInterruption(t, data, interrupt, position, bad)
				})
			}
		}
	}
}

// testInterruption reads a blob from hosts of which only the last one sends all of it.
func testInterruption(t *testing.T, data []byte, interrupt func(s *blobServer, w http.ResponseWriter, offset, position int64), position int64, bad int) {
	good := newBlobServer(t, data, func(s *blobServer, w http.ResponseWriter, n int, offset int64) {
		s.part(w, offset, int64(len(s.data)))
	})
	hosts := fmt.Sprintf("server = %q\n", good.URL)
	for range bad {
		s := newBlobServer(t, data, func(s *blobServer, w http.ResponseWriter, n int, offset int64) {
			interrupt(s, w, offset, position)
		})
		hosts += fmt.Sprintf("[host.%q]\n", s.URL)
	}
	repo := open(t, Config{Sources: Sources{Dirs: []string{hostsDir(t, "example.com", hosts)}}}, "example.com/app:v1", Credentials{})
	for _, e := range repo.endpoints[:bad] {
		e.stall, e.wires.own.ResponseHeaderTimeout = 200*time.Millisecond, 200*time.Millisecond
	}
	for first := 0; ; first++ { // as the store does
		b, err := repo.Blob(t.Context(), good.want, first, nil)
		if err != nil {
			t.Fatal(err)
		}
		got, err := io.ReadAll(b)
		pieces := b.InPieces()
		_ = b.Close()
		if isCorrupt(err) && first+1 < repo.Attempts(good.want.Digest, pieces) {
			continue
		}
		if err != nil || !bytes.Equal(got, data) {
			t.Errorf("%d bytes, %v", len(got), err)
		}
		break
	}
	if n := len(good.asked()); n != 1 {
		t.Errorf("the good host was asked for %q", good.asked())
	}
}

// No host sends all of a blob at once. Together they do, with pauses between the tries of each.
func TestBlobOfHostsThatAllBreakOff(t *testing.T) {
	data := randomBytes(t, 400_000)
	var servers []*blobServer
	hosts := ""
	for i := range 3 {
		s := newBlobServer(t, data, func(s *blobServer, w http.ResponseWriter, n int, offset int64) {
			switch {
			case i == 1 && n > 1:
				w.WriteHeader(http.StatusNotFound) // does not concern the others
			default:
				s.part(w, offset, min(offset+50_000, int64(len(s.data))))
			}
		})
		servers = append(servers, s)
		hosts += fmt.Sprintf("[host.%q]\n", s.URL)
	}
	gone := newBlobServer(t, data, func(s *blobServer, w http.ResponseWriter, n int, offset int64) { w.WriteHeader(http.StatusNotFound) })
	tree := hostsDir(t, "example.com", fmt.Sprintf("server = %q\n%s", gone.URL, hosts))
	got, err := readBlob(t, open(t, Config{Sources: Sources{Dirs: []string{tree}}}, "example.com/app:v1", Credentials{}), gone.want)
	if err != nil || !bytes.Equal(got, data) {
		t.Errorf("%d bytes, %v", len(got), err)
	}
	if n := len(gone.asked()); n != 2 { // for the rest, and for the whole
		t.Errorf("a host without the blob was asked %d times", n)
	}
	if n := len(servers[1].asked()); n != 3 {
		t.Errorf("a host that lost the blob was asked %d times", n)
	}
}

// A mirror that has stalled costs an image one timeout, not one a layer.
func TestStalledMirrorIsAskedLast(t *testing.T) {
	data := randomBytes(t, 1000)
	mirror := newBlobServer(t, data, func(s *blobServer, w http.ResponseWriter, n int, offset int64) {
		interruptions["stall"](s, w, offset, 300)
	})
	server := newBlobServer(t, data, func(s *blobServer, w http.ResponseWriter, n int, offset int64) {
		s.part(w, offset, int64(len(s.data)))
	})
	tree := hostsDir(t, "example.com", fmt.Sprintf("server = %q\n[host.%q]", server.URL, mirror.URL))
	repo := open(t, Config{Sources: Sources{Dirs: []string{tree}}}, "example.com/app:v1", Credentials{})
	repo.endpoints[0].stall = 200 * time.Millisecond
	for range 3 { // blobs
		if _, err := readBlob(t, repo, server.want); err != nil {
			t.Fatal(err)
		}
	}
	if asked := mirror.asked(); len(asked) != 1 {
		t.Errorf("the mirror was asked for %q", asked)
	}
}

// A host that has sent another blob is not asked for its rest, although it is not known which of
// two hosts has sent the wrong bytes.
func TestBlobWithoutHostThatIsKnownToBeWrong(t *testing.T) {
	data := randomBytes(t, 1000)
	breaks := newBlobServer(t, data, func(s *blobServer, w http.ResponseWriter, n int, offset int64) {
		s.part(w, offset, min(offset+400, 1000))
	})
	lies := newBlobServer(t, data, func(s *blobServer, w http.ResponseWriter, n int, offset int64) {
		interruptions["wrong bytes"](s, w, offset, 999)
	})
	tree := hostsDir(t, "example.com", fmt.Sprintf("server = %q\n[host.%q]", lies.URL, breaks.URL))
	repo := open(t, Config{Sources: Sources{Dirs: []string{tree}}}, "example.com/app:v1", Credentials{})
	var results []codes.Code
	for first := 0; first == 0 || first < repo.Attempts(lies.want.Digest, true) && results[first-1] != codes.OK; first++ {
		b, err := repo.Blob(t.Context(), lies.want, first, nil)
		if err != nil {
			t.Fatal(err)
		}
		_, err = io.ReadAll(b)
		_ = b.Close()
		results = append(results, errdefs.Code(err))
	}
	if want := []codes.Code{codes.DataLoss, codes.DataLoss, codes.OK}; !slices.Equal(results, want) {
		t.Errorf("got %v, want %v", results, want)
	}
}
