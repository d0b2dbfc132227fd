package registry

import (
	"bufio"
	"bytes"
	"crypto/rand"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"path/filepath"
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
	"berth/internal/errdefs"
)

// putImage stores an image whose layers are the given plain blobs.
func putImage(reg *registrytest.Server, repo, tag string, blobs ...[]byte) ocispec.Descriptor {
	var layers []registrytest.Layer
	for _, b := range blobs {
		layers = append(layers, registrytest.Layer{Blob: b})
	}
	return reg.PutImage(repo, tag, "", layers...)
}

// hostsDir writes a certs.d tree with one hosts.toml and returns its root.
func hostsDir(t *testing.T, host, content string) string {
	t.Helper()
	dir := t.TempDir()
	registrytest.WriteFile(t, filepath.Join(dir, host, "hosts.toml"), content)
	return dir
}

// open opens a repository, failing the test if it cannot.
func newClient(t testing.TB, cfg Config) *Client {
	t.Helper()
	c, err := NewClient(cfg)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func open(t *testing.T, cfg Config, ref string, cred Credentials) *Repository {
	t.Helper()
	r, err := ParseReference(ref)
	if err != nil {
		t.Fatal(err)
	}
	client := newClient(t, cfg)
	client.pause = time.Millisecond
	repo, err := client.Open(r, cred)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(repo.Close)
	return repo
}

// resolve opens and resolves.
func resolve(t *testing.T, cfg Config, ref string, cred Credentials) (*Image, error) {
	t.Helper()
	return open(t, cfg, ref, cred).Resolve(t.Context(), DefaultPlatform())
}

// readBlob reads the first layer of an image.
func readBlob(t *testing.T, repo *Repository, want ocispec.Descriptor) ([]byte, error) {
	t.Helper()
	b, err := repo.Blob(t.Context(), want, 0, nil)
	if err != nil {
		return nil, err
	}
	defer b.Close()
	return io.ReadAll(b)
}

func randomBytes(t *testing.T, n int) []byte {
	t.Helper()
	b := make([]byte, n)
	if _, err := rand.Read(b); err != nil {
		t.Fatal(err)
	}
	return b
}

func wantCode(t *testing.T, err error, code codes.Code, texts ...string) {
	t.Helper()
	if got := errdefs.Code(err); got != code {
		t.Errorf("code %v, want %v: %v", got, code, err)
	}
	wantText(t, err, texts...)
}

func wantUnavailable(t *testing.T, err error, texts ...string) {
	t.Helper()
	var u *UnavailableError
	if !errors.As(err, &u) {
		t.Errorf("not an UnavailableError: %v", err)
	}
	wantText(t, err, texts...)
}

func wantText(t *testing.T, err error, texts ...string) {
	t.Helper()
	for _, text := range texts {
		if err == nil || !strings.Contains(err.Error(), text) {
			t.Errorf("error %v does not contain %q", err, text)
		}
	}
}

func TestResolveAndRead(t *testing.T) {
	for name, start := range map[string]func(testing.TB) *registrytest.Server{"http": registrytest.New, "https": registrytest.NewTLS} {
		t.Run(name, func(t *testing.T) {
			reg := start(t)
			layer := randomBytes(t, 100_000)
			top := putImage(reg, "team/app", "v1", layer)
			for _, ref := range []string{"team/app:v1", "team/app@" + top.Digest.String()} {
				repo := open(t, Config{}, reg.Host()+"/"+ref, Credentials{})
				if d := repo.Digest(t.Context()); d != top.Digest {
					t.Errorf("%s: Digest is %s, want %s", ref, d, top.Digest)
				}
				img, err := repo.Resolve(t.Context(), DefaultPlatform())
				if err != nil {
					t.Fatal(err)
				}
				if img.Digest != top.Digest || digest.FromBytes(img.RawConfig) != img.ConfigDigest || len(img.Layers) != 1 {
					t.Errorf("%s: %+v", ref, img)
				}
				got, err := readBlob(t, repo, img.Layers[0].Blob)
				if err != nil || !bytes.Equal(got, layer) {
					t.Errorf("%s: layer of %d bytes, %v", ref, len(got), err)
				}
			}
		})
	}
}

func TestResolveIndex(t *testing.T) {
	reg := registrytest.New(t)
	ours := putImage(reg, "app", "ours", []byte("ours"))
	other := putImage(reg, "app", "other", []byte("other"))
	node := ocispec.Platform{OS: "linux", Architecture: "arm", Variant: "v7"}
	entry := func(d ocispec.Descriptor, platform string) ocispec.Descriptor {
		d.MediaType = ociManifest
		if platform != "" {
			p := parsePlatform(platform)
			d.Platform = &p
		}
		return d
	}
	index := func(mediaType string, entries ...ocispec.Descriptor) []byte {
		x := ocispec.Index{MediaType: mediaType, Manifests: entries}
		x.SchemaVersion = 2
		return mustJSON(t, x)
	}
	check := func(name, mediaType string, data []byte, want digest.Digest, code codes.Code) {
		t.Helper()
		top := reg.PutManifest("app", "index", mediaType, data)
		repo := open(t, Config{}, reg.Host()+"/app:index", Credentials{})
		img, err := repo.Resolve(t.Context(), node)
		if errdefs.Code(err) != code {
			t.Errorf("%s: %v, want %v", name, err, code)
		}
		if err == nil && (img.Digest != top.Digest || img.Layers[0].Blob.Digest != want) {
			t.Errorf("%s: %+v", name, img)
		}
		if err == nil && (img.Documents[0].Digest != top.Digest || !bytes.Contains(img.Documents[len(img.Documents)-1].Raw, []byte(want))) {
			t.Errorf("%s: the documents are %+v", name, img.Documents)
		}
	}
	oursLayer, otherLayer := digest.FromString("ours"), digest.FromString("other")
	check("oci", ociIndex, index(ociIndex, entry(other, "linux/amd64"), entry(ours, "linux/arm/v6")), oursLayer, codes.OK)
	check("docker", mediaTypeDockerList, index(mediaTypeDockerList, entry(other, "windows/arm/v7"), entry(ours, "linux/arm/v7")), oursLayer, codes.OK)
	check("best variant", ociIndex, index(ociIndex, entry(ours, "linux/arm/v5"), entry(other, "linux/arm/v7")), otherLayer, codes.OK)
	check("no match", ociIndex, index(ociIndex, entry(other, "linux/amd64")), "", codes.NotFound)
	check("empty", ociIndex, index(ociIndex, []ocispec.Descriptor{}...), "", codes.NotFound)
	check("without platform, of another", ociIndex, index(ociIndex, entry(other, "")), "", codes.NotFound)
	forNode := putPlatformImage(t, reg, "linux/arm/v6", "for the node")
	windows := putPlatformImage(t, reg, "windows/arm/v7", "windows")
	check("without platforms", ociIndex, index(ociIndex, entry(other, ""), entry(windows, ""), entry(forNode, "")),
		digest.FromString("for the node"), codes.OK)
	check("without platforms, none fits", ociIndex, index(ociIndex, entry(windows, ""), entry(other, "")), "", codes.FailedPrecondition)
	inner := entry(reg.PutManifest("app", "others", ociIndex, index(ociIndex, entry(other, ""), entry(windows, ""))), "")
	check("nested without platforms", ociIndex, index(ociIndex, inner, entry(forNode, "")), digest.FromString("for the node"), codes.OK)
	check("image before artifact", ociIndex, index(ociIndex, entry(other, ""), reg.PutArtifact("app", "artifact", "application/vnd.example",
		registrytest.File{Title: "f", Content: []byte("f")})), "", codes.NotFound)
	var many []ocispec.Descriptor
	for i := range maxFailed {
		many = append(many, entry(putPlatformImage(t, reg, "windows/arm/v7", fmt.Sprint(i)), ""))
	}
	check("limit", ociIndex, index(ociIndex, append(many, entry(forNode, ""))...), "", codes.FailedPrecondition)
	check("below the limit", ociIndex, index(ociIndex, append(many[1:], entry(forNode, ""))...), digest.FromString("for the node"), codes.OK)
	wrong := entry(ours, "linux/arm/v7")
	wrong.Size++
	check("wrong size", ociIndex, index(ociIndex, wrong), "", codes.DataLoss)
	wrong.Size = MaxManifestSize + 1
	check("huge size", ociIndex, index(ociIndex, wrong), "", codes.FailedPrecondition)

	nested := entry(ours, "linux/arm/v7")
	for depth := 1; depth <= MaxIndexDepth; depth++ {
		data := index(ociIndex, nested)
		check(fmt.Sprintf("%d deep", depth), ociIndex, data, oursLayer, codes.OK)
		d := reg.PutManifest("app", "inner", ociIndex, data)
		nested = entry(d, "linux/arm/v7")
		nested.MediaType = ociIndex
	}
	check("too deep", ociIndex, index(ociIndex, nested), "", codes.FailedPrecondition)
}

// putPlatformImage stores an image with one layer in the repository app.
func putPlatformImage(t *testing.T, reg *registrytest.Server, platform, content string) ocispec.Descriptor {
	t.Helper()
	blob := reg.PutBlob("app", []byte(content))
	blob.MediaType = ocispec.MediaTypeImageLayer
	img := ocispec.Image{Platform: parsePlatform(platform), RootFS: ocispec.RootFS{Type: "layers", DiffIDs: []digest.Digest{blob.Digest}}}
	config := reg.PutBlob("app", mustJSON(t, img))
	config.MediaType = ociConfig
	m := ocispec.Manifest{MediaType: ociManifest, Config: config, Layers: []ocispec.Descriptor{blob}}
	m.SchemaVersion = 2
	return reg.PutManifest("app", digest.FromString(platform+content).Encoded(), ociManifest, mustJSON(t, m))
}

func TestIndexDigestIsCheckedBeforeUse(t *testing.T) {
	reg := registrytest.New(t)
	reg.Before = func(w http.ResponseWriter, r *http.Request) bool {
		w.Header().Set("Content-Type", ociIndex)
		fmt.Fprintf(w, `{"schemaVersion":2,"manifests":[%s]}`, descriptor(ociManifest, "sha256:../../../../secret", 1))
		return true
	}
	_, err := resolve(t, Config{}, reg.Host()+"/app:v1", Credentials{})
	wantCode(t, err, codes.FailedPrecondition, "sha256:../../../../secret")
	if reg.Count("secret") != 0 {
		t.Error("the digest became a path")
	}
}

func TestResolveRefusesOtherSystem(t *testing.T) {
	reg := registrytest.New(t)
	putImage(reg, "app", "v1", []byte("x"))
	repo := open(t, Config{}, reg.Host()+"/app:v1", Credentials{})
	_, err := repo.Resolve(t.Context(), ocispec.Platform{OS: "plan9", Architecture: "amd64"})
	wantCode(t, err, codes.FailedPrecondition, "this node is plan9/amd64")
}

func TestResolveVerifies(t *testing.T) {
	reg := registrytest.New(t)
	top := putImage(reg, "app", "v1", []byte("x"))
	tamper := func(part string, change func(http.Header, []byte) []byte) {
		reg.Before = func(w http.ResponseWriter, r *http.Request) bool {
			if !strings.Contains(r.URL.Path, part) {
				return false
			}
			answer := reg.Answer(r)
			body := change(answer.Header(), answer.Body.Bytes())
			maps.Copy(w.Header(), answer.Header())
			_, _ = w.Write(body)
			return true
		}
	}
	space := func(h http.Header, b []byte) []byte { h.Del("Content-Length"); return append(b, ' ') }
	tamper("/manifests/", space)
	_, err := resolve(t, Config{}, reg.Host()+"/app@"+top.Digest.String(), Credentials{})
	wantCode(t, err, codes.DataLoss, "digest of the content is", top.Digest.String())
	_, err = resolve(t, Config{}, reg.Host()+"/app:v1", Credentials{})
	wantCode(t, err, codes.DataLoss, "digest of the content is") // the header says otherwise
	tamper("/blobs/", space)
	_, err = resolve(t, Config{}, reg.Host()+"/app:v1", Credentials{})
	wantCode(t, err, codes.DataLoss, "fetch config", "size is")
	tamper("/blobs/", func(_ http.Header, b []byte) []byte { return bytes.Replace(b, []byte("linux"), []byte("xxxxx"), 1) })
	_, err = resolve(t, Config{}, reg.Host()+"/app:v1", Credentials{})
	wantCode(t, err, codes.DataLoss, "fetch config", "digest of the content")
	tamper("/manifests/", func(h http.Header, _ []byte) []byte {
		h.Del("Content-Length")
		h.Del("Docker-Content-Digest")
		return make([]byte, MaxManifestSize+1)
	})
	_, err = resolve(t, Config{}, reg.Host()+"/app:v1", Credentials{})
	wantCode(t, err, codes.FailedPrecondition, "larger than the limit")
}

func TestStatusErrors(t *testing.T) {
	reg := registrytest.New(t)
	status, body := 0, ""
	reg.Before = func(w http.ResponseWriter, r *http.Request) bool {
		w.WriteHeader(status)
		_, _ = io.WriteString(w, body)
		return true
	}
	ask := func(s int, b string) error {
		status, body = s, b
		_, err := resolve(t, Config{}, reg.Host()+"/app:v1", Credentials{})
		return err
	}
	wantCode(t, ask(401, ""), codes.Unauthenticated, reg.Host())
	wantCode(t, ask(403, `{"errors":[{"code":"DENIED","message":"not\nfor you"}]}`), codes.PermissionDenied, "pull access denied", "DENIED: notfor you")
	wantCode(t, ask(404, `{"errors":[{"code":"MANIFEST_UNKNOWN","message":"`+strings.Repeat("x", 10_000)+`"}]}`), codes.NotFound, "not found", "MANIFEST_UNKNOWN: xxx")
	if err := ask(404, strings.Repeat("x", 10_000)); len(err.Error()) > 1000 || strings.Contains(err.Error(), "xxx") {
		t.Errorf("the error quotes the body: %d bytes", len(err.Error()))
	}
	wantCode(t, ask(418, ""), codes.Unknown, "418")
	asked := reg.Count("GET")
	wantUnavailable(t, ask(503, ""), "503 Service Unavailable")
	if n := reg.Count("GET") - asked; n != maxRounds {
		t.Errorf("asked %d times, want %d", n, maxRounds)
	}
	wantUnavailable(t, ask(429, ""), "429")
}

// The text of an error comes byte by byte, each before the stall timeout.
func TestSlowErrorText(t *testing.T) {
	t.Parallel()
	reg := registrytest.New(t)
	reg.Before = func(w http.ResponseWriter, r *http.Request) bool {
		w.WriteHeader(http.StatusNotFound)
		for r.Context().Err() == nil { // ends when the client has gone
			_, _ = w.Write([]byte(" "))
			w.(http.Flusher).Flush()
			time.Sleep(time.Millisecond)
		}
		return true
	}
	repo := open(t, Config{}, reg.Host()+"/app:v1", Credentials{})
	repo.endpoints[0].stall = soon // once there are headers
	_, err := repo.Resolve(t.Context(), DefaultPlatform())
	wantCode(t, err, codes.NotFound)
}

func TestRegistryDown(t *testing.T) {
	reg := registrytest.New(t)
	host := reg.Host()
	reg.Close()
	_, err := resolve(t, Config{}, host+"/app:v1", Credentials{})
	wantUnavailable(t, err, host, "connection refused")
	repo := open(t, Config{}, host+"/app:v1", Credentials{})
	_, err = readBlob(t, repo, ocispec.Descriptor{Digest: sha256Of0, Size: 1})
	wantUnavailable(t, err, sha256Of0, host+"/app:v1", "at byte 0 of 1", "connection refused")
}

func TestMirrorsInOrder(t *testing.T) {
	layer := randomBytes(t, 1000)
	server, first, second := registrytest.New(t), registrytest.New(t), registrytest.New(t)
	for _, reg := range []*registrytest.Server{server, first, second} {
		putImage(reg, "library/app", "v1", layer)
	}
	tree := hostsDir(t, "docker.io", fmt.Sprintf(`
server = %q
[host.%q]
[host.%q]
`, server.URL, second.URL, first.URL)) // not in alphabetical order, whatever the ports are
	cfg := Config{Sources: Sources{Dirs: []string{tree}}}
	pull := func() ([]byte, error) {
		repo := open(t, cfg, "app:v1", Credentials{})
		img, err := repo.Resolve(t.Context(), DefaultPlatform())
		if err != nil {
			return nil, err
		}
		return readBlob(t, repo, img.Layers[0].Blob)
	}
	counts := func() [3]int { return [3]int{second.Count("GET"), first.Count("GET"), server.Count("GET")} }
	check := func(what string, want [3]int) {
		t.Helper()
		before := counts()
		got, err := pull()
		if err != nil || !bytes.Equal(got, layer) {
			t.Errorf("%s: %v", what, err)
		}
		after := counts()
		if diff := [3]int{after[0] - before[0], after[1] - before[1], after[2] - before[2]}; diff != want {
			t.Errorf("%s: requests %v, want %v", what, diff, want)
		}
	}
	check("all up", [3]int{3, 0, 0})
	var ns []string
	status := 404
	second.Before = func(w http.ResponseWriter, r *http.Request) bool {
		ns = append(ns, r.URL.Query().Get("ns"))
		w.WriteHeader(status)
		return true
	}
	check("first mirror lacks it", [3]int{3, 3, 0})
	if !slices.Equal(ns, []string{"docker.io", "docker.io", "docker.io"}) {
		t.Errorf("mirror was told the namespaces %q", ns)
	}
	status = 500
	check("first mirror fails", [3]int{3, 3, 0})
	first.Before = func(w http.ResponseWriter, r *http.Request) bool { w.WriteHeader(403); return true }
	check("both mirrors fail", [3]int{3, 3, 3})
	second.Close()
	check("a mirror is down", [3]int{0, 3, 3})
	server.Before = func(w http.ResponseWriter, r *http.Request) bool { w.WriteHeader(404); return true }
	_, err := pull()
	wantCode(t, err, codes.NotFound, second.Host(), "connection refused", first.Host(), "403", server.Host(), "404")
}

// A mirror that cannot be reached costs a pull one attempt, not one a request.
func TestMirrorThatIsDownIsAskedOnce(t *testing.T) {
	layer := randomBytes(t, 1000)
	server := registrytest.New(t)
	putImage(server, "library/app", "v1", layer)
	mirror, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var asked atomic.Int32
	served := make(chan struct{})
	go func() {
		defer close(served)
		for {
			conn, err := mirror.Accept()
			if err != nil {
				return
			}
			asked.Add(1)
			_, _ = http.ReadRequest(bufio.NewReader(conn))
			_, _ = conn.Write([]byte("no HTTP\n"))
			_ = conn.Close()
		}
	}()
	defer func() { _ = mirror.Close(); <-served }()
	tree := hostsDir(t, "docker.io", fmt.Sprintf("server = %q\n[host.%q]\n", server.URL, "http://"+mirror.Addr().String()))
	repo := open(t, Config{Sources: Sources{Dirs: []string{tree}}}, "app:v1", Credentials{})
	img, err := repo.Resolve(t.Context(), DefaultPlatform())
	if err != nil {
		t.Fatal(err)
	}
	if got, err := readBlob(t, repo, img.Layers[0].Blob); err != nil || !bytes.Equal(got, layer) {
		t.Errorf("layer: %v", err)
	}
	if n := asked.Load(); n != 1 {
		t.Errorf("the mirror was asked %d times", n)
	}
	server.Before = func(w http.ResponseWriter, _ *http.Request) bool { w.WriteHeader(http.StatusNotFound); return true }
	_, err = repo.Resolve(t.Context(), DefaultPlatform())
	wantCode(t, err, codes.NotFound, mirror.Addr().String(), "malformed HTTP", server.Host())
}

func TestCapabilities(t *testing.T) {
	server, mirror := registrytest.New(t), registrytest.New(t)
	layer := []byte("layer")
	for _, reg := range []*registrytest.Server{server, mirror} {
		putImage(reg, "app", "v1", layer)
	}
	tree := hostsDir(t, "example.com", fmt.Sprintf("server = %q\n[host.%q]\ncapabilities = [\"pull\"]", server.URL, mirror.URL))
	repo := open(t, Config{Sources: Sources{Dirs: []string{tree}}}, "example.com/app:v1", Credentials{})
	img, err := repo.Resolve(t.Context(), DefaultPlatform())
	if err != nil {
		t.Fatal(err)
	}
	if mirror.Count("manifests") != 0 || server.Count("manifests") != 1 {
		t.Error("a mirror without the capability was asked to resolve a tag")
	}
	if _, err := readBlob(t, repo, img.Layers[0].Blob); err != nil || mirror.Count("blobs") != 2 {
		t.Errorf("blobs did not come from the mirror: %v", err)
	}
	tree = hostsDir(t, "example.com", fmt.Sprintf("server = %q\ncapabilities = [\"pull\"]", server.URL))
	_, err = resolve(t, Config{Sources: Sources{Dirs: []string{tree}}}, "example.com/app:v1", Credentials{})
	wantCode(t, err, codes.FailedPrecondition, "no host")
}

func TestCustomCAAndSkipVerify(t *testing.T) {
	reg := registrytest.NewTLS(t)
	putImage(reg, "app", "v1", []byte("x"))
	ca := registrytest.WriteFile(t, filepath.Join(t.TempDir(), "ca.pem"), pemOf(reg.Certificate()))
	for name, c := range map[string]struct {
		options string
		ok      bool
	}{
		"unknown CA":  {"", false},
		"ca":          {fmt.Sprintf("ca = %q", ca), true},
		"ca list":     {fmt.Sprintf("ca = [%q]", ca), true},
		"skip_verify": {"skip_verify = true", true},
	} {
		tree := hostsDir(t, "example.com", fmt.Sprintf("server = %q\n%s", reg.URL, c.options))
		_, err := resolve(t, Config{Sources: Sources{Dirs: []string{tree}}}, "example.com/app:v1", Credentials{})
		if c.ok && err != nil {
			t.Errorf("%s: %v", name, err)
		} else if !c.ok {
			wantUnavailable(t, err, "certificate signed by unknown authority")
		}
	}
	_, err := newClient(t, Config{Sources: Sources{Dirs: []string{hostsDir(t, "example.com", `ca = "missing.pem"`)}}}).Open(Reference{Domain: "example.com", Repository: "app", Tag: "v1"}, Credentials{})
	wantCode(t, err, codes.FailedPrecondition, "missing.pem")
}

func TestClientCertificate(t *testing.T) {
	cert, key, pool := clientCertificate(t)
	reg := registrytest.Start(t, func(s *httptest.Server) {
		s.TLS = &tls.Config{ClientAuth: tls.RequireAndVerifyClientCert, ClientCAs: pool}
		s.StartTLS()
	})
	dir := t.TempDir()
	certFile, keyFile := registrytest.WriteFile(t, filepath.Join(dir, "a.cert"), cert), registrytest.WriteFile(t, filepath.Join(dir, "a.key"), key)
	both := registrytest.WriteFile(t, filepath.Join(dir, "both.pem"), cert+key)
	docker := t.TempDir()
	registrytest.WriteFile(t, filepath.Join(docker, reg.Host(), "x.cert"), cert)
	registrytest.WriteFile(t, filepath.Join(docker, reg.Host(), "x.key"), key)
	registrytest.WriteFile(t, filepath.Join(docker, reg.Host(), "x.crt"), pemOf(reg.Certificate()))
	for name, dirs := range map[string]string{
		"pair":             hostsDir(t, reg.Host(), fmt.Sprintf("skip_verify = true\nclient = [[%q, %q]]", certFile, keyFile)),
		"one file":         hostsDir(t, reg.Host(), fmt.Sprintf("skip_verify = true\nclient = %q", both)),
		"docker directory": docker,
	} {
		_, err := resolve(t, Config{Sources: Sources{Dirs: []string{dirs}}}, reg.Host()+"/app:v1", Credentials{})
		wantCode(t, err, codes.NotFound, name[:0], "404")
	}
	_, err := resolve(t, Config{}, reg.Host()+"/app:v1", Credentials{})
	wantUnavailable(t, err)
}

func TestOverridePathAndHeaders(t *testing.T) {
	reg := registrytest.New(t)
	top := putImage(reg, "app", "v1", []byte("x"))
	var paths, values []string
	reg.Before = func(w http.ResponseWriter, r *http.Request) bool {
		paths = append(paths, r.URL.Path)
		values = append(values, r.Header.Get("X-Key")+r.Header.Get("Authorization"))
		r.URL.Path = strings.Replace(r.URL.Path, "/artifactory/api/docker/remote/", "/v2/", 1)
		return false
	}
	tree := hostsDir(t, "example.com", fmt.Sprintf(`
[host."%s/artifactory/api/docker/remote"]
  override_path = true
  [host."%s/artifactory/api/docker/remote".header]
    x-key = "k"
    Authorization = ["Bearer configured"]
`, reg.URL, reg.URL))
	img, err := resolve(t, Config{Sources: Sources{Dirs: []string{tree}}}, "example.com/app:v1", Credentials{})
	if err != nil || img.Digest != top.Digest {
		t.Fatalf("%+v, %v", img, err)
	}
	if paths[0] != "/artifactory/api/docker/remote/app/manifests/v1" || values[0] != "kBearer configured" {
		t.Errorf("asked %q with %q", paths[0], values[0])
	}
}

// auth protects a registry: bearer by a token server (a path of its own), or basic.
type auth struct {
	scheme         string
	user, password string
	identity       string // accepted refresh token
	realm          string // empty: this server's /token
	grants         int
	valid          string // the one valid bearer token
	scopes         []string
}

func (a *auth) protect(reg *registrytest.Server) {
	if a.realm == "" {
		a.realm = reg.URL + "/token"
	}
	var mu sync.Mutex
	reg.Wrap(func(next http.Handler) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			mu.Lock()
			defer mu.Unlock()
			switch {
			case r.URL.Path == "/token":
				a.token(w, r)
			case r.Method == http.MethodGet && !a.allows(r):
				reg.Note(r)
				if a.scheme == "basic" {
					w.Header().Set("WWW-Authenticate", `Basic realm="test"`)
				} else {
					w.Header().Set("WWW-Authenticate", fmt.Sprintf(`Bearer realm=%q,service="test",scope="repository:app:pull"`, a.realm))
				}
				w.WriteHeader(http.StatusUnauthorized)
			default:
				next.ServeHTTP(w, r)
			}
		})
	})
}

