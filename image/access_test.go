package image_test

import (
	"fmt"
	"log/slog"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/opencontainers/go-digest"
	"google.golang.org/grpc/codes"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/image/pull"
	"berth/image/registry/registrytest"
	"berth/image/unpack"
)

// asked counts the requests for a layer's blob, by their method.
func asked(reg *registrytest.Server, method string, l registrytest.Layer) (n int) {
	for _, request := range reg.Requests() {
		if strings.HasPrefix(request, method+" ") && strings.HasSuffix(request, "/blobs/"+digest.FromBytes(l.Blob).String()) {
			n++
		}
	}
	return n
}

// downloads counts the downloads of a layer.
func downloads(reg *registrytest.Server, l registrytest.Layer) int {
	return asked(reg, http.MethodGet, l)
}

// denyBlob makes a registry answer requests for a layer's blob with a status, in one repository. A
// HEAD gets another.
func denyBlob(repository string, l registrytest.Layer, head, get int) func(http.ResponseWriter, *http.Request) bool {
	path := "/v2/" + repository + "/blobs/" + digest.FromBytes(l.Blob).String()
	return func(w http.ResponseWriter, r *http.Request) bool {
		if r.URL.Path != path {
			return false
		}
		status := get
		if r.Method == http.MethodHead {
			status = head
		}
		w.WriteHeader(status)
		return true
	}
}

// A pull gets a private layer of this node only if its registry serves the blob to that pull, or
// confirms that it would.
func TestPrivateLayerIsNotServedToOthers(t *testing.T) {
	private := gzipped(t, "secret", "private")
	for _, tc := range []struct {
		name      string
		same      bool // the attacker's repository is in the same registry
		head, get int
		want      codes.Code
	}{
		{"another registry that says it has the blob", false, http.StatusOK, http.StatusNotFound, codes.NotFound},
		{"another registry that knows nothing of it", false, http.StatusNotFound, http.StatusNotFound, codes.NotFound},
		{"another repository that lacks it", true, http.StatusNotFound, http.StatusNotFound, codes.NotFound},
		{"another repository that refuses it", true, http.StatusForbidden, http.StatusForbidden, codes.PermissionDenied},
		{"another repository that wants other credentials", true, http.StatusUnauthorized, http.StatusUnauthorized, codes.Unauthenticated},
	} {
		t.Run(tc.name, func(t *testing.T) {
			victim := registrytest.New(t)
			victim.PutImage("victim", "v1", "", private)
			attacker := victim
			if !tc.same {
				attacker = registrytest.New(t)
			}
			attacker.PutImage("attacker", "v1", "his own configuration", private)
			attacker.Before = denyBlob("attacker", private, tc.head, tc.get)
			root := t.TempDir()
			s := openStore(t, pull.Config{Root: root})
			mustPull(t, s, victim.Host()+"/victim:v1")
			attack := func(s *node, when string) {
				t.Helper()
				_, err := s.Pull(t.Context(), attacker.Host()+"/attacker:v1", nil)
				wantCode(t, err, tc.want, digest.FromBytes(private.Blob).String())
				if n := len(s.List()); n != 1 {
					t.Errorf("%d images %s", n, when)
				}
			}
			attack(s, "at first")
			if err := s.Close(); err != nil {
				t.Fatal(err)
			}
			s = openStore(t, pull.Config{Root: root})
			attack(s, "after a restart")
			if n := downloads(victim, private); !tc.same && n != 1 {
				t.Errorf("the private layer was fetched %d times", n)
			}
		})
	}
}

// A pull that only names a private layer gets nothing from another pull's download of it.
func TestDownloadOfAPrivateLayerIsNotSharedWithOthers(t *testing.T) {
	private := gzipped(t, "secret", "private")
	reg := registrytest.New(t)
	s := openStore(t, pull.Config{})
	reg.PutImage("victim", "v1", "", private)
	reg.PutImage("attacker", "v1", "his own configuration", private)
	arrived, open := make(chan struct{}, 10), make(chan struct{})
	deny := denyBlob("attacker", private, http.StatusForbidden, http.StatusForbidden)
	reg.Before = func(w http.ResponseWriter, r *http.Request) bool {
		if strings.HasPrefix(r.URL.Path, "/v2/victim/blobs/"+digest.FromBytes(private.Blob).String()) {
			arrived <- struct{}{}
			<-open
		}
		return deny(w, r)
	}
	victim := pullLater(t.Context(), s, reg.Host()+"/victim:v1")
	<-arrived
	attacker := pullLater(t.Context(), s, reg.Host()+"/attacker:v1")
	eventually(t, "both pulls wait for the layer", downloading(s, 2))
	close(open)
	if err := <-victim; err != nil {
		t.Error(err)
	}
	wantCode(t, <-attacker, codes.PermissionDenied)
	if n := len(s.List()); n != 1 {
		t.Errorf("%d images", n)
	}
}

