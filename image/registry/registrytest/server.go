// Package registrytest provides a registry for tests. It runs go-containerregistry's registry over
// HTTP, records the requests and lets tests inject faults.
package registrytest

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"

	ggcr "github.com/google/go-containerregistry/pkg/registry"
	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
)

// DiscardLog is a logger for servers whose errors are part of the test.
var DiscardLog = log.New(io.Discard, "", 0)

// Server is a registry on loopback. It is closed at the end of its test.
type Server struct {
	*httptest.Server
	// Before, if set, gets each GET and HEAD request first. If it returns true, it has answered.
	// Set it only while there are no requests.
	Before func(w http.ResponseWriter, r *http.Request) bool

	t        testing.TB
	registry http.Handler

	mu sync.Mutex
	// +checklocks:mu
	requests []string // "GET /v2/…"
	// +checklocks:mu
	headers []http.Header
}

// New starts a registry that speaks plain HTTP.
func New(t testing.TB) *Server { return Start(t, (*httptest.Server).Start) }

// NewTLS starts a registry with an untrusted certificate.
func NewTLS(t testing.TB) *Server { return Start(t, (*httptest.Server).StartTLS) }

// Start starts a registry with the given start function.
func Start(t testing.TB, start func(*httptest.Server)) *Server {
	t.Helper()
	s := &Server{t: t, registry: ggcr.New(ggcr.Logger(DiscardLog))}
	s.Server = httptest.NewUnstartedServer(http.HandlerFunc(s.serve))
	s.Server.Config.ErrorLog = DiscardLog
	start(s.Server)
	t.Cleanup(s.Server.Close)
	return s
}

func (s *Server) serve(w http.ResponseWriter, r *http.Request) {
	if r.Method == http.MethodGet || r.Method == http.MethodHead {
		s.note(r)
		if s.Before != nil && s.Before(w, r) {
			return
		}
	}
	s.registry.ServeHTTP(w, r)
}

func (s *Server) note(r *http.Request) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.requests = append(s.requests, r.Method+" "+r.URL.Path)
	s.headers = append(s.headers, r.Header.Clone())
}

// Wrap puts a handler in front of all others.
func (s *Server) Wrap(handler func(next http.Handler) http.Handler) {
	next := s.Config.Handler
	s.Config.Handler = handler(next)
}

// Note adds a request that the test has answered to the log.
func (s *Server) Note(r *http.Request) { s.note(r) }

// Host returns the registry's host and port.
func (s *Server) Host() string { return s.Listener.Addr().String() }

// Count returns how many requests contain a text, such as "GET /v2/".
func (s *Server) Count(text string) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	n := 0
	for _, r := range s.requests {
		if strings.Contains(r, text) {
			n++
		}
	}
	return n
}

// Requests returns the requests so far, as "GET /v2/…".
func (s *Server) Requests() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.requests)
}

// Headers returns all values of a header in the requests so far.
func (s *Server) Headers(name string) []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	var all []string
	for _, h := range s.headers {
		all = append(all, h.Values(name)...)
	}
	return all
}

// Answer returns the registry's own response.
func (s *Server) Answer(r *http.Request) *httptest.ResponseRecorder {
	rec := httptest.NewRecorder()
	s.registry.ServeHTTP(rec, r)
	return rec
}

// PutBlob stores a blob.
func (s *Server) PutBlob(repo string, data []byte) ocispec.Descriptor {
	s.t.Helper()
	d := digest.FromBytes(data)
	s.put(http.MethodPost, fmt.Sprintf("/v2/%s/blobs/uploads/?digest=%s", repo, d), "application/octet-stream", data)
	return ocispec.Descriptor{Digest: d, Size: int64(len(data))}
}

// PutManifest stores a manifest or index under a tag or digest.
func (s *Server) PutManifest(repo, name, mediaType string, data []byte) ocispec.Descriptor {
	s.t.Helper()
	s.put(http.MethodPut, fmt.Sprintf("/v2/%s/manifests/%s", repo, name), mediaType, data)
	return ocispec.Descriptor{MediaType: mediaType, Digest: digest.FromBytes(data), Size: int64(len(data))}
}

func (s *Server) put(method, path, mediaType string, data []byte) {
	s.t.Helper()
	req, err := http.NewRequest(method, s.URL+path, bytes.NewReader(data))
	if err != nil {
		s.t.Fatal(err)
	}
	req.Header.Set("Content-Type", mediaType)
	resp, err := s.Client().Do(req)
	if err != nil {
		s.t.Fatal(err)
	}
	defer resp.Body.Close()
	if resp.StatusCode/100 != 2 {
		s.t.Fatalf("put %s: %s", path, resp.Status)
	}
}

// Layer is a layer of a test image.
type Layer struct {
	Blob      []byte
	MediaType string        // empty: OCI's uncompressed tar
	DiffID    digest.Digest // empty: the blob's own digest
	Size      int64         // that the manifest claims; 0: the blob's own

	Annotations map[string]string
}

