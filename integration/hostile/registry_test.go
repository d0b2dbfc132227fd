package hostile

import (
	"bytes"
	"compress/gzip"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"os"
	"runtime"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"google.golang.org/grpc/codes"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/image/registry/registrytest"
	"berth/integration/fixture"
	"berth/integration/harness"
	"berth/internal/testutil"
)

func imageSpec(name string) *runtimeapi.ImageSpec { return &runtimeapi.ImageSpec{Image: name} }

// unavailable is the error text by which kubelet recognizes a faulty registry.
const unavailable = "RegistryUnavailable"

// document serves arbitrary data as a manifest.
func document(t *testing.T, mediaType string, data []byte, header ...string) string {
	t.Helper()
	r := registrytest.New(t)
	r.Before = func(w http.ResponseWriter, _ *http.Request) bool {
		w.Header().Set("Content-Type", mediaType)
		for i := 0; i+1 < len(header); i += 2 {
			w.Header().Set(header[i], header[i+1])
		}
		_, _ = w.Write(data) // the client may disconnect
		return true
	}
	return r.Host() + "/hostile:v1"
}

func marshal(t *testing.T, v any) []byte {
	t.Helper()
	data := harness.Get(json.Marshal(v))(t)
	return data
}

// manifest returns a manifest with n layers, index one with n manifests.
func manifest(t *testing.T, layers int) []byte {
	layer := ocispec.Descriptor{MediaType: ocispec.MediaTypeImageLayerGzip, Digest: digest.FromString("x"), Size: 1}
	m := ocispec.Manifest{MediaType: ocispec.MediaTypeImageManifest, Config: layer}
	m.SchemaVersion, m.Config.MediaType = 2, ocispec.MediaTypeImageConfig
	for range layers {
		m.Layers = append(m.Layers, layer)
	}
	return marshal(t, m)
}

func index(t *testing.T, manifests int) []byte {
	i := ocispec.Index{MediaType: ocispec.MediaTypeImageIndex}
	i.SchemaVersion = 2
	for range manifests {
		i.Manifests = append(i.Manifests, ocispec.Descriptor{MediaType: ocispec.MediaTypeImageManifest, Digest: digest.FromString("x"), Size: 1,
			Platform: &ocispec.Platform{OS: "plan9", Architecture: runtime.GOARCH}})
	}
	return marshal(t, i)
}

func TestHostileManifests(t *testing.T) {
	testutil.Long(t)
	d := startDaemon(t)
	const typeIndex, typeManifest = ocispec.MediaTypeImageIndex, ocispec.MediaTypeImageManifest
	var squeezed bytes.Buffer
	z := gzip.NewWriter(&squeezed)
	_, err := io.CopyN(z, zeros{}, 1<<30)
	harness.Must(t, err)
	harness.Must(t, z.Close())
	small := func(n int) []byte {
		return []byte(`{"schemaVersion":2,"manifests":[` + strings.Repeat("{},", n) + `{}]}`)
	}
	for _, c := range []struct {
		name string
		ref  string
		code codes.Code
		text string
	}{
		{"10,000 layers", document(t, typeManifest, manifest(t, 10_000)), codes.FailedPrecondition, "10000 layers"},
		{"100,000 manifests", document(t, typeIndex, index(t, 100_000)), codes.FailedPrecondition, "larger than the limit of 8388608 bytes"},
		{"10,000 manifests", document(t, typeIndex, index(t, 10_000)), codes.NotFound, "no image for platform"},
		{"a million empty manifests", document(t, typeIndex, small(1_000_000)), codes.FailedPrecondition, "JSON values"},
		{"100 MiB", document(t, typeManifest, make([]byte, 100<<20)), codes.FailedPrecondition, "larger than the limit"},
		{"brackets", document(t, typeIndex, bytes.Repeat([]byte("["), 200_000)), codes.FailedPrecondition, "invalid JSON"},
		{"gzip that inflates to 1 GiB", document(t, typeManifest, squeezed.Bytes(), "Content-Encoding", "gzip"), codes.FailedPrecondition, "larger than the limit"},
		{"manifest that is also an index", document(t, typeIndex, []byte(`{"schemaVersion":2,"manifests":[],"layers":[],"config":{}}`)), codes.FailedPrecondition, "either manifests or a config"},
		{"another digest than its header", document(t, typeManifest, manifest(t, 1), "Docker-Content-Digest", digest.FromString("other").String()), codes.DataLoss, "digest of the content"},
		{"a page", document(t, "text/html", []byte("<html>")), codes.FailedPrecondition, "invalid JSON"},
		{"nothing", document(t, typeManifest, nil), codes.FailedPrecondition, "invalid JSON"},
		{"headers of 20 MiB", document(t, typeManifest, nil, "X-Long", strings.Repeat("x", 20<<20)), codes.Unknown, unavailable},
	} {
		t.Run(c.name, func(t *testing.T) { refused(t, d, c.ref, c.code, c.text) })
	}
}

