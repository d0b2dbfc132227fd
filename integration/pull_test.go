package integration

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"google.golang.org/grpc/codes"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/integration/fixture"
)

// noise is content that does not compress.
func noise(size int) string {
	b := make([]byte, size)
	source := rand.NewChaCha8([32]byte{byte(size)})
	_, _ = source.Read(b) // never fails
	return string(b)
}

// noisyImage has one layer of its own, large enough to be interrupted.
func noisyImage(t *testing.T, file string, size int) (v1.Image, v1.Layer) {
	t.Helper()
	layer := packLayer(t, fixture.Tree{fixture.File(file, 0o644, noise(size))}, fixture.Gzip)
	img, err := fixture.Image(v1.Config{}, layer)
	must(t, err)
	return img, layer
}

// basicAuth makes the registry ask for a user and password.
func basicAuth(w http.ResponseWriter, r *http.Request) bool {
	if user, password, _ := r.BasicAuth(); user == "user" && password == "secret" {
		return false
	}
	w.Header().Set("WWW-Authenticate", `Basic realm="test"`)
	w.WriteHeader(http.StatusUnauthorized)
	return true
}

// tokenAuth makes the registry ask for a bearer token, and be its own token
// server, which exchanges the identity token for it (OAuth 2 refresh grant).
func tokenAuth(host string) func(http.ResponseWriter, *http.Request) bool {
	return func(w http.ResponseWriter, r *http.Request) bool {
		switch {
		case r.URL.Path == "/token":
			if r.FormValue("grant_type") == "refresh_token" && r.FormValue("refresh_token") == "identity" {
				w.Header().Set("Content-Type", "application/json")
				fmt.Fprint(w, `{"access_token": "granted", "token": "granted", "expires_in": 300}`)
				return true
			}
			w.WriteHeader(http.StatusUnauthorized)
			return true
		case r.Header.Get("Authorization") == "Bearer granted":
			return false
		}
		w.Header().Set("WWW-Authenticate", fmt.Sprintf(`Bearer realm="http://%s/token",service="test"`, host))
		w.WriteHeader(http.StatusUnauthorized)
		return true
	}
}

func TestPullAuthConfig(t *testing.T) {
	r := newRegistry(t)
	name, id := push(t, r, "private/auth:latest", buildImage(t, v1.Config{}))
	d := startDaemon(t)
	userPassword := base64.StdEncoding.EncodeToString([]byte("user:secret"))
	for _, c := range []struct {
		name string
		hook func(http.ResponseWriter, *http.Request) bool
		auth *runtimeapi.AuthConfig
		code codes.Code
	}{
		{"user and password", basicAuth, &runtimeapi.AuthConfig{Username: "user", Password: "secret"}, codes.OK},
		{"user and password for this server", basicAuth, &runtimeapi.AuthConfig{Username: "user", Password: "secret", ServerAddress: r.Host}, codes.OK},
		{"auth", basicAuth, &runtimeapi.AuthConfig{Auth: userPassword}, codes.OK},
		{"identity token", tokenAuth(r.Host), &runtimeapi.AuthConfig{IdentityToken: "identity"}, codes.OK},
		{"registry token", tokenAuth(r.Host), &runtimeapi.AuthConfig{RegistryToken: "granted"}, codes.OK},
		{"none", basicAuth, nil, codes.Unauthenticated},
		{"none for a token", tokenAuth(r.Host), nil, codes.Unauthenticated},
		{"wrong password", basicAuth, &runtimeapi.AuthConfig{Username: "user", Password: "wrong-password"}, codes.Unauthenticated},
		{"for another server", basicAuth, &runtimeapi.AuthConfig{Username: "user", Password: "secret", ServerAddress: "elsewhere.example"}, codes.Unauthenticated},
	} {
		t.Run(c.name, func(t *testing.T) {
			r.Hook(c.hook)
			ref, err := d.tryPull(t, name, c.auth)
			if c.code != codes.OK {
				wantCode(t, err, c.code, name)
				if strings.Contains(err.Error(), "wrong-password") {
					t.Errorf("the error tells the password: %v", err)
				}
				if d.imageStatus(t, name) != nil {
					t.Error("the image exists nevertheless")
				}
				return
			}
			must(t, err)
			equal(t, "image_ref", ref, id)
			must(t, d.images.RemoveImage(t.Context(), &runtimeapi.ImageSpec{Image: name}))
		})
	}
}

