package integration

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"google.golang.org/grpc/codes"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/integration/fixture"
	"berth/integration/harness"
)

// noise returns content that does not compress.
func noise(size int) string {
	b := make([]byte, size)
	source := rand.NewChaCha8([32]byte{byte(size)})
	_, _ = source.Read(b) // never fails
	return string(b)
}

// noisyImage returns an image with one incompressible layer, which is large enough to be
// interrupted.
func noisyImage(t *testing.T, file string, size int) (v1.Image, v1.Layer) {
	t.Helper()
	layer := harness.PackLayer(t, fixture.Tree{fixture.File(file, 0o644, noise(size))}, fixture.Gzip)
	img := harness.Get(fixture.Image(v1.Config{}, layer))(t)
	return img, layer
}

// tokenAuth makes the registry require a bearer token. The registry is its own token server, which
// exchanges the identity token for a bearer token (OAuth 2 refresh grant).
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
	r := harness.NewRegistry(t)
	name, id := harness.Push(t, r, "private/auth:latest", harness.BuildImage(t, v1.Config{}))
	d := harness.StartDaemon(t)
	userPassword := base64.StdEncoding.EncodeToString([]byte("user:secret"))
	for _, c := range []struct {
		name string
		hook func(http.ResponseWriter, *http.Request) bool
		auth *runtimeapi.AuthConfig
		code codes.Code
	}{
		{"user and password", harness.BasicAuth, &runtimeapi.AuthConfig{Username: "user", Password: "secret"}, codes.OK},
		{"user and password for this server", harness.BasicAuth, &runtimeapi.AuthConfig{Username: "user", Password: "secret", ServerAddress: r.Host}, codes.OK},
		{"auth", harness.BasicAuth, &runtimeapi.AuthConfig{Auth: userPassword}, codes.OK},
		{"identity token", tokenAuth(r.Host), &runtimeapi.AuthConfig{IdentityToken: "identity"}, codes.OK},
		{"registry token", tokenAuth(r.Host), &runtimeapi.AuthConfig{RegistryToken: "granted"}, codes.OK},
		{"none", harness.BasicAuth, nil, codes.Unauthenticated},
		{"no credentials", tokenAuth(r.Host), nil, codes.Unauthenticated},
		{"wrong password", harness.BasicAuth, &runtimeapi.AuthConfig{Username: "user", Password: "wrong-password"}, codes.Unauthenticated},
		{"for another server", harness.BasicAuth, &runtimeapi.AuthConfig{Username: "user", Password: "secret", ServerAddress: "elsewhere.example"}, codes.Unauthenticated},
	} {
		t.Run(c.name, func(t *testing.T) {
			r.Hook(c.hook)
			ref, err := d.TryPull(t, name, c.auth)
			if c.code != codes.OK {
				harness.WantCode(t, err, c.code, name)
				harness.WantNoText(t, "error", err.Error(), "wrong-password")
				if d.ImageStatus(t, name) != nil {
					t.Error("the image exists after the failed pull")
				}
				return
			}
			harness.Must(t, err)
			harness.Equal(t, "image_ref", ref, id)
			harness.Must(t, d.Images.RemoveImage(t.Context(), &runtimeapi.ImageSpec{Image: name}))
		})
	}
}

func TestPullDockerConfig(t *testing.T) {
	r := harness.NewRegistry(t)
	name, id := harness.Push(t, r, "private/config:latest", harness.BuildImage(t, v1.Config{}))
	r.Hook(harness.BasicAuth)
	file := filepath.Join(t.TempDir(), "config.json")
	auths := fmt.Sprintf(`{"auths": {%q: {"auth": %q}}}`, r.Host, base64.StdEncoding.EncodeToString([]byte("user:secret")))
	harness.Must(t, os.WriteFile(file, []byte(auths), 0o600))
	d := harness.StartDaemon(t, harness.WithConfig(fmt.Sprintf("registry.docker_config = %q", file)))
	harness.Equal(t, "image_ref", d.Pull(t, name), id)
}