func (a *auth) allows(r *http.Request) bool {
	if a.scheme == "basic" {
		u, p, ok := r.BasicAuth()
		return ok && u == a.user && p == a.password
	}
	return a.valid != "" && r.Header.Get("Authorization") == "Bearer "+a.valid
}

// token is the token server: GET with basic authentication, POST with a refresh token.
func (a *auth) token(w http.ResponseWriter, r *http.Request) {
	_ = r.ParseForm()
	u, p, basic := r.BasicAuth()
	ok := a.user == "" && a.identity == ""
	ok = ok || basic && u == a.user && p == a.password
	ok = ok || a.identity != "" && r.Method == http.MethodPost && r.PostForm.Get("grant_type") == "refresh_token" && r.PostForm.Get("refresh_token") == a.identity
	if !ok {
		w.WriteHeader(http.StatusUnauthorized)
		_, _ = io.WriteString(w, `{"details":"hunter2 is not the password"}`)
		return
	}
	a.grants++
	if !strings.Contains(a.valid, "\n") {
		a.valid = fmt.Sprintf("token-%d", a.grants)
	}
	a.scopes = append(a.scopes, r.Form.Get("scope"))
	fmt.Fprintf(w, `{"token":%q,"expires_in":300}`, a.valid)
}

func TestAuthentication(t *testing.T) {
	for name, c := range map[string]struct {
		auth auth
		cred Credentials
		code codes.Code
	}{
		"basic":                         {auth{scheme: "basic", user: "u", password: "hunter2"}, Credentials{Username: "u", Password: "hunter2"}, codes.OK},
		"basic, wrong password":         {auth{scheme: "basic", user: "u", password: "hunter2"}, Credentials{Username: "u", Password: "hunter3"}, codes.Unauthenticated},
		"basic, none":                   {auth{scheme: "basic", user: "u", password: "hunter2"}, Credentials{}, codes.Unauthenticated},
		"bearer, anonymous":             {auth{}, Credentials{}, codes.OK},
		"bearer, password":              {auth{user: "u", password: "hunter2"}, Credentials{Username: "u", Password: "hunter2"}, codes.OK},
		"bearer, wrong password":        {auth{user: "u", password: "hunter2"}, Credentials{Username: "u", Password: "hunter3"}, codes.Unauthenticated},
		"bearer, none":                  {auth{user: "u", password: "hunter2"}, Credentials{}, codes.Unauthenticated},
		"identity token":                {auth{identity: "hunter2"}, Credentials{IdentityToken: "hunter2"}, codes.OK},
		"identity token, wrong":         {auth{identity: "hunter2"}, Credentials{IdentityToken: "hunter3"}, codes.Unauthenticated},
		"registry token":                {auth{user: "u", valid: "hunter2"}, Credentials{RegistryToken: "hunter2"}, codes.OK},
		"registry token, wrong":         {auth{user: "u", valid: "hunter2"}, Credentials{RegistryToken: "hunter3"}, codes.Unauthenticated},
		"for this server":               {auth{user: "u", password: "p"}, Credentials{Username: "u", Password: "p", ServerAddress: "http://SELF/v2/"}, codes.OK},
		"for another server":            {auth{user: "u", password: "p"}, Credentials{Username: "u", Password: "p", ServerAddress: "example.com"}, codes.Unauthenticated},
		"token with a newline":          {auth{valid: "hunter2\nX: y"}, Credentials{}, codes.Unauthenticated},
		"realm is no URL":               {auth{realm: "::"}, Credentials{}, codes.Unauthenticated},
		"realm is not http":             {auth{realm: "file:///etc/passwd"}, Credentials{}, codes.Unauthenticated},
		"registry token, other server":  {auth{user: "u", valid: "t"}, Credentials{RegistryToken: "t", ServerAddress: "example.com"}, codes.Unauthenticated},
		"bearer, password, wrong realm": {auth{user: "u", realm: "ftp://x/"}, Credentials{Username: "u", Password: "hunter2"}, codes.Unauthenticated},
	} {
		t.Run(name, func(t *testing.T) {
			reg := registrytest.New(t)
			layer := randomBytes(t, 100)
			putImage(reg, "app", "v1", layer)
			c.auth.protect(reg)
			c.cred.ServerAddress = strings.Replace(c.cred.ServerAddress, "SELF", reg.Host(), 1)
			repo := open(t, Config{}, reg.Host()+"/app:v1", c.cred)
			img, err := repo.Resolve(t.Context(), DefaultPlatform())
			wantCode(t, err, c.code)
			if err != nil {
				for _, secret := range []string{"hunter2", "hunter3"} {
					if strings.Contains(err.Error(), secret) {
						t.Errorf("the error shows a secret or quotes the token server: %v", err)
					}
				}
				return
			}
			if _, err := readBlob(t, repo, img.Layers[0].Blob); err != nil {
				t.Error(err)
			}
			if c.auth.grants > 1 {
				t.Errorf("%d tokens were fetched", c.auth.grants)
			}
			for _, s := range c.auth.scopes {
				if s != "repository:app:pull" {
					t.Errorf("asked for the scope %q", s)
				}
			}
		})
	}
}

