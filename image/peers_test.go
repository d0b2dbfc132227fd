package image_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/opencontainers/go-digest"
	"google.golang.org/grpc/codes"

	"berth/image"
	"berth/image/layer"
	"berth/image/peers"
	"berth/image/peers/peerstest"
	"berth/image/pull"
	"berth/image/registry/registrytest"
	"berth/image/unpack"
	"berth/internal/errdefs"
	"berth/internal/task"
	"berth/internal/testutil"
)

// peerNodes are stores that exchange layers.
func peerNodes(t *testing.T, count int, wrap func(i int, l peers.Layers) peers.Layers) (stores []*node) {
	t.Helper()
	return peerNodesOf(t, count, func(int) pull.Config { return pull.Config{} }, wrap)
}

// peerNodesOf is peerNodes with a configuration for each store.
func peerNodesOf(t *testing.T, count int, config func(i int) pull.Config,
	wrap func(i int, l peers.Layers) peers.Layers) (stores []*node) {
	t.Helper()
	ca := peerstest.NewCA(t)
	addresses := peerstest.Addresses(t, count)
	for i, address := range addresses {
		log := new(testutil.Buffer)
		s := openUnsettled(t, config(i), log)
		s.log = log
		testutil.Must(t, s.CollectGarbage(t.Context()))
		var layers peers.Layers = s
		if wrap != nil {
			layers = wrap(i, s)
		}
		cfg := peers.Config{
			Listen: address, Advertise: address, Seeds: addresses, CA: ca.File, Layers: layers, Stall: time.Minute, CallTimeout: time.Minute,
			Waits: &task.Waits{}, Log: testutil.Logger(t),
		}
		cfg.Cert, cfg.Key = ca.Node()
		p, err := peers.Open(cfg)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if err := p.Close(); err != nil {
				t.Error(err)
			}
		})
		s.UsePeers(p)
		s.peers = p
		stores = append(stores, s)
	}
	return stores
}

// layersOfSize returns layers with one file each.
func layersOfSize(t *testing.T, count, size int) (list []registrytest.Layer) {
	t.Helper()
	for i := range count {
		list = append(list, gzipped(t, fmt.Sprintf("file%d", i), strings.Repeat(fmt.Sprintf("%7d\n", i), size/8)))
	}
	return list
}

// blobRequests returns how often layers were requested from a registry.
func blobRequests(reg *registrytest.Server, layers []registrytest.Layer) (count int) {
	for _, l := range layers {
		count += reg.Count("blobs/"+digest.FromBytes(l.Blob).String()) - headRequests(reg, l)
	}
	return count
}

func headRequests(reg *registrytest.Server, l registrytest.Layer) (count int) {
	for _, r := range reg.Requests() {
		if strings.HasPrefix(r, http.MethodHead) && strings.Contains(r, digest.FromBytes(l.Blob).String()) {
			count++
		}
	}
	return count
}

func TestNodesShareLayers(t *testing.T) {
	reg := registrytest.New(t)
	layers := layersOfSize(t, 8, 256<<10)
	reg.PutImage("team/app", "v1", "", layers...)
	const count = 10
	nodes := peerNodes(t, count, nil)
	var group sync.WaitGroup
	for _, s := range nodes {
		group.Go(func() {
			img, err := s.Pull(t.Context(), reg.Host()+"/team/app:v1", nil)
			if err != nil {
				t.Error(err)
				return
			}
			for i := range layers {
				want := strings.Repeat(fmt.Sprintf("%7d\n", i), 256<<10/8)
				if got := readFile(t, s, img, fmt.Sprintf("file%d", i)); got != want {
					t.Errorf("file%d has %d bytes", i, len(got))
				}
			}
		})
	}
	group.Wait()
	// 1.2 times the image for all nodes together.
	if n := blobRequests(reg, layers); n > len(layers)*12/10 {
		t.Errorf("%d nodes requested %d layers from the registry, the image has %d", count, n, len(layers))
	}
}

// lyingLayers sends a wrong tar for each layer.
type lyingLayers struct{ *pull.Puller }

type lie struct{ *bytes.Reader }

func (lie) Close() error { return nil }

func (l lyingLayers) OpenShared(ctx context.Context, k peers.Key) (peers.Tar, error) {
	tar, err := l.Puller.OpenShared(ctx, k)
	if err != nil {
		return nil, err
	}
	defer tar.Close()
	content, err := io.ReadAll(io.NewSectionReader(tar, 0, tar.Size()))
	if err != nil {
		return nil, err
	}
	return lie{bytes.NewReader(bytes.ReplaceAll(content, []byte("0\n"), []byte("1\n")))}, nil
}