// PutImage stores an OCI image for this machine under a tag and returns the descriptor of its
// manifest. comment distinguishes images of the same layers.
func (s *Server) PutImage(repo, tag, comment string, layers ...Layer) ocispec.Descriptor {
	s.t.Helper()
	return s.putImage(repo, tag, comment, ocispec.MediaTypeImageManifest, ocispec.MediaTypeImageConfig, nil, layers)
}

// PutSOCIImage is PutImage for an image with a SOCI index, as "soci convert" makes it. The tag
// names an OCI index of both. ztocs has the table of each layer, or nil.
func (s *Server) PutSOCIImage(repo, tag string, layers []Layer, ztocs [][]byte) {
	s.t.Helper()
	node := &ocispec.Platform{OS: runtime.GOOS, Architecture: runtime.GOARCH}
	const kind = "application/vnd.amazon.soci.index.v2+json"
	m := ocispec.Manifest{MediaType: ocispec.MediaTypeImageManifest, ArtifactType: kind}
	m.SchemaVersion = 2
	m.Config = s.PutBlob(repo, []byte("{}"))
	m.Config.MediaType = kind
	for i, ztoc := range ztocs {
		if ztoc == nil {
			continue
		}
		d := s.PutBlob(repo, ztoc)
		d.MediaType = "application/octet-stream"
		d.Annotations = map[string]string{"com.amazon.soci.image-layer-digest": digest.FromBytes(layers[i].Blob).String()}
		m.Layers = append(m.Layers, d)
	}
	data := s.json(m)
	soci := s.PutManifest(repo, digest.FromBytes(data).String(), m.MediaType, data)
	img := s.putImage(repo, tag+"-image", "", ocispec.MediaTypeImageManifest, ocispec.MediaTypeImageConfig,
		map[string]string{"com.amazon.soci.index-digest": soci.Digest.String()}, layers)
	soci.ArtifactType, soci.Platform, img.Platform = kind, node, node
	index := ocispec.Index{MediaType: ocispec.MediaTypeImageIndex, Manifests: []ocispec.Descriptor{soci, img}}
	index.SchemaVersion = 2
	s.PutManifest(repo, tag, index.MediaType, s.json(index))
}

// PutDockerImage is PutImage with Docker's schema 2 media types.
func (s *Server) PutDockerImage(repo, tag, comment string, layers ...Layer) ocispec.Descriptor {
	s.t.Helper()
	return s.putImage(repo, tag, comment, "application/vnd.docker.distribution.manifest.v2+json",
		"application/vnd.docker.container.image.v1+json", nil, layers)
}

func (s *Server) putImage(repo, tag, comment, manifestType, configType string, annotations map[string]string,
	layers []Layer) ocispec.Descriptor {
	s.t.Helper()
	var config ocispec.Image
	config.OS, config.Architecture = runtime.GOOS, runtime.GOARCH
	config.History = []ocispec.History{{Comment: comment}}
	config.RootFS.Type = "layers"
	m := ocispec.Manifest{MediaType: manifestType, Annotations: annotations}
	m.SchemaVersion = 2
	for _, l := range layers {
		d := s.PutBlob(repo, l.Blob)
		if d.MediaType = l.MediaType; d.MediaType == "" {
			d.MediaType = ocispec.MediaTypeImageLayer
		}
		if l.DiffID == "" {
			l.DiffID = d.Digest
		}
		if l.Size != 0 {
			d.Size = l.Size
		}
		d.Annotations = l.Annotations
		m.Layers = append(m.Layers, d)
		config.RootFS.DiffIDs = append(config.RootFS.DiffIDs, l.DiffID)
	}
	m.Layers = slices.Clip(m.Layers)
	if m.Layers == nil {
		m.Layers = []ocispec.Descriptor{}
	}
	m.Config = s.PutBlob(repo, s.json(config))
	m.Config.MediaType = configType
	return s.PutManifest(repo, tag, manifestType, s.json(m))
}

// File is a file of a test artifact.
type File struct {
	Title   string // empty: the blob has no title
	Content []byte
}

// PutArtifact stores an OCI artifact of a type under a tag, as ORAS does, and returns the
// descriptor of its manifest.
func (s *Server) PutArtifact(repo, tag, artifactType string, files ...File) ocispec.Descriptor {
	s.t.Helper()
	m := ocispec.Manifest{MediaType: ocispec.MediaTypeImageManifest, ArtifactType: artifactType}
	m.SchemaVersion = 2
	m.Config = s.PutBlob(repo, []byte("{}"))
	m.Config.MediaType = ocispec.MediaTypeEmptyJSON
	for _, f := range files {
		d := s.PutBlob(repo, f.Content)
		d.MediaType = "application/octet-stream"
		if f.Title != "" {
			d.Annotations = map[string]string{ocispec.AnnotationTitle: f.Title}
		}
		m.Layers = append(m.Layers, d)
	}
	return s.PutManifest(repo, tag, m.MediaType, s.json(m))
}

func (s *Server) json(v any) []byte {
	s.t.Helper()
	data, err := json.Marshal(v)
	if err != nil {
		s.t.Fatal(err)
	}
	return data
}