func TestExpiredTokenIsRenewed(t *testing.T) {
	reg := registrytest.New(t)
	layer := randomBytes(t, 100)
	putImage(reg, "app", "v1", layer)
	a := &auth{user: "u", password: "p"}
	a.protect(reg)
	repo := open(t, Config{}, reg.Host()+"/app:v1", Credentials{Username: "u", Password: "p"})
	img, err := repo.Resolve(t.Context(), DefaultPlatform())
	if err != nil {
		t.Fatal(err)
	}
	a.valid = "something else"
	if _, err := readBlob(t, repo, img.Layers[0].Blob); err != nil || a.grants != 2 {
		t.Errorf("%v after %d tokens", err, a.grants)
	}
}

func TestTokenServerNeedsTLSWhereTheRegistryHasIt(t *testing.T) {
	reg := registrytest.NewTLS(t)
	plain := registrytest.New(t)
	a := &auth{user: "u", password: "p", realm: plain.URL + "/token"}
	a.protect(reg)
	tree := hostsDir(t, "example.com", fmt.Sprintf("server = %q\nskip_verify = true", reg.URL))
	_, err := resolve(t, Config{Sources: Sources{Dirs: []string{tree}}}, "example.com/app:v1", Credentials{Username: "u", Password: "p"})
	wantCode(t, err, codes.Unauthenticated, "without TLS")
	if plain.Count("") != 0 {
		t.Error("the plain token server was asked")
	}
}