func TestPullDockerConfig(t *testing.T) {
	r := newRegistry(t)
	name, id := push(t, r, "private/config:latest", buildImage(t, v1.Config{}))
	r.Hook(basicAuth)
	file := filepath.Join(t.TempDir(), "config.json")
	auths := fmt.Sprintf(`{"auths": {%q: {"auth": %q}}}`, r.Host, base64.StdEncoding.EncodeToString([]byte("user:secret")))
	must(t, os.WriteFile(file, []byte(auths), 0o600))
	d := startDaemon(t, withConfig(fmt.Sprintf("docker_config = %q", file)))
	equal(t, "image_ref", d.pull(t, name), id)
}

// tlsRegistry serves with a certificate of its own authority, which is returned.
func tlsRegistry(t *testing.T, authority *authority, config *tls.Config) *fixture.Registry {
	t.Helper()
	config.Certificates = []tls.Certificate{authority.issue(t, "127.0.0.1")}
	r, err := fixture.ListenRegistry("127.0.0.1:0", func(l net.Listener) net.Listener { return tls.NewListener(l, config) })
	must(t, err)
	t.Cleanup(func() { must(t, r.Close()) })
	return r
}

// An operator's existing tree of hosts.toml files, option by option. The host of
// the images does not exist: only the mirrors can serve them.
func TestPullHostsTOML(t *testing.T) {
	ca := newAuthority(t)
	dir := t.TempDir()
	caFile, clientCert, clientKey := ca.writeFiles(t, dir)
	img := buildImage(t, v1.Config{})
	plain, secure, mutual := newRegistry(t), tlsRegistry(t, ca, &tls.Config{}), tlsRegistry(t, ca, ca.requireClient())
	for _, r := range []*fixture.Registry{plain, secure, mutual} {
		push(t, r, "team/app:v1", img)
	}
	_, id := push(t, plain, "deep/prefix/team/app:v1", img)

	const server = "server = \"https://registry.invalid\"\n"
	down := unusedAddress(t)
	for _, c := range []struct {
		name, toml string
		hook       func(http.ResponseWriter, *http.Request) bool
	}{
		{"plain http", server + fmt.Sprintf("[host.%q]\n capabilities = [\"pull\", \"resolve\"]\n", "http://"+plain.Host), nil},
		{"mirrors in order", server + fmt.Sprintf("[host.%q]\n[host.%q]\n", "http://"+down, "http://"+plain.Host), nil},
		{"custom CA", server + fmt.Sprintf("[host.%q]\n ca = %q\n", "https://"+secure.Host, caFile), nil},
		{"skip_verify", server + fmt.Sprintf("[host.%q]\n skip_verify = true\n", "https://"+secure.Host), nil},
		{"client certificate", server + fmt.Sprintf("[host.%q]\n ca = %q\n client = [[%q, %q]]\n", "https://"+mutual.Host, caFile, clientCert, clientKey), nil},
		{"header", server + fmt.Sprintf("[host.%q]\n[host.%q.header]\n x-team = \"blue\"\n", "http://"+plain.Host, "http://"+plain.Host), needHeader},
		{"override_path", server + fmt.Sprintf("[host.%q]\n override_path = true\n", "http://"+plain.Host+"/v2/deep/prefix"), nil},
	} {
		t.Run(c.name, func(t *testing.T) {
			plain.Hook(c.hook)
			d := startDaemon(t, withHosts("registry.invalid", c.toml))
			equal(t, "image_ref", d.pull(t, "registry.invalid/team/app:v1"), id)
			equal(t, "tags", fmt.Sprint(d.imageStatus(t, id).RepoTags), "[registry.invalid/team/app:v1]")
		})
	}
	t.Run("unknown CA is refused", func(t *testing.T) {
		d := startDaemon(t, withHosts("registry.invalid", server+fmt.Sprintf("[host.%q]\n", "https://"+secure.Host)))
		_, err := d.tryPull(t, "registry.invalid/team/app:v1", nil)
		wantUnavailable(t, err, "unknown authority")
	})
}