// brokenLayers sends no tar completely.
type brokenLayers struct{ *pull.Puller }

type broken struct{ peers.Tar }

func (b broken) ReadAt(p []byte, offset int64) (int, error) {
	if offset+int64(len(p)) == b.Size() {
		return 0, errors.New("the disk is broken")
	}
	return b.Tar.ReadAt(p, offset)
}

func (l brokenLayers) OpenShared(ctx context.Context, k peers.Key) (peers.Tar, error) {
	tar, err := l.Puller.OpenShared(ctx, k)
	if err != nil {
		return nil, err
	}
	return broken{tar}, nil
}

// After a transfer that breaks, another peer is asked, and not the registry.
func TestBrokenTransferContinuesAtAnotherPeer(t *testing.T) {
	reg := registrytest.New(t)
	layers := layersOfSize(t, 8, 64<<10)
	reg.PutImage("team/app", "v1", "", layers...)
	nodes := peerNodes(t, 3, func(i int, l peers.Layers) peers.Layers {
		if i == 0 {
			return brokenLayers{l.(*node).Puller}
		}
		return l
	})
	mustPull(t, nodes[0], reg.Host()+"/team/app:v1")
	mustPull(t, nodes[1], reg.Host()+"/team/app:v1") // its only peer is broken
	before := blobRequests(reg, layers)
	mustPull(t, nodes[2], reg.Host()+"/team/app:v1")
	if n := blobRequests(reg, layers) - before; n > 0 {
		t.Errorf("%d of %d layers came from the registry, although a peer has them", n, len(layers))
	}
}

// slotLayers checks that the receiver has an unpack slot when it asks for a tar.
type slotLayers struct {
	*node
	t        *testing.T
	receiver func() *node
}

func (l slotLayers) OpenShared(ctx context.Context, k peers.Key) (peers.Tar, error) {
	if release, ok := l.receiver().Budget().TrySlot("another registry"); ok {
		release()
		l.t.Error("the receiver asks for the tar before it has a slot")
	}
	return l.Puller.OpenShared(ctx, k)
}

func TestTarIsRequestedWithASlot(t *testing.T) {
	reg := registrytest.New(t)
	reg.PutImage("team/app", "v1", "", layersOfSize(t, 1, 64<<10)...)
	var nodes []*node
	nodes = peerNodesOf(t, 2, func(int) pull.Config { return pull.Config{MaxUnpacking: 1} }, func(i int, l peers.Layers) peers.Layers {
		return slotLayers{l.(*node), t, func() *node { return nodes[1] }}
	})
	mustPull(t, nodes[0], reg.Host()+"/team/app:v1")
	mustPull(t, nodes[1], reg.Host()+"/team/app:v1")
}

// stuckLayers sends the beginning of a tar, and the rest at the end of the test.
type stuckLayers struct {
	*node
	release <-chan struct{}
}

type stuck struct {
	peers.Tar
	release <-chan struct{}
}

func (s stuck) ReadAt(p []byte, offset int64) (int, error) {
	if offset > 0 {
		<-s.release
	}
	return s.Tar.ReadAt(p, offset)
}

func (l stuckLayers) OpenShared(ctx context.Context, k peers.Key) (peers.Tar, error) {
	tar, err := l.Puller.OpenShared(ctx, k)
	if err != nil {
		return nil, err
	}
	return stuck{tar, l.release}, nil
}

// An unpacker that needs no more of a peer's tar can stop it, although the peer sends nothing.
func TestUnpackerStopsPeer(t *testing.T) {
	reg := registrytest.New(t)
	reg.PutImage("team/app", "v1", "", layersOfSize(t, 1, 1<<20)...)
	release := make(chan struct{})
	refuse := func(_ context.Context, _ *os.File, blob io.Reader, _ unpack.Job) (unpack.Result, error) {
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			_, _ = io.Copy(io.Discard, blob)
		}()
		stopper, ok := blob.(unpack.Stopper)
		if !ok {
			t.Error("the blob cannot be stopped")
			return unpack.Result{}, errors.New("refused")
		}
		stopper.Stop()
		<-ended
		return unpack.Result{}, errors.New("refused")
	}
	nodes := peerNodesOf(t, 2, func(i int) pull.Config {
		if i == 1 {
			return pull.Config{Unpack: refuse}
		}
		return pull.Config{}
	}, func(_ int, l peers.Layers) peers.Layers { return stuckLayers{l.(*node), release} })
	t.Cleanup(func() { close(release) }) // before the servers are closed
	mustPull(t, nodes[0], reg.Host()+"/team/app:v1")
	if _, err := nodes[1].Pull(t.Context(), reg.Host()+"/team/app:v1", nil); err == nil {
		t.Error("a refused layer was pulled")
	}
}

