package harness

import (
	"bytes"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"berth/integration/fixture"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// NewRegistry starts a registry for one test.
func NewRegistry(t *testing.T) *fixture.Registry {
	t.Helper()
	r := Get(fixture.NewRegistry())(t)
	t.Cleanup(func() { Must(t, r.Close()) })
	return r
}

// Push pushes an image and returns its name and its ID.
func Push(t *testing.T, r *fixture.Registry, repoTag string, img v1.Image) (name, id string) {
	t.Helper()
	name = Get(r.Push(repoTag, img))(t)
	config := Get(img.ConfigName())(t)
	return name, config.String()
}

// BuildImage returns the base image with trees on top, each a gzip layer.
func BuildImage(t *testing.T, config v1.Config, trees ...fixture.Tree) v1.Image {
	t.Helper()
	layers := make([]v1.Layer, 0, len(trees))
	for _, tree := range trees {
		layers = append(layers, PackLayer(t, tree, fixture.Gzip))
	}
	img := Get(fixture.Image(config, layers...))(t)
	return img
}

func PackLayer(t *testing.T, tree fixture.Tree, c fixture.Compression) v1.Layer {
	t.Helper()
	l := Get(tree.Layer(c))(t)
	return l
}

func DigestOf(t *testing.T, d interface{ Digest() (v1.Hash, error) }) string {
	t.Helper()
	h := Get(d.Digest())(t)
	return h.String()
}

// Repository strips the tag of a name.
func Repository(name string) string { return name[:strings.LastIndexByte(name, ':')] }

// BasicAuth answers requests without the right user and password. It is a hook of a registry.
func BasicAuth(w http.ResponseWriter, r *http.Request) bool {
	if user, password, _ := r.BasicAuth(); user == "user" && password == "secret" {
		return false
	}
	w.Header().Set("WWW-Authenticate", `Basic realm="test"`)
	w.WriteHeader(http.StatusUnauthorized)
	return true
}

// UnusedAddress returns a loopback address without a listener.
func UnusedAddress(t *testing.T) string {
	t.Helper()
	l := Get(net.Listen("tcp", "127.0.0.1:0"))(t)
	defer l.Close()
	return l.Addr().String()
}

// NoTraceOf fails the test if the daemon lists the image or its files still exist.
func NoTraceOf(t *testing.T, d *Daemon, name string) {
	t.Helper()
	if status := d.ImageStatus(t, name); status != nil {
		t.Errorf("the image exists: %v", status)
	}
	d.NoLeaks(t)
}

// SwapBlob returns a registry hook that serves other content for a blob.
func SwapBlob(digest string, content []byte) func(http.ResponseWriter, *http.Request) bool {
	return func(w http.ResponseWriter, r *http.Request) bool {
		if r.Method != http.MethodGet || !strings.HasSuffix(r.URL.Path, digest) {
			return false
		}
		http.ServeContent(w, r, "", time.Time{}, bytes.NewReader(content))
		return true
	}
}

// RawConn connects without cri-client, which hides some fields and codes.
func RawConn(t *testing.T, d *Daemon) *grpc.ClientConn {
	t.Helper()
	conn, err := grpc.NewClient("unix://"+d.Socket, grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(64<<20), grpc.MaxCallSendMsgSize(64<<20)))
	Must(t, err)
	t.Cleanup(func() { Must(t, conn.Close()) })
	return conn
}

func RawRuntime(t *testing.T, d *Daemon) runtimeapi.RuntimeServiceClient {
	t.Helper()
	return runtimeapi.NewRuntimeServiceClient(RawConn(t, d))
}