func TestCredentialsDoNotReachMirrors(t *testing.T) {
	server, mirror := registrytest.New(t), registrytest.New(t)
	layer := randomBytes(t, 100)
	putImage(server, "app", "v1", layer)
	putImage(mirror, "app", "v1", layer)
	guard, thief := &auth{user: "u", password: "p"}, &auth{scheme: "basic", user: "m", password: "q"}
	guard.protect(server)
	thief.protect(mirror)
	tree := hostsDir(t, "example.com", fmt.Sprintf("server = %q\n[host.%q]", server.URL, mirror.URL))
	cred := Credentials{Username: "u", Password: "p"}
	if _, err := resolve(t, Config{Sources: Sources{Dirs: []string{tree}}}, "example.com/app:v1", cred); err != nil {
		t.Fatal(err)
	}
	if got := mirror.Headers("Authorization"); len(got) != 0 {
		t.Errorf("the mirror got %q", got)
	}
	if server.Count("GET /v2") == 0 {
		t.Error("the server was not asked")
	}
	cred = Credentials{RegistryToken: "t"}
	_, err := resolve(t, Config{Sources: Sources{Dirs: []string{tree}}}, "example.com/app:v1", cred)
	wantCode(t, err, codes.Unauthenticated)
	if got := mirror.Headers("Authorization"); len(got) != 0 {
		t.Errorf("the mirror got %q", got)
	}
	// Only the entry for the mirror's host in docker's configuration may be sent there.
	docker := registrytest.WriteFile(t, filepath.Join(t.TempDir(), "config.json"), fmt.Sprintf(`{"auths":{%q:{"username":"m","password":"q"}}}`, mirror.Host()))
	asked := server.Count("")
	if _, err := resolve(t, Config{Sources: Sources{Dirs: []string{tree}, DockerConfig: docker}}, "example.com/app:v1", Credentials{}); err != nil || server.Count("") != asked {
		t.Errorf("the mirror did not serve its own user: %v", err)
	}
}