func needHeader(w http.ResponseWriter, r *http.Request) bool {
	if r.Header.Get("X-Team") == "blue" {
		return false
	}
	w.WriteHeader(http.StatusForbidden)
	return true
}

// unusedAddress returns a loopback address at which nobody listens.
func unusedAddress(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, err)
	defer l.Close()
	return l.Addr().String()
}

func TestPullShortNames(t *testing.T) {
	r := newRegistry(t)
	_, id := push(t, r, "library/short:latest", buildImage(t, v1.Config{}))
	d := startDaemon(t, withHosts("docker.io", fmt.Sprintf("server = \"https://registry.invalid\"\n[host.%q]\n", "http://"+r.Host)))
	for _, name := range []string{"short", "library/short", "docker.io/library/short:latest", "short:latest"} {
		equal(t, "image_ref of "+name, d.pull(t, name), id)
		status := d.imageStatus(t, name)
		if status == nil {
			t.Fatalf("ImageStatus(%q) knows no image", name)
		}
		equal(t, "tags", fmt.Sprint(status.RepoTags), "[docker.io/library/short:latest]")
	}
}

// Two images with a common layer, pulled at once: it travels once.
func TestConcurrentPullsShareLayer(t *testing.T) {
	r := newRegistry(t)
	shared := packLayer(t, fixture.Tree{fixture.File("shared", 0o644, noise(1<<20))}, fixture.Gzip)
	var names []string
	for _, own := range []string{"a", "b", "c"} {
		img, err := fixture.ImageOf(v1.Config{}, shared, packLayer(t, fixture.Tree{fixture.File(own, 0o644, own)}, fixture.Gzip))
		must(t, err)
		name, _ := push(t, r, own+":latest", img)
		names = append(names, name)
	}
	// The shared layer is held back until every pull has asked for its own layer.
	digest := digestOf(t, shared)
	var others sync.WaitGroup
	others.Add(len(names))
	seen := sync.Map{}
	r.Hook(func(_ http.ResponseWriter, req *http.Request) bool {
		if req.Method != http.MethodGet || !strings.Contains(req.URL.Path, "/blobs/") {
			return false
		}
		if strings.HasSuffix(req.URL.Path, digest) {
			others.Wait()
			return false
		}
		repo, _, _ := strings.Cut(strings.TrimPrefix(req.URL.Path, "/v2/"), "/")
		if _, again := seen.LoadOrStore(repo, true); !again {
			others.Done()
		}
		return false
	})
	d := startDaemon(t)
	var pulls sync.WaitGroup
	errs := make([]error, len(names))
	for i, name := range names {
		pulls.Go(func() { _, errs[i] = d.tryPull(t, name, nil) })
	}
	pulls.Wait()
	for _, err := range errs {
		must(t, err)
	}
	equal(t, "downloads of the shared layer", r.Count(http.MethodGet, digest), 1)
}