// A layer that needs more memory is requested from the same peer again.
func TestPeerIsAskedAgainWithMoreMemory(t *testing.T) {
	reg := registrytest.New(t)
	layers := layersOfSize(t, 1, 64<<10)
	reg.PutImage("team/app", "v1", "", layers...)
	var calls atomic.Int64
	twice := func(ctx context.Context, tree *os.File, blob io.Reader, job unpack.Job) (unpack.Result, error) {
		if calls.Add(1) == 1 {
			_, _ = blob.Read(make([]byte, 1000))
			return unpack.Result{}, &unpack.Error{Code: unpack.MoreMemory, Err: errors.New("too little memory")}
		}
		return unpack.Layer(ctx, tree, blob, job)
	}
	nodes := peerNodesOf(t, 2, func(i int) pull.Config {
		if i == 1 {
			return pull.Config{Unpack: twice, WorkMemory: 256 << 20}
		}
		return pull.Config{}
	}, nil)
	mustPull(t, nodes[0], reg.Host()+"/team/app:v1")
	before := blobRequests(reg, layers)
	mustPull(t, nodes[1], reg.Host()+"/team/app:v1")
	if n := blobRequests(reg, layers) - before; n > 0 || calls.Load() != 2 {
		t.Errorf("%d requests to the registry, unpacked %d times", n, calls.Load())
	}
}

// A panic during a fetch ends it for peers that wait for it.
func TestPanicEndsFetch(t *testing.T) {
	reg := registrytest.New(t)
	layers := layersOfSize(t, 1, 64<<10)
	reg.PutImage("team/app", "v1", "", layers...)
	nodes := peerNodesOf(t, 2, func(i int) pull.Config {
		if i == 1 {
			return pull.Config{}
		}
		return pull.Config{Unpack: func(context.Context, *os.File, io.Reader, unpack.Job) (unpack.Result, error) { panic("a bug") }}
	}, nil)
	if _, err := nodes[0].Pull(t.Context(), reg.Host()+"/team/app:v1", nil); errdefs.Code(err) != codes.Internal {
		t.Fatalf("no panic: %v", err)
	}
	k := peers.Key{Registry: reg.Host(), Blob: digest.FromBytes(layers[0].Blob), DiffID: layers[0].DiffID}
	if err := nodes[1].peers.Search(k, int64(len(layers[0].Blob))).Wait(t.Context()); !errors.Is(err, peers.ErrNone) {
		t.Errorf("the other node got %v, want to fetch the layer", err)
	}
}

func TestLyingPeer(t *testing.T) {
	reg := registrytest.New(t)
	layers := layersOfSize(t, 1, 64<<10)
	reg.PutImage("team/app", "v1", "", layers...)
	nodes := peerNodes(t, 2, func(i int, l peers.Layers) peers.Layers {
		if i == 0 {
			return lyingLayers{l.(*node).Puller}
		}
		return l
	})
	mustPull(t, nodes[0], reg.Host()+"/team/app:v1")
	img := mustPull(t, nodes[1], reg.Host()+"/team/app:v1")
	if got := readFile(t, nodes[1], img, "file0"); got != strings.Repeat("      0\n", 64<<10/8) {
		t.Errorf("file0 has %d bytes, beginning with %.20q", len(got), got)
	}
	if n := blobRequests(reg, layers); n != 2 {
		t.Errorf("the layer was requested from the registry %d times, want once for each node", n)
	}
}

// TestPeersServeOnlyLayersOfTheRegistry: another registry that names a private layer does not get
// it from a peer, although it claims to have the blob.
func TestPeersServeOnlyLayersOfTheRegistry(t *testing.T) {
	private, hostile := registrytest.New(t), registrytest.New(t)
	secret := gzipped(t, "secret", "password")
	private.PutImage("team/app", "v1", "", secret)
	hostile.PutImage("evil/app", "v1", "", secret)
	blob := digest.FromBytes(secret.Blob)
	hostile.Before = func(w http.ResponseWriter, r *http.Request) bool {
		if !strings.Contains(r.URL.Path, blob.String()) {
			return false
		}
		if r.Method == http.MethodHead { // it claims to have the blob
			w.Header().Set("Content-Length", fmt.Sprint(len(secret.Blob)))
			w.WriteHeader(http.StatusOK)
		} else {
			w.WriteHeader(http.StatusNotFound)
		}
		return true
	}
	nodes := peerNodes(t, 2, nil)
	mustPull(t, nodes[0], private.Host()+"/team/app:v1")
	if img, err := nodes[1].Pull(t.Context(), hostile.Host()+"/evil/app:v1", nil); err == nil {
		t.Errorf("the hostile image %s was pulled", img.ID)
	}
	k := peers.Key{Registry: hostile.Host(), Blob: blob, DiffID: secret.DiffID}
	if _, err := nodes[0].OpenShared(t.Context(), k); err == nil {
		t.Error("the private layer is served for the hostile registry")
	}
	k.Registry = private.Host()
	tar, err := nodes[0].OpenShared(t.Context(), k)
	if err != nil {
		t.Fatal(err)
	}
	if err := tar.Close(); err != nil {
		t.Error(err)
	}
}