func TestRegistryTokenFromDockerConfig(t *testing.T) {
	reg := registrytest.New(t)
	putImage(reg, "app", "v1", []byte("x"))
	(&auth{user: "u", valid: "t"}).protect(reg)
	docker := registrytest.WriteFile(t, filepath.Join(t.TempDir(), "config.json"), fmt.Sprintf(`{"auths":{%q:{"registrytoken":"t"}}}`, reg.Host()))
	if _, err := resolve(t, Config{Sources: Sources{DockerConfig: docker}}, reg.Host()+"/app:v1", Credentials{}); err != nil {
		t.Error(err)
	}
	docker = registrytest.WriteFile(t, filepath.Join(t.TempDir(), "config.json"), fmt.Sprintf(`{"auths":{%q:{"registrytoken":"hunter2"}}}`, reg.Host()))
	_, err := resolve(t, Config{Sources: Sources{DockerConfig: docker}}, reg.Host()+"/app:v1", Credentials{})
	wantCode(t, err, codes.Unauthenticated, "refused")
}

// TestMirrorWithAPageInsteadOfAManifest: the next host is not checked against what a mirror
// returned.
func TestMirrorWithAPageInsteadOfAManifest(t *testing.T) {
	server, mirror := registrytest.New(t), registrytest.New(t)
	top := putImage(server, "app", "v1", []byte("x"))
	mirror.Before = func(w http.ResponseWriter, r *http.Request) bool {
		_, _ = io.WriteString(w, "<html>Please log in to the network</html>")
		return true
	}
	tree := hostsDir(t, "example.com", fmt.Sprintf("server = %q\n[host.%q]", server.URL, mirror.URL))
	img, err := resolve(t, Config{Sources: Sources{Dirs: []string{tree}}}, "example.com/app:v1", Credentials{})
	if err != nil || img.Digest != top.Digest {
		t.Errorf("%+v, %v", img, err)
	}
}

