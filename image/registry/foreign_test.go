package registry

import (
	"bytes"
	"fmt"
	"net/http"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"google.golang.org/grpc/codes"

	"berth/image/registry/registrytest"
)

// blobAt starts a server of one blob. It resumes transfers.
func blobAt(t *testing.T, data []byte, before func(http.ResponseWriter, *http.Request) bool) *registrytest.Server {
	t.Helper()
	s := registrytest.New(t)
	s.Before = func(w http.ResponseWriter, r *http.Request) bool {
		if before == nil || !before(w, r) {
			http.ServeContent(w, r, "", time.Time{}, bytes.NewReader(data))
		}
		return true
	}
	return s
}

// A layer that the registry does not have comes from its URLs. They get no credentials.
func TestForeignLayer(t *testing.T) {
	data := randomBytes(t, 100_000)
	answer := func(status int) func(http.ResponseWriter, *http.Request) bool {
		return func(w http.ResponseWriter, _ *http.Request) bool {
			w.Header().Set("WWW-Authenticate", `Basic realm="x"`)
			w.WriteHeader(status)
			_, _ = w.Write([]byte(`{"errors":[{"code":"X","message":"hunter2"}]}`))
			return true
		}
	}
	good, missing, wants := blobAt(t, data, nil), blobAt(t, data, answer(404)), blobAt(t, data, answer(401))
	wrong := blobAt(t, randomBytes(t, len(data)), nil)
	breaks := blobAt(t, data, func(w http.ResponseWriter, r *http.Request) bool {
		w.Header().Set("Content-Length", fmt.Sprint(len(data)))
		_, _ = w.Write(data[:1000])
		panic(http.ErrAbortHandler)
	})
	moves := blobAt(t, data, func(w http.ResponseWriter, r *http.Request) bool {
		http.Redirect(w, r, good.URL+"/moved", http.StatusFound)
		return true
	})
	reg := registrytest.New(t)
	(&auth{scheme: "basic", user: "u", password: "p"}).protect(reg)
	want := ocispec.Descriptor{Digest: digest.FromBytes(data), Size: int64(len(data))}
	tree := hostsDir(t, "example.com", fmt.Sprintf("server = %q\n[header]\nX-Secret = \"s\"", reg.URL))
	read := func(urls ...string) error {
		want.URLs = urls
		repo := open(t, Config{Sources: Sources{Dirs: []string{tree}}}, "example.com/app:v1", Credentials{Username: "u", Password: "p"})
		got, err := readBlob(t, repo, want)
		if err == nil && !bytes.Equal(got, data) {
			t.Errorf("%q: other content", urls)
		}
		return err
	}
	for _, urls := range [][]string{
		{good.URL + "/layer.tgz?key=1"}, {missing.URL, good.URL}, {wants.URL, good.URL}, {breaks.URL, good.URL}, {moves.URL},
		{"", "::", "file:///etc/passwd", "ftp://x/", "https://", "http://u:p@" + good.Host(), good.URL},
	} {
		if err := read(urls...); err != nil {
			t.Errorf("%q: %v", urls, err)
		}
	}
	wantCode(t, read(), codes.NotFound)
	wantCode(t, read("file:///etc/passwd", "http://u:p@"+good.Host()), codes.NotFound)
	wantCode(t, read(missing.URL+"/token"), codes.NotFound, reg.URL+": not found", missing.URL+": not found")
	wantCode(t, read(wants.URL), codes.NotFound, "without credentials: 401")
	wantCode(t, read(wrong.URL), codes.DataLoss, "digest of the content from "+wrong.URL)
	wantCode(t, read("http://169.254.169.254/"), codes.FailedPrecondition, "metadata service")
	wantCode(t, read(slices.Repeat([]string{missing.URL}, maxURLs)...), codes.NotFound)
	wantCode(t, read(append(slices.Repeat([]string{missing.URL}, maxURLs), good.URL)...), codes.NotFound)
	for _, s := range []*registrytest.Server{good, missing, wants, breaks, moves} {
		for _, name := range []string{"Authorization", "Cookie", "X-Secret", "Referer"} {
			if got := s.Headers(name); len(got) > 0 {
				t.Errorf("a URL got %s: %q", name, got)
			}
		}
	}
	before := good.Count("")
	reg.PutBlob("app", data)
	if err := read(good.URL); err != nil || good.Count("") != before {
		t.Errorf("a URL was asked although the registry has the layer: %v", err)
	}
}

// A URL of a manifest may not lead closer to this machine than the registry, and its host sees no
// client certificate, although its folder has one.
func TestForeignLayerIsGuarded(t *testing.T) {
	data := []byte("content")
	other := newTLSHost(t, func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write(data) })
	cert, key, _ := clientCertificate(t)
	both := registrytest.WriteFile(t, filepath.Join(t.TempDir(), "both.pem"), cert+key)
	reg := registrytest.New(t)
	tree := hostsDir(t, "example.com", fmt.Sprintf("server = %q", reg.URL))
	registrytest.WriteFile(t, filepath.Join(tree, other.host, "hosts.toml"), fmt.Sprintf("ca = %q\nclient = %q", other.ca, both))
	want := ocispec.Descriptor{Digest: digest.FromBytes(data), Size: int64(len(data)), URLs: []string{"https://" + other.host + "/layer"}}
	repo := open(t, Config{Sources: Sources{Dirs: []string{tree}}}, "example.com/app:v1", Credentials{})
	if _, err := readBlob(t, repo, want); err != nil {
		t.Error(err)
	}
	if n := other.shown.Load(); n != 0 {
		t.Errorf("a URL was shown %d client certificates", n)
	}
	asked := other.asked.Load()
	repo = open(t, Config{Sources: Sources{Dirs: []string{tree}}}, "example.com/app:v1", Credentials{})
	repo.endpoints[0].wires.guard.registry.Store(int32(remote))
	_, err := readBlob(t, repo, want)
	wantCode(t, err, codes.FailedPrecondition, "loopback")
	if other.asked.Load() != asked {
		t.Error("a loopback address was asked")
	}
}