// The requests for a layer that is here depend on the registry and repository that it came from.
func TestPresentLayerRequests(t *testing.T) {
	base := gzipped(t, "base", "x")
	for _, tc := range []struct {
		name        string
		elsewhere   bool   // the second image is in another registry
		repository  string // of the second image, the first is app:v1
		before      func(http.ResponseWriter, *http.Request) bool
		heads, gets int
	}{
		{name: "same repository", repository: "app"},
		{name: "another repository of the registry", repository: "other", heads: 1},
		{name: "a repository whose name begins the same", repository: "apple", heads: 1},
		{name: "a registry that does not know HEAD", repository: "other", before: denyHead, heads: 1, gets: 1},
		{name: "another registry", elsewhere: true, repository: "app", gets: 1},
	} {
		t.Run(tc.name, func(t *testing.T) {
			reg := registrytest.New(t)
			s := openStore(t, pull.Config{})
			reg.PutImage("app", "v1", "", base)
			first := mustPull(t, s, reg.Host()+"/app:v1")
			second := reg
			if tc.elsewhere {
				second = registrytest.New(t)
			}
			second.PutImage(tc.repository, "v2", "another configuration", base)
			second.PutImage(tc.repository, "v3", "a third one", base)
			second.Before = tc.before
			heads, gets := asked(second, http.MethodHead, base), downloads(second, base)
			img := mustPull(t, s, second.Host()+"/"+tc.repository+":v2")
			if h, g := asked(second, http.MethodHead, base)-heads, downloads(second, base)-gets; h != tc.heads || g != tc.gets {
				t.Errorf("%d HEAD, %d GET, want %d and %d", h, g, tc.heads, tc.gets)
			}
			if len(img.Layers) != 1 || img.Layers[0] != first.Layers[0] {
				t.Errorf("layers %v and %v", first.Layers, img.Layers)
			}
			all := second.Count("/blobs/" + digest.FromBytes(base.Blob).String())
			mustPull(t, s, second.Host()+"/"+tc.repository+":v2")
			mustPull(t, s, second.Host()+"/"+tc.repository+":v3")
			if n := second.Count("/blobs/"+digest.FromBytes(base.Blob).String()) - all; n != 0 {
				t.Errorf("%d requests for the layer by later pulls from the repository", n)
			}
		})
	}
}

func denyHead(w http.ResponseWriter, r *http.Request) bool {
	if r.Method != http.MethodHead || !strings.Contains(r.URL.Path, "/blobs/") {
		return false
	}
	w.WriteHeader(http.StatusMethodNotAllowed)
	return true
}

// The origin of a layer that only a container uses is not known: the layer is fetched again, and
// kept as it is.
func TestHeldLayerOfARemovedImageIsFetchedAgain(t *testing.T) {
	reg := registrytest.New(t)
	s := openStore(t, pull.Config{})
	base := gzipped(t, "base", "x")
	reg.PutImage("app", "v1", "", base)
	img := mustPull(t, s, reg.Host()+"/app:v1")
	if _, err := s.Hold("container", img.Layers); err != nil {
		t.Fatal(err)
	}
	if err := s.Remove(t.Context(), img.ID); err != nil {
		t.Fatal(err)
	}
	reg.Before = denyBlob("app", base, http.StatusOK, http.StatusForbidden)
	_, err := s.Pull(t.Context(), reg.Host()+"/app:v1", nil)
	wantCode(t, err, codes.PermissionDenied)
	reg.Before = nil
	again := mustPull(t, s, reg.Host()+"/app:v1")
	if got := readFile(t, s, again, "base"); got != "x" || again.Layers[0] != img.Layers[0] {
		t.Errorf("the file holds %q, layers %v and %v", got, img.Layers, again.Layers)
	}
}