// What a pull has come to is in the verbose status.
func TestPullProgress(t *testing.T) {
	r := newRegistry(t)
	blob := packLayer(t, fixture.Tree{fixture.File("slow", 0o644, noise(1<<20))}, fixture.Gzip)
	img, err := fixture.ImageOf(v1.Config{}, packLayer(t, fixture.Tree{fixture.File("quick", 0o644, "x")}, fixture.Gzip), blob)
	must(t, err)
	name, _ := push(t, r, "progress:latest", img)
	content := blobOf(t, blob)
	end := make(chan struct{})
	r.Hook(func(w http.ResponseWriter, req *http.Request) bool {
		if req.Method != http.MethodGet || !strings.HasSuffix(req.URL.Path, digestOf(t, blob)) {
			return false
		}
		w.Header().Set("Content-Length", strconv.Itoa(len(content)))
		half := len(content) / 2
		_, _ = w.Write(content[:half])
		w.(http.Flusher).Flush()
		<-end
		_, _ = w.Write(content[half:])
		return true
	})
	d := startDaemon(t)
	type layer struct {
		Digest, State string
		Done, Total   int
	}
	var pulls []struct {
		Ref    string
		Layers []layer
	}
	progress := func() string { return get(d.cri.Status(t.Context(), true))(t).Info["pulls"] }
	equal(t, "pulls before", progress(), "[]")
	done := make(chan error, 1)
	go func() { _, err := d.tryPull(t, name, nil); done <- err }()
	eventually(t, "half of the slow layer is here", func() error {
		text := progress()
		if err := json.Unmarshal([]byte(text), &pulls); err != nil {
			return err
		}
		if len(pulls) != 1 || pulls[0].Ref != name || len(pulls[0].Layers) != 2 || pulls[0].Layers[0].State != "done" ||
			pulls[0].Layers[1] != (layer{digestOf(t, blob), "downloading", len(content) / 2, len(content)}) {
			return fmt.Errorf("pulls: %s", text)
		}
		return nil
	})
	close(end)
	must(t, <-done)
	equal(t, "pulls afterwards", progress(), "[]")
}

// interrupt serves a blob in parts: each answer breaks off after so many bytes.
type interrupt struct {
	digest string
	blob   []byte
	after  int

	mu     sync.Mutex // guards ranges
	ranges []string
}

func (i *interrupt) hook(w http.ResponseWriter, r *http.Request) bool {
	if r.Method != http.MethodGet || !strings.HasSuffix(r.URL.Path, i.digest) {
		return false
	}
	i.mu.Lock()
	i.ranges = append(i.ranges, r.Header.Get("Range"))
	i.mu.Unlock()
	http.ServeContent(&limited{ResponseWriter: w, left: i.after}, r, "", time.Time{}, bytes.NewReader(i.blob))
	return true
}

// limited breaks the connection after so many bytes of the body.
type limited struct {
	http.ResponseWriter
	left int
}

func (l *limited) Write(b []byte) (int, error) {
	if len(b) > l.left {
		_, _ = l.ResponseWriter.Write(b[:l.left])
		l.ResponseWriter.(http.Flusher).Flush()
		panic(http.ErrAbortHandler)
	}
	l.left -= len(b)
	return l.ResponseWriter.Write(b)
}

func TestPullResumesByRange(t *testing.T) {
	r := newRegistry(t)
	img, layer := noisyImage(t, "resumed", 1<<20)
	name, id := push(t, r, "resumed:latest", img)
	cut := &interrupt{digest: digestOf(t, layer), blob: blobOf(t, layer), after: 400 << 10}
	r.Hook(cut.hook)
	d := startDaemon(t)
	equal(t, "image_ref", d.pull(t, name), id)
	if len(cut.ranges) < 3 {
		t.Fatalf("requests for the layer had the ranges %q, want at least 3", cut.ranges)
	}
	for i, header := range cut.ranges[1:] {
		var start int
		if _, err := fmt.Sscanf(header, "bytes=%d-", &start); err != nil || start == 0 {
			t.Errorf("request %d has the range %q, want one that goes on", i+2, header)
		}
	}
	equal(t, "checksum", d.runPod(t, hostNetwork).sh(t, "sha256sum </resumed", image(name)), sha256Of(noise(1<<20))+"  -\n")
}

func blobOf(t *testing.T, l v1.Layer) []byte {
	t.Helper()
	rc, err := l.Compressed()
	must(t, err)
	defer rc.Close()
	var b bytes.Buffer
	_, err = b.ReadFrom(rc)
	must(t, err)
	return b.Bytes()
}