func TestRedirectGetsNoCredentials(t *testing.T) {
	storage := registrytest.New(t)
	layer := randomBytes(t, 1000)
	storage.Before = func(w http.ResponseWriter, r *http.Request) bool {
		if r.URL.Query().Get("demand") != "" {
			w.Header().Set("WWW-Authenticate", fmt.Sprintf(`Bearer realm="%s/token"`, storage.URL))
			w.WriteHeader(http.StatusUnauthorized)
			_, _ = io.WriteString(w, `{"errors":[{"code":"INTERNAL","message":"page of the metadata server"}]}`)
			return true
		}
		_, _ = w.Write(layer)
		return true
	}
	reg := registrytest.New(t)
	putImage(reg, "app", "v1", layer)
	(&auth{scheme: "basic", user: "u", password: "p"}).protect(reg)
	query := "?X-Amz-Signature=hunter2"
	blob := digest.FromBytes(layer)
	reg.Wrap(func(next http.Handler) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if _, _, ok := r.BasicAuth(); ok && strings.HasSuffix(r.URL.Path, blob.Encoded()) {
				http.Redirect(w, r, storage.URL+"/bucket/object"+query, http.StatusTemporaryRedirect)
				return
			}
			next.ServeHTTP(w, r)
		})
	})
	tree := hostsDir(t, "example.com", fmt.Sprintf("server = %q\n[header]\nX-Secret = \"s\"\nCookie = \"c\"", reg.URL))
	repo := open(t, Config{Sources: Sources{Dirs: []string{tree}}}, "example.com/app:v1", Credentials{Username: "u", Password: "p"})
	img, err := repo.Resolve(t.Context(), DefaultPlatform())
	if err != nil {
		t.Fatal(err)
	}
	got, err := readBlob(t, repo, img.Layers[0].Blob)
	if err != nil || !bytes.Equal(got, layer) {
		t.Fatalf("%d bytes, %v", len(got), err)
	}
	query += "&demand=1"
	_, err = readBlob(t, repo, img.Layers[0].Blob)
	wantCode(t, err, codes.Unauthenticated)
	if strings.Contains(err.Error(), "hunter2") || strings.Contains(err.Error(), "metadata") {
		t.Errorf("the error shows the URL or the page: %v", err)
	}
	if storage.Count("/token") != 0 {
		t.Error("the target of a redirect was taken for a token server")
	}
	storage.Close()
	_, err = readBlob(t, repo, img.Layers[0].Blob)
	wantUnavailable(t, err, "connection refused")
	if strings.Contains(err.Error(), "hunter2") || strings.Contains(err.Error(), "bucket") {
		t.Errorf("the error shows the URL: %v", err)
	}
	for _, name := range []string{"Authorization", "Cookie", "X-Secret", "Referer"} {
		if got := storage.Headers(name); len(got) != 0 {
			t.Errorf("%s: %q went along with the redirect", name, got)
		}
	}
	if reg.Headers("X-Secret") == nil {
		t.Error("the registry itself did not get its header")
	}
}