// TestRegistryDecidesAboutPeers: a registry that does not confirm a blob to this pull is asked for
// it, and not the peers.
func TestRegistryDecidesAboutPeers(t *testing.T) {
	reg := registrytest.New(t)
	layers := layersOfSize(t, 1, 64<<10)
	reg.PutImage("team/app", "v1", "", layers...)
	nodes := peerNodes(t, 2, nil)
	mustPull(t, nodes[0], reg.Host()+"/team/app:v1")
	blob := digest.FromBytes(layers[0].Blob).String()
	reg.Before = func(w http.ResponseWriter, r *http.Request) bool {
		if strings.Contains(r.URL.Path, blob) {
			w.WriteHeader(http.StatusForbidden)
			return true
		}
		return false
	}
	if _, err := nodes[1].Pull(t.Context(), reg.Host()+"/team/app:v1", nil); err == nil {
		t.Error("the image was pulled without access to its layer")
	}
}

// An archive chooses the names of its images, so they are no evidence that a registry has served
// them.
func TestLoadedImagesAreNotShared(t *testing.T) {
	reg := registrytest.New(t)
	layers := layersOfSize(t, 1, 64<<10)
	reg.PutImage("team/app", "v1", "", layers...)
	name := reg.Host() + "/team/app:v1"
	from, to := openStore(t, pull.Config{}), openStore(t, pull.Config{})
	mustPull(t, from, name)
	var file bytes.Buffer
	if err := from.Save(t.Context(), &file, image.SaveOptions{Refs: []string{name}}); err != nil {
		t.Fatal(err)
	}
	if _, err := to.Load(t.Context(), &file, pull.LoadOptions{}); err != nil {
		t.Fatal(err)
	}
	if keys := to.SharedLayers(); len(keys) > 0 {
		t.Errorf("%v are announced", keys)
	}
	for _, rec := range to.Snapshot().Records() {
		k := peers.Key{Registry: reg.Host(), Blob: rec.Blobs[0], DiffID: layers[0].DiffID}
		if tar, err := to.OpenShared(t.Context(), k); err == nil {
			t.Error("a loaded layer is served", tar.Close())
		}
	}
}

// The log tells bytes of peers from those of the registry.
func TestPullCountsBytesOfPeers(t *testing.T) {
	reg := registrytest.New(t)
	layers := layersOfSize(t, 1, 64<<10)
	reg.PutImage("team/app", "v1", "", layers...)
	nodes := peerNodes(t, 2, nil)
	for _, s := range nodes {
		mustPull(t, s, reg.Host()+"/team/app:v1")
	}
	blob := fmt.Sprintf(" bytes=%d peerBytes=0 ", len(layers[0].Blob))
	if text := nodes[0].log.String(); !strings.Contains(text, blob) {
		t.Errorf("no %q in %s", blob, text)
	}
	if text := nodes[1].log.String(); !strings.Contains(text, " bytes=0 peerBytes=") || strings.Contains(text, " peerBytes=0 ") {
		t.Errorf("the bytes of the peer are not logged: %s", text)
	}
}

func TestSharedLayers(t *testing.T) {
	reg := registrytest.New(t)
	layers := layersOfSize(t, 2, 4096)
	reg.PutImage("team/app", "v1", "", layers...)
	s := openStore(t, pull.Config{})
	if keys := s.SharedLayers(); len(keys) > 0 {
		t.Errorf("an empty store has %v", keys)
	}
	mustPull(t, s, reg.Host()+"/team/app:v1")
	keys := s.SharedLayers()
	if len(keys) != len(layers) {
		t.Fatalf("%d keys", len(keys))
	}
	for _, k := range keys {
		if k.Registry != reg.Host() || k.Validate() != nil {
			t.Errorf("key %+v", k)
		}
		if !s.LayerStore(nil).Has((layer.Source{Blob: k.Blob, DiffID: k.DiffID}).Name()) {
			t.Errorf("no layer of the key %+v", k)
		}
	}
}