// Indexes refer to themselves or to each other. A digest cannot refer to itself, but a registry can
// answer every request with the same index.
func TestNestedIndexes(t *testing.T) {
	d := startDaemon(t)
	again, name := image(t)
	first := again.PutImage("hostile", "v2", "", plain(packed(t)))
	first.Size = 0 // unknown size
	same := indexOf(t, first)
	again.Before = func(w http.ResponseWriter, _ *http.Request) bool { _, _ = w.Write(same); return true }
	refused(t, d, name, codes.DataLoss, "digest of the content")

	chain := registrytest.New(t)
	desc := chain.PutImage("hostile", "v0", "", plain(packed(t)))
	for depth := 1; depth <= 4; depth++ {
		desc = chain.PutManifest("hostile", fmt.Sprint("v", depth), ocispec.MediaTypeImageIndex, indexOf(t, desc))
	}
	refused(t, d, chain.Host()+"/hostile:v4", codes.FailedPrecondition, "more than 3 indexes are nested")
	harness.Must(t, pull(t, d, chain.Host()+"/hostile:v3", nil))
	harness.Must(t, d.Images.RemoveImage(t.Context(), imageSpec(chain.Host()+"/hostile:v3")))
}

// indexOf returns an index with one manifest or index for this machine.
func indexOf(t *testing.T, desc ocispec.Descriptor) []byte {
	desc.Platform = &ocispec.Platform{OS: runtime.GOOS, Architecture: runtime.GOARCH}
	i := ocispec.Index{MediaType: ocispec.MediaTypeImageIndex, Manifests: []ocispec.Descriptor{desc}}
	i.SchemaVersion = 2
	return marshal(t, i)
}

// drip sends a byte now and then, until the client disconnects.
func drip(w io.Writer, flush func(), done <-chan struct{}) {
	tick := time.NewTicker(200 * time.Millisecond)
	defer tick.Stop()
	for {
		select {
		case <-done:
			return
		case <-tick.C:
			if _, err := w.Write([]byte(" ")); err != nil {
				return
			}
			flush()
		}
	}
}

// dripBody answers with an endless body, a byte at a time.
func dripBody(w http.ResponseWriter, r *http.Request) bool {
	w.WriteHeader(http.StatusOK)
	drip(w, func() { _ = http.NewResponseController(w).Flush() }, r.Context().Done())
	return true
}

// dripHeader answers with an endless header, a byte at a time.
func dripHeader(w http.ResponseWriter, r *http.Request) bool {
	conn, buf, err := w.(http.Hijacker).Hijack()
	if err != nil {
		return true
	}
	defer conn.Close()
	_, _ = buf.WriteString("HTTP/1.1 200 OK\r\nX-Slow: ")
	drip(buf, func() { _ = buf.Flush() }, make(chan struct{})) // until a write fails, because the server does not cancel the context of a hijacked request
	return true
}

// endless writes zeros until the client disconnects.
func endless(w http.ResponseWriter, _ *http.Request) bool {
	_, _ = io.Copy(w, zeros{})
	return true
}

// on applies answer to requests whose path contains part.
func on(part string, answer func(http.ResponseWriter, *http.Request) bool) func(http.ResponseWriter, *http.Request) bool {
	return func(w http.ResponseWriter, r *http.Request) bool {
		return strings.Contains(r.URL.Path, part) && answer(w, r)
	}
}