func TestIdentityTokenIsNotRedirected(t *testing.T) {
	for name, c := range map[string]struct {
		target func(reg, other *registrytest.Server) string
		code   codes.Code
	}{
		"same host": {func(reg, _ *registrytest.Server) string { return reg.URL + "/token" }, codes.OK},
		"other host": {func(_, other *registrytest.Server) string {
			return strings.Replace(other.URL, "127.0.0.1", "localhost", 1) + "/token"
		}, codes.Unauthenticated},
	} {
		t.Run(name, func(t *testing.T) {
			reg, other := registrytest.New(t), registrytest.New(t)
			putImage(reg, "app", "v1", []byte("x"))
			(&auth{identity: "hunter2", realm: reg.URL + "/moved"}).protect(reg)
			reg.Wrap(func(next http.Handler) http.Handler {
				return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
					if r.URL.Path == "/moved" {
						http.Redirect(w, r, c.target(reg, other), http.StatusTemporaryRedirect)
						return
					}
					next.ServeHTTP(w, r)
				})
			})
			_, err := resolve(t, Config{}, reg.Host()+"/app:v1", Credentials{IdentityToken: "hunter2"})
			wantCode(t, err, c.code)
			if c.code != codes.OK {
				wantText(t, err, "redirects the identity token")
			}
			if n := other.Count(""); n != 0 {
				t.Errorf("the other host was asked %d times", n)
			}
		})
	}
}