// tlsRegistry starts a registry with a certificate of a new authority, which it returns.
func tlsRegistry(t *testing.T, authority *authority, config *tls.Config) *fixture.Registry {
	t.Helper()
	config.Certificates = []tls.Certificate{authority.issue(t, "127.0.0.1")}
	r := harness.Get(fixture.ListenRegistry("127.0.0.1:0", func(l net.Listener) net.Listener { return tls.NewListener(l, config) }))(t)
	t.Cleanup(func() { harness.Must(t, r.Close()) })
	return r
}

// TestPullHostsTOML tests the options of hosts.toml one by one. The host in the image names does
// not exist, so only the mirrors can serve the images.
func TestPullHostsTOML(t *testing.T) {
	ca := newAuthority(t)
	dir := t.TempDir()
	caFile, clientCert, clientKey := ca.writeFiles(t, dir)
	img := harness.BuildImage(t, v1.Config{})
	plain, secure, mutual := harness.NewRegistry(t), tlsRegistry(t, ca, &tls.Config{}), tlsRegistry(t, ca, ca.requireClient())
	for _, r := range []*fixture.Registry{plain, secure, mutual} {
		harness.Push(t, r, "team/app:v1", img)
	}
	_, id := harness.Push(t, plain, "deep/prefix/team/app:v1", img)

	const server = "server = \"https://registry.invalid\"\n"
	down := harness.UnusedAddress(t)
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
			d := harness.StartDaemon(t, harness.WithHosts("registry.invalid", c.toml))
			harness.Equal(t, "image_ref", d.Pull(t, "registry.invalid/team/app:v1"), id)
			harness.Equal(t, "tags", fmt.Sprint(d.ImageStatus(t, id).RepoTags), "[registry.invalid/team/app:v1]")
		})
	}
	t.Run("unknown CA is refused", func(t *testing.T) {
		d := harness.StartDaemon(t, harness.WithHosts("registry.invalid", server+fmt.Sprintf("[host.%q]\n", "https://"+secure.Host)))
		_, err := d.TryPull(t, "registry.invalid/team/app:v1", nil)
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

func TestPullShortNames(t *testing.T) {
	r := harness.NewRegistry(t)
	_, id := harness.Push(t, r, "library/short:latest", harness.BuildImage(t, v1.Config{}))
	d := harness.StartDaemon(t, harness.WithHosts("docker.io", fmt.Sprintf("server = \"https://registry.invalid\"\n[host.%q]\n", "http://"+r.Host)))
	for _, name := range []string{"short", "library/short", "docker.io/library/short:latest", "short:latest"} {
		harness.Equal(t, "image_ref of "+name, d.Pull(t, name), id)
		status := d.ImageStatus(t, name)
		if status == nil {
			t.Fatalf("ImageStatus(%q) returns no image", name)
		}
		harness.Equal(t, "tags", fmt.Sprint(status.RepoTags), "[docker.io/library/short:latest]")
	}
}

// Two images with a common layer are pulled in parallel. The layer is downloaded once.
func TestConcurrentPullsShareLayer(t *testing.T) {
	r := harness.NewRegistry(t)
	shared := harness.PackLayer(t, fixture.Tree{fixture.File("shared", 0o644, noise(1<<20))}, fixture.Gzip)
	var names []string
	for _, own := range []string{"a", "b", "c"} {
		img := harness.Get(fixture.ImageOf(v1.Config{}, shared, harness.PackLayer(t, fixture.Tree{fixture.File(own, 0o644, own)}, fixture.Gzip)))(t)
		name, _ := harness.Push(t, r, own+":latest", img)
		names = append(names, name)
	}
	// The registry sends the shared layer only after every pull has requested its own layer.
	digest := harness.DigestOf(t, shared)
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
	d := harness.StartDaemon(t)
	var pulls sync.WaitGroup
	errs := make([]error, len(names))
	for i, name := range names {
		pulls.Go(func() { _, errs[i] = d.TryPull(t, name, nil) })
	}
	pulls.Wait()
	for _, err := range errs {
		harness.Must(t, err)
	}
	harness.Equal(t, "downloads of the shared layer", r.Count(http.MethodGet, digest), 1)
}

// Verbose Status shows the progress of a pull.
func TestPullProgress(t *testing.T) {
	r := harness.NewRegistry(t)
	blob := harness.PackLayer(t, fixture.Tree{fixture.File("slow", 0o644, noise(1<<20))}, fixture.Gzip)
	img, err := fixture.ImageOf(v1.Config{}, harness.PackLayer(t, fixture.Tree{fixture.File("quick", 0o644, "x")}, fixture.Gzip), blob)
	harness.Must(t, err)
	name, _ := harness.Push(t, r, "progress:latest", img)
	content := blobOf(t, blob)
	end := make(chan struct{})
	r.Hook(func(w http.ResponseWriter, req *http.Request) bool {
		if req.Method != http.MethodGet || !strings.HasSuffix(req.URL.Path, harness.DigestOf(t, blob)) {
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
	d := harness.StartDaemon(t)
	type layer struct {
		Digest, State string
		Done, Total   int
	}
	var pulls []struct {
		Ref    string
		Layers []layer
	}
	progress := func() string { return harness.Get(d.Cri.Status(t.Context(), true))(t).Info["pulls"] }
	harness.Equal(t, "pulls before", progress(), "[]")
	done := harness.Go(func() error { _, err := d.TryPull(t, name, nil); return err })
	harness.Eventually(t, "half of the slow layer has arrived", func() error {
		text := progress()
		if err := json.Unmarshal([]byte(text), &pulls); err != nil {
			return err
		}
		if len(pulls) != 1 || pulls[0].Ref != name || len(pulls[0].Layers) != 2 || pulls[0].Layers[0].State != "done" ||
			pulls[0].Layers[1] != (layer{harness.DigestOf(t, blob), "downloading", len(content) / 2, len(content)}) {
			return fmt.Errorf("pulls: %s", text)
		}
		return nil
	})
	close(end)
	harness.Must(t, <-done)
	harness.Equal(t, "pulls afterwards", progress(), "[]")
}

// interrupt serves a blob in parts. Each answer ends after a number of bytes.
type interrupt struct {
	digest string
	blob   []byte
	after  int

	mu     sync.Mutex // protects ranges
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

// limited closes the connection after a number of bytes of the body.
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
	r := harness.NewRegistry(t)
	img, layer := noisyImage(t, "resumed", 1<<20)
	name, id := harness.Push(t, r, "resumed:latest", img)
	cut := &interrupt{digest: harness.DigestOf(t, layer), blob: blobOf(t, layer), after: 400 << 10}
	r.Hook(cut.hook)
	d := harness.StartDaemon(t)
	harness.Equal(t, "image_ref", d.Pull(t, name), id)
	if len(cut.ranges) < 3 {
		t.Fatalf("requests for the layer had the ranges %q, want at least 3", cut.ranges)
	}
	for i, header := range cut.ranges[1:] {
		var start int
		if _, err := fmt.Sscanf(header, "bytes=%d-", &start); err != nil || start == 0 {
			t.Errorf("request %d has the range %q, want a range that continues", i+2, header)
		}
	}
	harness.Equal(t, "checksum", d.RunPod(t, harness.HostNetwork).Sh(t, "sha256sum </resumed", harness.Image(name)), sha256Of(noise(1<<20))+"  -\n")
}

func blobOf(t *testing.T, l v1.Layer) []byte {
	t.Helper()
	rc := harness.Get(l.Compressed())(t)
	defer rc.Close()
	var b bytes.Buffer
	_, err := b.ReadFrom(rc)
	harness.Must(t, err)
	return b.Bytes()
}

// A transfer without data ends after pull.stall_timeout, and the error names the transfer.
func TestPullStalled(t *testing.T) {
	r := harness.NewRegistry(t)
	img, layer := noisyImage(t, "stalled", 1<<20)
	name, _ := harness.Push(t, r, "stalled:latest", img)
	digest, blob := harness.DigestOf(t, layer), blobOf(t, layer)
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
	d := harness.StartDaemon(t, harness.WithConfig(`pull.stall_timeout = "5s"`)) // other layers arrive faster, also on a slow machine
	_, err := d.TryPull(t, name, nil)
	wantUnavailable(t, err, digest)
	harness.NoTraceOf(t, d, name)
}

// A mirror stalls in a layer. The registry sends the rest.
func TestPullGoesOnAfterStalledMirror(t *testing.T) {
	mirror, r := harness.NewRegistry(t), harness.NewRegistry(t)
	img, layer := noisyImage(t, "stalled", 1<<20)
	_, id := harness.Push(t, r, "stalled:latest", img)
	harness.Push(t, mirror, "stalled:latest", img)
	digest, blob := harness.DigestOf(t, layer), blobOf(t, layer)
	mirror.Hook(func(w http.ResponseWriter, req *http.Request) bool {
		if req.Method != http.MethodGet || !strings.HasSuffix(req.URL.Path, digest) {
			return false
		}
		w.Header().Set("Content-Length", fmt.Sprint(len(blob)))
		_, _ = w.Write(blob[:300<<10])
		_ = http.NewResponseController(w).Flush()
		<-req.Context().Done()
		panic(http.ErrAbortHandler)
	})
	var mu sync.Mutex // guards ranges
	var ranges []string
	r.Hook(func(_ http.ResponseWriter, req *http.Request) bool {
		if strings.HasSuffix(req.URL.Path, digest) {
			mu.Lock()
			defer mu.Unlock()
			ranges = append(ranges, req.Header.Get("Range"))
		}
		return false
	})
	d := harness.StartDaemon(t, harness.WithConfig(`pull.stall_timeout = "5s"`),
		harness.WithHosts("registry.invalid", fmt.Sprintf("server = %q\n[host.%q]\n", "http://"+r.Host, "http://"+mirror.Host)))
	harness.Equal(t, "image_ref", d.Pull(t, "registry.invalid/stalled:latest"), id)
	mu.Lock()
	defer mu.Unlock()
	harness.Equal(t, "requests to the registry", fmt.Sprint(ranges), fmt.Sprintf("[bytes=%d-%d]", 300<<10, len(blob)-1))
}

// A failed pull keeps its finished layers, which "berth check" knows. The next pull does not
// transfer them again and leaves nothing.
func TestFailedPullKeepsLayers(t *testing.T) {
	r := harness.NewRegistry(t)
	img, layer := noisyImage(t, "cut", 1<<20)
	name, _ := harness.Push(t, r, "cut:latest", img)
	digest := harness.DigestOf(t, layer)
	var whole atomic.Bool     // the registry sends all layers
	var finished atomic.Int32 // transfers of other blobs
	r.Hook(func(_ http.ResponseWriter, req *http.Request) bool {
		if req.Method != http.MethodGet || !strings.Contains(req.URL.Path, "/blobs/") {
			return false
		}
		if !strings.HasSuffix(req.URL.Path, digest) {
			finished.Add(1)
		} else if !whole.Load() {
			panic(http.ErrAbortHandler)
		}
		return false
	})
	d := harness.StartDaemon(t)
	_, err := d.TryPull(t, name, nil)
	wantUnavailable(t, err, digest)
	d.StateMatches(t)
	whole.Store(true)
	before := finished.Load()
	_, err = d.TryPull(t, name, nil)
	harness.Must(t, err)
	// The config is not a layer.
	if again := finished.Load() - before; again > 1 {
		t.Errorf("%d blobs were transferred again", again)
	}
	harness.Must(t, d.Images.RemoveImage(t.Context(), &runtimeapi.ImageSpec{Image: name}))
	harness.NoTraceOf(t, d, name)
}

// A pull leaves the index of a layer's blob. It outlives the image, "berth check" knows it, and
// "berth image prune" deletes it.
func TestPullLeavesIndex(t *testing.T) {
	r := harness.NewRegistry(t)
	img, layer := noisyImage(t, "indexed", 7<<20)
	name, _ := harness.Push(t, r, "indexed:latest", img)
	d := harness.StartDaemon(t, harness.WithConfig("lazy.index_bytes = 268435456"))
	status := harness.Get(d.Cri.Status(t.Context(), true))(t)
	if driver := status.Info["layerDriver"]; !strings.Contains(driver, "erofs") {
		t.Skip("NOT TESTED: indexes need EROFS layers, not ", driver)
	}
	_, err := d.TryPull(t, name, nil)
	harness.Must(t, err)
	path := filepath.Join(d.Root, "images", "indexes", strings.TrimPrefix(harness.DigestOf(t, layer), "sha256:"))
	harness.Eventually(t, "the index is written", func() error { _, err := os.Stat(path); return err })
	harness.Must(t, d.Images.RemoveImage(t.Context(), &runtimeapi.ImageSpec{Image: name}))
	d.StateMatches(t)
	if _, err := os.Stat(filepath.Join(path, "tree")); err != nil {
		t.Errorf("after the removal of the image: %v", err)
	}
	harness.WantText(t, "disk usage", runBerth(t, d, "image", "du"), "indexes of blobs")
	runBerth(t, d, "image", "prune", "--indexes")
	if _, err := os.Stat(path); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("after prune: %v", err)
	}
}

// An image whose content does not match its manifest never becomes visible.
func TestPullBadLayers(t *testing.T) {
	r := harness.NewRegistry(t)
	img, layer := noisyImage(t, "bad", 256<<10)
	good, _ := harness.Push(t, r, "bad:latest", img)
	digest, blob := harness.DigestOf(t, layer), blobOf(t, layer)
	flipped := bytes.Clone(blob)
	flipped[len(flipped)/2] ^= 1
	otherGzip := blobOf(t, harness.PackLayer(t, fixture.Tree{fixture.File("other", 0o644, noise(256<<10+1))}, fixture.Gzip))

	config := harness.Get(img.ConfigFile())(t)
	lying := config.DeepCopy()
	lying.RootFS.DiffIDs[1] = v1.Hash{Algorithm: "sha256", Hex: strings.Repeat("ab", 32)}
	lyingImage, err := mutate.ConfigFile(img, lying)
	harness.Must(t, err)
	wrongDiffID, _ := harness.Push(t, r, "bad-diffid:latest", lyingImage)

	d := harness.StartDaemon(t)
	for _, c := range []struct {
		name, image string
		hook        func(http.ResponseWriter, *http.Request) bool
		code        codes.Code
		says        string
	}{
		{"truncated", good, (&interrupt{digest: digest, blob: blob[:len(blob)/2], after: 1 << 30}).hook, codes.DataLoss, digest},
		{"corrupted", good, harness.SwapBlob(digest, flipped), codes.DataLoss, digest},
		{"other content", good, harness.SwapBlob(digest, otherGzip), codes.DataLoss, digest},
		{"longer", good, harness.SwapBlob(digest, append(bytes.Clone(blob), "more"...)), codes.DataLoss, digest},
		{"wrong diffID", wrongDiffID, nil, codes.DataLoss, strings.Repeat("ab", 32)},
	} {
		t.Run(c.name, func(t *testing.T) {
			r.Hook(c.hook)
			_, err := d.TryPull(t, c.image, nil)
			harness.WantCode(t, err, c.code, c.says)
			harness.NoTraceOf(t, d, c.image)
		})
	}
	r.Hook(nil)
	d.Pull(t, good) // the failures do not affect this pull
}

// A manifest that does not match its digest is refused.
func TestPullWrongManifestDigest(t *testing.T) {
	r := harness.NewRegistry(t)
	img := harness.BuildImage(t, v1.Config{})
	name, _ := harness.Push(t, r, "manifest:latest", img)
	harness.Push(t, r, "manifest:other", harness.BuildImage(t, v1.Config{Env: []string{"OTHER=1"}}))
	digest := harness.DigestOf(t, img)
	r.Hook(func(w http.ResponseWriter, req *http.Request) bool {
		if strings.HasSuffix(req.URL.Path, "/manifests/"+digest) {
			req.URL.Path = strings.TrimSuffix(req.URL.Path, digest) + "other"
			r.Handler().ServeHTTP(w, req)
			return true
		}
		return false
	})
	d := harness.StartDaemon(t)
	ref := harness.Repository(name) + "@" + digest
	_, err := d.TryPull(t, ref, nil)
	harness.WantCode(t, err, codes.DataLoss, digest)
	harness.NoTraceOf(t, d, ref)
}

func TestPullUnknown(t *testing.T) {
	d := harness.StartDaemon(t)
	for _, c := range []struct {
		name, image string
		code        codes.Code
		says        string
	}{
		{"repository", harness.Registry.Host + "/no/such:tag", codes.NotFound, "no/such:tag"},
		{"tag", harness.Repository(harness.BaseImage) + ":no-such-tag", codes.NotFound, "no-such-tag"},
		{"digest", harness.Repository(harness.BaseImage) + "@sha256:" + strings.Repeat("12", 32), codes.NotFound, "1212"},
		{"not a name", harness.Registry.Host + "/UPPER/case:latest", codes.InvalidArgument, "UPPER/case"},
		{"dots in the name", harness.Registry.Host + "/../../etc:latest", codes.InvalidArgument, ".."},
		{"digest with a path", harness.Repository(harness.BaseImage) + "@sha256:../../../../etc/passwd", codes.InvalidArgument, ".."},
		{"empty", "", codes.InvalidArgument, ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			_, err := d.TryPull(t, c.image, nil)
			harness.WantCode(t, err, c.code, c.says)
			d.NoLeaks(t)
		})
	}
}

func TestPullRegistryDown(t *testing.T) {
	d := harness.StartDaemon(t)
	_, err := d.TryPull(t, harness.UnusedAddress(t)+"/some/image:latest", nil)
	wantUnavailable(t, err, "connection refused")
}

// wantUnavailable fails the test unless kubelet treats err as an unreachable registry. The text
// must begin with RegistryUnavailable. The code must be Unknown, because cri-client removes only
// that code from the text.
func wantUnavailable(t *testing.T, err error, says string) {
	t.Helper()
	if err == nil || !strings.HasPrefix(err.Error(), "RegistryUnavailable: ") || !strings.Contains(err.Error(), says) {
		t.Errorf("the error is %v, want RegistryUnavailable with %q", err, says)
	}
}

// All layers are requested before the first download ends.
func TestPullLayersAtOnce(t *testing.T) {
	r := harness.NewRegistry(t)
	const layers = 4
	var all []v1.Layer
	for i := range layers {
		all = append(all, harness.PackLayer(t, fixture.Tree{fixture.File(fmt.Sprintf("file%d", i), 0o644, noise(1000+i))}, fixture.Gzip))
	}
	img := harness.Get(fixture.ImageOf(v1.Config{}, all...))(t)
	name, id := harness.Push(t, r, "at-once:latest", img)
	config := harness.Get(img.RawConfigFile())(t)
	configDigest, _, err := v1.SHA256(bytes.NewReader(config))
	harness.Must(t, err)
	var arrived sync.WaitGroup
	arrived.Add(layers)
	r.Hook(func(_ http.ResponseWriter, req *http.Request) bool {
		if req.Method == http.MethodGet && strings.Contains(req.URL.Path, "/blobs/") && !strings.HasSuffix(req.URL.Path, configDigest.String()) {
			arrived.Done()
			arrived.Wait()
		}
		return false
	})
	d := harness.StartDaemon(t)
	harness.Equal(t, "image_ref", d.Pull(t, name), id)
}

// An image may contain the same layer twice, and empty layers.
func TestPullRepeatedAndEmptyLayers(t *testing.T) {
	same := harness.PackLayer(t, fixture.Tree{fixture.File("same", 0o644, "same")}, fixture.Gzip)
	nothing := harness.PackLayer(t, nil, fixture.Gzip)
	base := harness.Get(fixture.Base())(t)
	img := harness.Get(fixture.ImageOf(v1.Config{}, base, same, nothing, same, nothing))(t)
	name, _ := harness.Push(t, harness.Registry, "repeated:latest", img)
	d := harness.StartDaemon(t)
	harness.Equal(t, "content", d.RunPod(t, harness.HostNetwork).Sh(t, "cat /same; echo", harness.Image(name)), "same\n")
}