func status(code int, header ...string) func(http.ResponseWriter, *http.Request) bool {
	return func(w http.ResponseWriter, _ *http.Request) bool {
		for i := 0; i+1 < len(header); i += 2 {
			w.Header().Set(header[i], header[i+1])
		}
		w.WriteHeader(code)
		return true
	}
}

// incompressible returns a layer of random bytes.
func incompressible(t *testing.T) registrytest.Layer {
	t.Helper()
	random := make([]byte, 256<<10)
	source := rand.NewChaCha8(sha256.Sum256([]byte("layer")))
	_, err := source.Read(random)
	harness.Must(t, err)
	return gzipped(t, bytes.NewReader(packed(t, fixture.File("f", 0o644, string(random)))))
}

// cut sends half of the requested content, with a header that promises all of it.
func cut(blob []byte) func(http.ResponseWriter, *http.Request) bool {
	return func(w http.ResponseWriter, _ *http.Request) bool {
		w.Header().Set("Content-Length", strconv.Itoa(len(blob)))
		_, _ = w.Write(blob[:len(blob)/2])
		panic(http.ErrAbortHandler)
	}
}

// cutThen is like cut, but calls next when the client requests the rest.
func cutThen(blob []byte, next func(w http.ResponseWriter)) func(http.ResponseWriter, *http.Request) bool {
	return func(w http.ResponseWriter, r *http.Request) bool {
		if r.Header.Get("Range") == "" {
			return cut(blob)(w, r)
		}
		next(w)
		return true
	}
}

func partial(contentRange string, body []byte) func(http.ResponseWriter) {
	return func(w http.ResponseWriter) {
		w.Header().Set("Content-Range", contentRange)
		w.WriteHeader(http.StatusPartialContent)
		_, _ = w.Write(body)
	}
}

func TestRegistries(t *testing.T) {
	testutil.Long(t)
	d := startDaemon(t)
	layer := incompressible(t)
	blob := layer.Blob
	blobPath := digest.FromBytes(blob).Encoded()
	size := len(blob)
	garbage := bytes.Repeat([]byte("garbage!"), size/8+1)[:size]
	loop := func(w http.ResponseWriter, r *http.Request) bool {
		http.Redirect(w, r, r.URL.Path+"?again", http.StatusTemporaryRedirect)
		return true
	}
	redirect := func(to string) func(http.ResponseWriter, *http.Request) bool {
		return status(http.StatusTemporaryRedirect, "Location", to)
	}
	var attempts []attempt
	for _, c := range []struct {
		name   string
		before func(http.ResponseWriter, *http.Request) bool
		code   codes.Code
		text   string
	}{
		{"manifest, byte by byte", on("/manifests/", dripBody), codes.Unknown, "transfer stalled"},
		{"config, byte by byte", on("/blobs/", dripBody), codes.Unknown, "transfer stalled"},
		{"layer, byte by byte", on(blobPath, dripBody), codes.Unknown, "transfer stalled"},
		{"header, byte by byte", on("/manifests/", dripHeader), codes.Unknown, "timeout awaiting response headers"},
		{"endless manifest", on("/manifests/", endless), codes.FailedPrecondition, "larger than the limit"},
		{"endless layer", on(blobPath, endless), codes.DataLoss, "digest of the content"},
		{"layer with other content", on(blobPath, func(w http.ResponseWriter, _ *http.Request) bool { _, _ = w.Write(garbage); return true }), codes.DataLoss, ""},
		{"layer that is shorter", on(blobPath, func(w http.ResponseWriter, _ *http.Request) bool {
			w.Header().Set("Content-Length", strconv.Itoa(size/2))
			_, _ = w.Write(blob[:size/2])
			return true
		}), codes.DataLoss, "size is"},
		{"layer that is longer", on(blobPath, func(w http.ResponseWriter, _ *http.Request) bool {
			w.Header().Set("Content-Length", strconv.Itoa(size+1))
			_, _ = w.Write(append(bytes.Clone(blob), 'x'))
			return true
		}), codes.DataLoss, "size is"},
		{"layer that is always truncated", on(blobPath, cut(blob)), codes.Unknown, "at byte"},
		// The client rejects a range other than the requested one. It then requests the whole blob,
		// which the host truncates.
		{"rest from another offset", on(blobPath, cutThen(blob, partial(fmt.Sprintf("bytes 0-%d/%d", size-1, size), blob))), codes.Unknown, "at byte"},
		{"rest of another length", on(blobPath, cutThen(blob, partial(fmt.Sprintf("bytes %d-%d/%d", size/2, 1<<40, 1<<41), blob))), codes.Unknown, "at byte"},
		{"rest with other content", on(blobPath, cutThen(blob, partial(fmt.Sprintf("bytes %d-%d/%d", size/2, size-1, size), garbage[size/2:]))), codes.DataLoss, ""},
		{"redirect loop", on("/manifests/", loop), codes.Unknown, "more than 10 redirects"},
		{"redirect to a file", on(blobPath, redirect("file:///etc/passwd")), codes.Unknown, "unsupported protocol scheme"},
		{"redirect to a closed port", on(blobPath, redirect("http://"+harness.UnusedAddress(t)+"/x")), codes.Unknown, "connection refused"},
		{"Retry-After of ten years", on("", status(http.StatusTooManyRequests, "Retry-After", "315360000")), codes.Unknown, "429"},
		{"permanent failure", on("", status(http.StatusInternalServerError)), codes.Unknown, "500"},
		{"unreachable token server", on("", status(http.StatusUnauthorized, "WWW-Authenticate", `Bearer realm="http://256.256.256.256/token"`)), codes.Unknown, "token server"},
		{"realm that is no HTTP URL", on("", status(http.StatusUnauthorized, "WWW-Authenticate", `Bearer realm="file:///etc/passwd"`)), codes.Unauthenticated, "token server"},
	} {
		r, name := image(t, layer)
		r.Before = c.before
		attempts = append(attempts, attempt{what: c.name, name: name, code: c.code, text: c.text})
	}
	allRefused(t, d, attempts)
}