// A transfer without any bytes ends after stall_timeout, and the error tells what stalled.
func TestPullStalled(t *testing.T) {
	r := newRegistry(t)
	img, layer := noisyImage(t, "stalled", 1<<20)
	name, _ := push(t, r, "stalled:latest", img)
	digest, blob := digestOf(t, layer), blobOf(t, layer)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	r.Hook(func(w http.ResponseWriter, req *http.Request) bool {
		if req.Method != http.MethodGet || !strings.HasSuffix(req.URL.Path, digest) {
			return false
		}
		w.Header().Set("Content-Length", fmt.Sprint(len(blob)))
		_, _ = w.Write(blob[:1000])
		w.(http.Flusher).Flush()
		select {
		case <-ctx.Done():
		case <-req.Context().Done():
		}
		panic(http.ErrAbortHandler)
	})
	d := startDaemon(t, withConfig(`stall_timeout = "1s"`))
	_, err := d.tryPull(t, name, nil)
	wantUnavailable(t, err, digest)
	noTraceOf(t, d, name)
}

// noTraceOf fails the test if the image is known or its bytes are still there.
func noTraceOf(t *testing.T, d *daemon, name string) {
	t.Helper()
	if status := d.imageStatus(t, name); status != nil {
		t.Errorf("the image exists: %v", status)
	}
	d.noLeaks(t)
}

// swapBlob serves other content for a blob.
func swapBlob(digest string, content []byte) func(http.ResponseWriter, *http.Request) bool {
	return func(w http.ResponseWriter, r *http.Request) bool {
		if r.Method != http.MethodGet || !strings.HasSuffix(r.URL.Path, digest) {
			return false
		}
		http.ServeContent(w, r, "", time.Time{}, bytes.NewReader(content))
		return true
	}
}

// An image whose bytes are not what its manifest says never becomes visible.
func TestPullBadLayers(t *testing.T) {
	r := newRegistry(t)
	img, layer := noisyImage(t, "bad", 256<<10)
	good, _ := push(t, r, "bad:latest", img)
	digest, blob := digestOf(t, layer), blobOf(t, layer)
	flipped := bytes.Clone(blob)
	flipped[len(flipped)/2] ^= 1
	otherGzip := blobOf(t, packLayer(t, fixture.Tree{fixture.File("other", 0o644, noise(256<<10+1))}, fixture.Gzip))

	config, err := img.ConfigFile()
	must(t, err)
	lying := config.DeepCopy()
	lying.RootFS.DiffIDs[1] = v1.Hash{Algorithm: "sha256", Hex: strings.Repeat("ab", 32)}
	lyingImage, err := mutate.ConfigFile(img, lying)
	must(t, err)
	wrongDiffID, _ := push(t, r, "bad-diffid:latest", lyingImage)

	d := startDaemon(t)
	for _, c := range []struct {
		name, image string
		hook        func(http.ResponseWriter, *http.Request) bool
		code        codes.Code
		says        string
	}{
		{"truncated", good, (&interrupt{digest: digest, blob: blob[:len(blob)/2], after: 1 << 30}).hook, codes.DataLoss, digest},
		{"corrupted", good, swapBlob(digest, flipped), codes.DataLoss, digest},
		{"other content", good, swapBlob(digest, otherGzip), codes.DataLoss, digest},
		{"longer", good, swapBlob(digest, append(bytes.Clone(blob), "more"...)), codes.DataLoss, digest},
		{"wrong diffID", wrongDiffID, nil, codes.DataLoss, strings.Repeat("ab", 32)},
	} {
		t.Run(c.name, func(t *testing.T) {
			r.Hook(c.hook)
			_, err := d.tryPull(t, c.image, nil)
			wantCode(t, err, c.code, c.says)
			noTraceOf(t, d, c.image)
		})
	}
	r.Hook(nil)
	d.pull(t, good) // nothing of the failures is in its way
}

// A manifest that is not the one its digest names.
func TestPullWrongManifestDigest(t *testing.T) {
	r := newRegistry(t)
	img := buildImage(t, v1.Config{})
	name, _ := push(t, r, "manifest:latest", img)
	push(t, r, "manifest:other", buildImage(t, v1.Config{Env: []string{"OTHER=1"}}))
	digest := digestOf(t, img)
	r.Hook(func(w http.ResponseWriter, req *http.Request) bool {
		if strings.HasSuffix(req.URL.Path, "/manifests/"+digest) {
			req.URL.Path = strings.TrimSuffix(req.URL.Path, digest) + "other"
			r.Handler().ServeHTTP(w, req)
			return true
		}
		return false
	})
	d := startDaemon(t)
	ref := repository(name) + "@" + digest
	_, err := d.tryPull(t, ref, nil)
	wantCode(t, err, codes.DataLoss, digest)
	noTraceOf(t, d, ref)
}