// Pulls of one image at the same time, and pulls that follow while it is not complete, fetch a
// layer once.
func TestPullsOfOneImageFetchALayerOnce(t *testing.T) {
	reg := registrytest.New(t)
	s := openStore(t, pull.Config{})
	base, slow := gzipped(t, "base", "x"), gzipped(t, "slow", "y")
	reg.PutImage("app", "v1", "", base, slow)
	g := gateBlob(reg, slow.Blob)
	one := pullLater(t.Context(), s, reg.Host()+"/app:v1")
	<-g.arrived
	eventually(t, "the first layer is here", func() bool { return len(s.LayerNames()) == 1 })
	two := pullLater(t.Context(), s, reg.Host()+"/app:v1")
	eventually(t, "both pulls wait for the layer", downloading(s, 2))
	close(g.open)
	for _, done := range []<-chan error{one, two} {
		if err := <-done; err != nil {
			t.Error(err)
		}
	}
	if b, l := reg.Count("/blobs/"+digest.FromBytes(base.Blob).String()), reg.Count("/blobs/"+digest.FromBytes(slow.Blob).String()); b != 1 || l != 1 {
		t.Errorf("%d and %d requests", b, l)
	}
}

// An image in the store serves only those whose credentials its repository accepts.
func TestPullWithOtherCredentials(t *testing.T) {
	reg := registrytest.New(t)
	s := openStore(t, pull.Config{})
	base := gzipped(t, "base", "x")
	reg.PutImage("app", "v1", "", base)
	reg.PutImage("app", "v2", "another configuration", base)
	reg.Before = func(w http.ResponseWriter, r *http.Request) bool {
		if user, password, _ := r.BasicAuth(); password == "secret-of-"+user {
			return false
		}
		w.Header().Set("WWW-Authenticate", `Basic realm="test"`)
		w.WriteHeader(http.StatusUnauthorized)
		return true
	}
	as := func(user string) *runtimeapi.AuthConfig {
		return &runtimeapi.AuthConfig{Username: user, Password: "secret-of-" + user}
	}
	if _, err := s.Pull(t.Context(), reg.Host()+"/app:v1", as("one")); err != nil {
		t.Fatal(err)
	}
	for _, tag := range []string{"v1", "v2"} {
		for _, auth := range []*runtimeapi.AuthConfig{nil, {Username: "one", Password: "wrong"}} {
			_, err := s.Pull(t.Context(), reg.Host()+"/app:"+tag, auth)
			wantCode(t, err, codes.Unauthenticated)
		}
		if _, err := s.Pull(t.Context(), reg.Host()+"/app:"+tag, as("two")); err != nil {
			t.Error(err)
		}
	}
	if n := reg.Count("GET /v2/app/blobs/" + digest.FromBytes(base.Blob).String()); n != 1 {
		t.Errorf("%d requests for the layer", n)
	}
}

// BenchmarkAccess pulls an image of eight layers that are here, from a registry that answers after
// 20 ms.
func BenchmarkAccess(b *testing.B) {
	for _, repository := range []string{"app", "other"} {
		b.Run(repository, func(b *testing.B) { benchmarkAccess(b, repository) })
	}
}

func benchmarkAccess(b *testing.B, repository string) {
	reg := registrytest.New(b)
	layers := make([]registrytest.Layer, 8)
	for i := range layers {
		blob := make([]byte, 1024) // the end of a tar, which has no entry
		layers[i] = registrytest.Layer{Blob: append(blob, make([]byte, 512*i)...)}
	}
	reg.PutImage("app", "first", "", layers...)
	reg.Before = func(http.ResponseWriter, *http.Request) bool { time.Sleep(20 * time.Millisecond); return false }
	s, err := open(b.Context(), pull.Config{Root: b.TempDir(), Unpack: unpack.Layer}, slog.New(slog.DiscardHandler))
	if err != nil {
		b.Fatal(err)
	}
	defer s.Close()
	if _, err := s.Pull(b.Context(), reg.Host()+"/app:first", nil); err != nil {
		b.Fatal(err)
	}
	for i := 0; b.Loop(); i++ {
		b.StopTimer()
		tag := fmt.Sprint("v", i)
		reg.PutImage(repository, tag, tag, layers...)
		b.StartTimer()
		img, err := s.Pull(b.Context(), reg.Host()+"/"+repository+":"+tag, nil)
		if err != nil {
			b.Fatal(err)
		}
		b.StopTimer()
		if err := s.Remove(b.Context(), img.ID); err != nil {
			b.Fatal(err)
		}
		b.StartTimer()
	}
}