// The registry chooses its token servers, so berth does not trust their answers either.
func TestHostileTokenServers(t *testing.T) {
	testutil.Long(t)
	d := startDaemon(t)
	layer := incompressible(t)
	auth := &runtimeapi.AuthConfig{Username: "user", Password: "secret-of-the-user"}
	var attempts []attempt
	for name, c := range map[string]struct {
		answer func(http.ResponseWriter, *http.Request) bool
		code   codes.Code
	}{
		"1 GB":             {endless, codes.Unauthenticated},
		"a byte at a time": {dripBody, codes.Unknown},
		"no JSON":          {on("", status(http.StatusOK)), codes.Unauthenticated},
		"a token of 1 MB": {func(w http.ResponseWriter, _ *http.Request) bool {
			_, _ = fmt.Fprintf(w, `{"token":"%s"}`, strings.Repeat("x", 1<<20))
			return true
		}, codes.Unauthenticated},
		"header in the token": {func(w http.ResponseWriter, _ *http.Request) bool {
			_, _ = w.Write([]byte(`{"token":"x\r\nHost: y"}`))
			return true
		}, codes.Unauthenticated},
		"redirects": {func(w http.ResponseWriter, r *http.Request) bool {
			http.Redirect(w, r, "/token?again", http.StatusTemporaryRedirect)
			return true
		}, codes.Unknown},
	} {
		r, ref := image(t, layer)
		r.Before = func(w http.ResponseWriter, req *http.Request) bool {
			if strings.HasPrefix(req.URL.Path, "/token") {
				return c.answer(w, req)
			}
			return status(http.StatusUnauthorized, "WWW-Authenticate", `Bearer realm="`+r.URL+`/token",service="x"`)(w, req)
		}
		attempts = append(attempts, attempt{what: name, name: ref, auth: auth, code: c.code, text: "token"})
	}
	allRefused(t, d, attempts)
	log := harness.Get(os.ReadFile(d.LogFile()))(t)
	if bytes.Contains(log, []byte(auth.Password)) {
		t.Error("the password is in the log, or in an error")
	}
}