func TestPullUnknown(t *testing.T) {
	d := startDaemon(t)
	for _, c := range []struct {
		name, image string
		code        codes.Code
		says        string
	}{
		{"repository", registry.Host + "/no/such:tag", codes.NotFound, "no/such:tag"},
		{"tag", repository(baseImage) + ":no-such-tag", codes.NotFound, "no-such-tag"},
		{"digest", repository(baseImage) + "@sha256:" + strings.Repeat("12", 32), codes.NotFound, "1212"},
		{"not a name", registry.Host + "/UPPER/case:latest", codes.InvalidArgument, "UPPER/case"},
		{"dots in the name", registry.Host + "/../../etc:latest", codes.InvalidArgument, ".."},
		{"digest with a path", repository(baseImage) + "@sha256:../../../../etc/passwd", codes.InvalidArgument, ".."},
		{"empty", "", codes.InvalidArgument, ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			_, err := d.tryPull(t, c.image, nil)
			wantCode(t, err, c.code, c.says)
			d.noLeaks(t)
		})
	}
}

func TestPullRegistryDown(t *testing.T) {
	d := startDaemon(t)
	_, err := d.tryPull(t, unusedAddress(t)+"/some/image:latest", nil)
	wantUnavailable(t, err, "connection refused")
}

// wantUnavailable fails the test unless err is what kubelet takes for a registry
// that cannot be reached: the text begins with RegistryUnavailable, which it only
// does if the code is Unknown, since cri-client strips no other.
func wantUnavailable(t *testing.T, err error, says string) {
	t.Helper()
	if err == nil || !strings.HasPrefix(err.Error(), "RegistryUnavailable: ") || !strings.Contains(err.Error(), says) {
		t.Errorf("the error is %v, want RegistryUnavailable with %q", err, says)
	}
}

// All layers are asked for before the first has ended.
func TestPullLayersAtOnce(t *testing.T) {
	r := newRegistry(t)
	const layers = 4
	var all []v1.Layer
	for i := range layers {
		all = append(all, packLayer(t, fixture.Tree{fixture.File(fmt.Sprintf("file%d", i), 0o644, noise(1000+i))}, fixture.Gzip))
	}
	img, err := fixture.ImageOf(v1.Config{}, all...)
	must(t, err)
	name, id := push(t, r, "at-once:latest", img)
	config, err := img.RawConfigFile()
	must(t, err)
	configDigest, _, err := v1.SHA256(bytes.NewReader(config))
	must(t, err)
	var arrived sync.WaitGroup
	arrived.Add(layers)
	r.Hook(func(_ http.ResponseWriter, req *http.Request) bool {
		if req.Method == http.MethodGet && strings.Contains(req.URL.Path, "/blobs/") && !strings.HasSuffix(req.URL.Path, configDigest.String()) {
			arrived.Done()
			arrived.Wait()
		}
		return false
	})
	d := startDaemon(t)
	equal(t, "image_ref", d.pull(t, name), id)
}

// An image may have the same layer twice, and layers without content.
func TestPullRepeatedAndEmptyLayers(t *testing.T) {
	same := packLayer(t, fixture.Tree{fixture.File("same", 0o644, "same")}, fixture.Gzip)
	nothing := packLayer(t, nil, fixture.Gzip)
	base, err := fixture.Base()
	must(t, err)
	img, err := fixture.ImageOf(v1.Config{}, base, same, nothing, same, nothing)
	must(t, err)
	name, _ := push(t, registry, "repeated:latest", img)
	d := startDaemon(t)
	equal(t, "content", d.runPod(t, hostNetwork).sh(t, "cat /same; echo", image(name)), "same\n")
}