// The error of a redirect loop names the URLs, but not what may be a token in them.
func TestRedirectLoopEnds(t *testing.T) {
	reg, other := registrytest.New(t), registrytest.New(t)
	other.Before = func(w http.ResponseWriter, r *http.Request) bool {
		http.Redirect(w, r, reg.URL+"/v2/app/manifests/v1?token=hunter2", http.StatusFound)
		return true
	}
	asked := "https://" + reg.Host() // before berth knows that it speaks plain HTTP
	for to, want := range map[string]string{
		"?again=hunter2":               asked + "/v2/app/manifests/v1",
		"/hunter2":                     asked + "/v2/app/manifests/v1, " + asked + "/…",
		other.URL + "/hunter2?hunter2": asked + "/v2/app/manifests/v1, " + other.URL + "/…",
	} {
		reg.Before = func(w http.ResponseWriter, r *http.Request) bool {
			http.Redirect(w, r, to, http.StatusFound)
			return true
		}
		_, err := resolve(t, Config{}, reg.Host()+"/app:v1", Credentials{})
		wantUnavailable(t, err, "more than 10 redirects: "+want)
		if err != nil && strings.Contains(err.Error(), "hunter2") {
			t.Errorf("the error shows a URL: %v", err)
		}
	}
}

// Text of a server in errors is short and printable, and contains no URL with a token.
func TestForeignTextInErrors(t *testing.T) {
	const token = "s3cret"
	for name, location := range map[string]string{
		"no URL":        "https://storage.example/%zz?token=" + token,
		"odd scheme":    strings.Repeat("x", 5000) + "://storage.example/?token=" + token,
		"long host":     "https://" + strings.Repeat("x", 5000) + "/?token=" + token,
		"port is none":  "https://storage.example:" + token + "/",
		"no host":       "https:///?token=" + token,
		"control bytes": "https://\u009b31mx/?token=" + token,
	} {
		reg := registrytest.New(t)
		reg.Before = func(w http.ResponseWriter, r *http.Request) bool {
			w.Header().Set("Location", location)
			w.WriteHeader(http.StatusTemporaryRedirect)
			return true
		}
		_, err := resolve(t, Config{}, reg.Host()+"/app:v1", Credentials{})
		if text := fmt.Sprint(err); err == nil || strings.Contains(text, token) || len(text) > 1000 || strings.Contains(text, "\u009b") {
			t.Errorf("%s: %d bytes: %.2000q", name, len(text), text)
		}
	}
}

func TestDialTimeoutOption(t *testing.T) {
	h := hostConfig{DialTimeout: time.Nanosecond}
	tr, err := newConnections(&h, nil, time.Minute)
	if err != nil {
		t.Fatal(err)
	}
	_, err = tr.RoundTrip(&http.Request{Method: http.MethodGet, Header: http.Header{}, URL: &url.URL{Scheme: "http", Host: "127.0.0.1:1"}})
	wantText(t, err, "i/o timeout")
}

func parsePlatform(s string) ocispec.Platform {
	parts := append(strings.Split(s, "/"), "", "")
	return ocispec.Platform{OS: parts[0], Architecture: parts[1], Variant: parts[2]}
}
