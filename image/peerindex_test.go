package image

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"

	"berth/image/layer"
	"berth/image/lazy"
	blobindex "berth/image/lazy/index"
	"berth/image/lazy/indexes"
	"berth/image/peers"
	"berth/image/peers/peerstest"
	"berth/image/registry"
	"berth/image/registry/registrytest"
	"berth/image/tree"
	"berth/internal/errdefs"
	"berth/internal/task"
	"berth/internal/testutil"
)

// secondNode is a node that pulls lazily with the indexes of the node first. It is w.s.
type secondNode struct {
	*lazyWorld
	first *Store
}

// newSecondNode returns two nodes. The first one has pulled the image whole. wrap changes what it
// sends.
func newSecondNode(t *testing.T, wrap func(first peers.Layers) peers.Layers) *secondNode {
	t.Helper()
	n := &secondNode{lazyWorld: newLazyRegistry(t)}
	n.cfg = lazyConfig(t, LazyAll)
	nodes := peerNodesOf(t, 2, func(i int) Config { return []Config{indexConfig(t), n.cfg}[i] }, func(i int, l peers.Layers) peers.Layers {
		if i == 0 && wrap != nil {
			return wrap(l)
		}
		return l
	})
	n.first, n.s = nodes[0], nodes[1]
	n.needEngine(t)
	pull(t, n.first, n.ref)
	indexOf(t, n.first, n.layer)
	n.awaitAnnouncement(t)
	return n
}

func (n *secondNode) key() peers.Key {
	return peers.Key{Registry: n.reg.Host(), Blob: digest.FromBytes(n.layer.Blob), DiffID: n.layer.DiffID}
}

// awaitAnnouncement waits until the second node finds that the first has the index.
func (n *secondNode) awaitAnnouncement(t *testing.T) {
	t.Helper()
	testutil.Eventually(t, "the index is found", func() bool {
		_, err := n.s.peers.Load().FindIndex(t.Context(), n.key())
		return err == nil
	})
}

// The second node that pulls an image is lazy with the index of the first. It passes the index on
// after it has proven it.
func TestSecondNodeIsLazy(t *testing.T) {
	n := newSecondNode(t, nil)
	blob := n.key().Blob
	testutil.Must(t, n.first.indexer.store.AddProfile(blob, []int{1}))
	release := n.hold()
	img := pull(t, n.s, n.ref)
	if n.incomplete(t) == nil {
		t.Fatal("the layer is complete: ", n.s.LazyStatus(img))
	}
	status, claim := n.s.LazyStatus(img).Layers[0], n.s.incomplete.layers.Claimed(img.Layers[0])
	if !strings.Contains(status.Decision, "another node") || status.Unproven == "" || claim == nil ||
		!slices.Equal(claim.Profile, []int{1}) || claim.Registry != n.reg.Host() {
		t.Errorf("status %+v, claim %+v", status, claim)
	}
	if _, err := n.s.OpenIndex(t.Context(), n.key()); err == nil || n.s.indexer.store.Has(blob) {
		t.Error("an index that is not proven is passed on")
	}
	release()
	testutil.Must(t, n.s.awaitComplete(t.Context(), img.Layers))
	n.check(t)
	testutil.Eventually(t, "the index is passed on", func() bool { return n.s.HasIndex(n.key()) })
	sent, err := n.s.OpenIndex(t.Context(), n.key())
	testutil.Must(t, err)
	b, err := io.ReadAll(io.NewSectionReader(sent, 0, sent.Size()))
	testutil.Must(t, err)
	x, hints, err := blobindex.DecodeWhole(b, blobindex.Bounds{Tar: 1 << 40, Data: 1 << 40})
	testutil.Must(t, err)
	if own := indexOf(t, n.first, n.layer); x.TreeDigest != own.TreeDigest || !slices.Contains(hints, 1) {
		t.Errorf("it has the tree %s and hints %v", x.TreeDigest, hints)
	}
}

// Each other policy does not use the indexes of peers.
func TestPolicyOfPeersIndexes(t *testing.T) {
	for _, policy := range []string{LazyOff, LazyIndexed} {
		t.Run(policy, func(t *testing.T) {
			n := newSecondNode(t, nil)
			n.s.incomplete.cfg.Policy = policy
			pull(t, n.s, n.ref)
			if n.incomplete(t) != nil {
				t.Error("the layer is incomplete")
			}
		})
	}
}

// changedIndexes sends changed indexes.
type changedIndexes struct {
	peers.Layers
	change func(b []byte) []byte
}

func (c changedIndexes) OpenIndex(ctx context.Context, k peers.Key) (peers.Tar, error) {
	sent, err := c.Layers.OpenIndex(ctx, k)
	if err != nil {
		return nil, err
	}
	b, err := io.ReadAll(io.NewSectionReader(sent, 0, sent.Size()))
	if err != nil {
		return nil, err
	}
	return wholeIndex{bytes.NewReader(c.change(b))}, nil
}

// lyingIndex makes the file of an index set-user-ID. Everything in it is consistent.
func lyingIndex(t *testing.T, b []byte) []byte {
	x, hints, err := blobindex.DecodeWhole(b, blobindex.Bounds{Tar: 1 << 40, Data: 1 << 40})
	testutil.Must(t, err)
	root, _, err := tree.Decode(bytes.NewReader(x.Tree), 0, tree.Limit{Bytes: 1 << 20, Memory: 1 << 20, Blocks: 1 << 20})
	testutil.Must(t, err)
	root.Children["file"].Mode |= unix.S_ISUID
	var changed bytes.Buffer
	testutil.Must(t, tree.Encode(&changed, root))
	x.Tree, x.TreeDigest = changed.Bytes(), digest.FromBytes(changed.Bytes())
	b, err = x.EncodeWhole(hints)
	testutil.Must(t, err)
	return b
}

// wholeIndex is an index for another node, in memory.
type wholeIndex struct{ *bytes.Reader }

func (wholeIndex) Close() error { return nil }

// A node that lies about the files of a layer is found out when the layer is complete. The image is
// removed, its containers are killed, and the node is not asked again.
func TestLyingIndexOfPeer(t *testing.T) {
	var sent sync.Map
	n := newSecondNode(t, func(l peers.Layers) peers.Layers {
		return changedIndexes{l, func(b []byte) []byte { sent.Store("sent", true); return lyingIndex(t, b) }}
	})
	killed := make(chan string, 1)
	n.s.OnDistrust(func(layer digest.Digest, reason string) { killed <- fmt.Sprint(layer, reason) })
	release := n.hold()
	img := pull(t, n.s, n.ref)
	claim := n.s.incomplete.layers.Claimed(img.Layers[0])
	if claim == nil {
		t.Fatal("the layer has no claim")
	}
	_, err := n.s.Hold("container", img.Layers)
	testutil.Must(t, err)
	release()
	if got := <-killed; !strings.HasPrefix(got, img.Layers[0].String()) || !strings.Contains(got, claim.Peer) || !strings.Contains(got, "tree") {
		t.Errorf("killed: %s", got)
	}
	testutil.Eventually(t, "the image is removed", func() bool { _, err := n.s.Get(img.ID); return err != nil })
	if n.s.indexer.store.Has(n.key().Blob) {
		t.Error("the wrong index is kept")
	}
	if err := n.s.Usable(img.Layers); err == nil {
		t.Error("containers may start on the layer")
	}
	sent.Clear()
	pull(t, n.s, n.ref)
	if _, again := sent.Load("sent"); again || n.incomplete(t) != nil {
		t.Error("the peer was asked again, or the pull was lazy")
	}
	n.check(t)
	testutil.Must(t, n.s.Release("container"))
}

// Verdicts of the time before the function is set, and before there are peers, are not lost.
func TestDistrustBeforeItsUser(t *testing.T) {
	var d distrusted
	layer := digest.FromString("layer")
	d.add(layer, "it lied")
	d.ban(nil, "192.0.2.1:80")
	got := map[digest.Digest]string{}
	d.set(func(layer digest.Digest, reason string) { got[layer] = reason })
	d.add(digest.FromString("second"), "it lied, too")
	if len(got) != 2 || got[layer] != "it lied" || len(d.bans) != 1 {
		t.Errorf("%v, %v", got, d.bans)
	}
}

// usesPeer reports whether the second node would use the index of the first.
func (n *secondNode) usesPeer(t *testing.T) bool {
	t.Helper()
	_, err := n.s.peers.Load().FindIndex(t.Context(), n.key())
	return err == nil
}

// Bans outlive the store, until they are over.
func TestBansAreKept(t *testing.T) {
	root := t.TempDir()
	var d distrusted
	testutil.Must(t, d.open(root, testutil.Logger(t)))
	for range 2 {
		d.ban(nil, "192.0.2.1:80")
	}
	d.ban(nil, "192.0.2.2:80")
	testutil.Must(t, d.dir.Write("over", ban{"192.0.2.3:80", time.Now().Add(-time.Second)}))
	testutil.Must(t, d.dir.Write("late", ban{"192.0.2.4:80", time.Now().Add(1000 * time.Hour)}))
	testutil.Must(t, os.WriteFile(filepath.Join(root, bansDir, "damaged.record"), []byte("x"), 0o600))
	for range 2 {
		var again distrusted
		testutil.Must(t, again.open(root, testutil.Logger(t)))
		var got []string
		for _, b := range again.bans {
			got = append(got, b.Peer)
			if left := time.Until(b.Until); left <= 0 || left > peers.BanTime {
				t.Errorf("%s is banned for %v", b.Peer, left)
			}
		}
		slices.Sort(got)
		if !slices.Equal(got, []string{"192.0.2.1:80", "192.0.2.2:80", "192.0.2.4:80"}) {
			t.Errorf("bans of %q", got)
		}
	}
}

// If the index of a peer and the bytes of a registry do not fit together, the next pull fetches the
// whole blob, which shows who was wrong.
func TestIndexDoesNotFitTheBlob(t *testing.T) {
	for name, lies := range map[string]bool{"the peer lies": true, "the registry sends other bytes": false} {
		t.Run(name, func(t *testing.T) {
			n := newSecondNode(t, func(l peers.Layers) peers.Layers {
				return changedIndexes{l, func(b []byte) []byte {
					x, hints, err := blobindex.DecodeWhole(b, blobindex.Bounds{Tar: 1 << 40, Data: 1 << 40})
					if err != nil || !lies {
						return b
					}
					x.States[len(x.States)/2][0] ^= 1
					b, _ = x.EncodeWhole(hints)
					return b
				}}
			})
			release := func() {}
			if !lies {
				n.spoil()
				release = n.hold() // until the image is recorded
			}
			img := pull(t, n.s, n.ref)
			if claim := n.s.incomplete.layers.Claimed(img.Layers[0]); claim == nil && !lies {
				t.Fatal("the layer has no claim")
			}
			release()
			testutil.Eventually(t, "the layer has failed, or was fetched whole", func() bool {
				_, err := n.s.Get(img.ID)
				return err != nil || n.incomplete(t) == nil
			})
			if !lies && (!n.usesPeer(t) || !n.s.suspects.has(n.key().Blob)) {
				t.Error("the peer is banned, or not suspected")
			}
			n.mu.Lock()
			n.wrong = false
			n.mu.Unlock()
			pull(t, n.s, n.ref)
			if n.incomplete(t) != nil {
				t.Error("the suspected index was used again")
			}
			if n.usesPeer(t) == lies || n.s.suspects.has(n.key().Blob) {
				t.Errorf("the peer is used: %v", !lies)
			}
			n.check(t)
		})
	}
}

// The proof can fail for reasons of this node. Then nobody is banned.
func TestOnlyLiarsAreBanned(t *testing.T) {
	for name, test := range map[string]struct {
		failed error
		banned bool
	}{
		"no attempt succeeds": {errdefs.New(codes.DataLoss, "its index could not be proven in 600 attempts"), false},
		"the disk is broken":  {errdefs.New(codes.DataLoss, "sync: %w", lazy.ErrLost), false},
		"another tree":        {errdefs.New(codes.DataLoss, "%w: its layer has another tree", lazy.ErrWrongIndex), true},
	} {
		t.Run(name, func(t *testing.T) {
			s := openStore(t, Config{})
			s.suspect(digest.FromString("blob"), nil, &layer.Claim{Peer: "192.0.2.1:80"}, test.failed)
			if banned := len(s.distrusted.bans) > 0; banned != test.banned {
				t.Errorf("banned: %v", banned)
			}
		})
	}
}

// After a pull that failed with indexes of peers, and not without them, only a peer whose tree is
// wrong is banned.
func TestPlanIsDistrusted(t *testing.T) {
	w := newLazyRegistry(t)
	s := openStore(t, indexConfig(t))
	layers := pull(t, s, w.ref).Layers
	store := s.layers.storeFor(layers)
	info, err := store.Info(layers[0])
	testutil.Must(t, err)
	l := registry.Layer{Blob: ocispec.Descriptor{Digest: digest.FromBytes(w.layer.Blob)}, DiffID: w.layer.DiffID}
	absent := registry.Layer{Blob: ocispec.Descriptor{Digest: digest.FromString("absent")}, DiffID: w.layer.DiffID}
	wrong := digest.FromString("wrong")
	for _, test := range []struct {
		name   string
		layer  registry.Layer
		d      lazyDecision
		banned bool
		table  bool
	}{
		{"right tree", l, lazyDecision{lazily: true, peer: "192.0.2.1:80", claimed: info.Tree}, false, false},
		{"not created", l, lazyDecision{lazily: true, peer: "192.0.2.2:80"}, false, false},
		{"absent layer", absent, lazyDecision{lazily: true, peer: "192.0.2.3:80", claimed: wrong}, false, false},
		{"wrong tree", l, lazyDecision{lazily: true, peer: "192.0.2.4:80", claimed: wrong}, true, false},
		{"table of contents", l, lazyDecision{lazily: true, table: true}, false, true},
	} {
		s.distrusted.bans, s.falseTables.tables = nil, nil
		s.distrustPlan(store, &registry.Image{Layers: []registry.Layer{test.layer}}, []lazyDecision{test.d})
		banned, table := len(s.distrusted.bans) > 0, s.falseTables.has(test.layer.Blob.Digest, "")
		if banned != test.banned || table != test.table {
			t.Errorf("%s: banned %v, false table %v", test.name, banned, table)
		}
	}
}

// An index of this node needs no proof, so it is used in the place of the same one of a peer, also
// if the registry has not served the blob to this node before.
func TestOwnIndexIsPreferred(t *testing.T) {
	n := newSecondNode(t, nil)
	other := registrytest.New(t)
	other.PutImage("app", "v1", "", n.layer)
	img := pull(t, n.s, other.Host()+"/app:v1")
	indexOf(t, n.s, n.layer)
	testutil.Must(t, n.s.Remove(t.Context(), img.ID))
	release := n.hold()
	img = pull(t, n.s, n.ref)
	if n.incomplete(t) == nil || n.s.incomplete.layers.Claimed(img.Layers[0]) != nil {
		t.Errorf("%+v", n.s.LazyStatus(img))
	}
	release()
	testutil.Must(t, n.s.awaitComplete(t.Context(), img.Layers))
	n.check(t)
	// A peer is not even asked if the registry has served the blob.
	ref, err := registry.ParseReference(other.Host() + "/app:v1")
	testutil.Must(t, err)
	repo, err := n.s.client.OpenWithin(ref, registry.Credentials{}, time.Minute)
	testutil.Must(t, err)
	defer repo.Close()
	l := registry.Layer{Blob: ocispec.Descriptor{Digest: n.key().Blob, Size: int64(len(n.layer.Blob))}, DiffID: n.layer.DiffID}
	if x, claim, err := n.s.indexFor(t.Context(), repo, l, "192.0.2.1:80"); err != nil || claim != nil || x.Blob != l.Blob.Digest {
		t.Errorf("claim %+v, %v", claim, err)
	}
}

// The upload of an index to a peer takes no memory for the index.
func TestIndexIsStreamed(t *testing.T) {
	const size = 64 << 20
	reg := registrytest.New(t)
	l := framed(t, "f", noise(2<<20, 6))
	reg.PutImage("app", "v1", "", l)
	s := openStore(t, indexConfig(t))
	s.indexer.store = withIndexBytes(t, s, 2*size)
	pull(t, s, reg.Host()+"/app:v1")
	x := indexOf(t, s, l)
	testutil.Must(t, s.indexer.store.Remove(x.Blob))
	tree, record := filepath.Join(s.cfg.Root, spoolDir, "tree"), filepath.Join(s.cfg.Root, spoolDir, "record")
	x.Tree = noise(size, 7)
	x.TreeDigest = digest.FromBytes(x.Tree)
	testutil.Must(t, os.WriteFile(tree, x.Tree, 0o600))
	testutil.Must(t, os.WriteFile(record, x.Record, 0o600))
	testutil.Must(t, s.indexer.store.Add(x, tree, record))
	testutil.Must(t, s.indexer.store.NoteServed(x.Blob, reg.Host()))
	testutil.Must(t, s.indexer.store.AddProfile(x.Blob, []int{1}))
	want, err := x.EncodeWhole([]int{1})
	testutil.Must(t, err)
	ca, addresses := peerstest.NewCA(t), peerstest.Addresses(t, 1)
	cert, key := ca.Node()
	p, err := peers.Open(peers.Config{Listen: addresses[0], Advertise: addresses[0], Seeds: addresses, CA: ca.File, Cert: cert, Key: key,
		Layers: s, Stall: time.Minute, CallTime: time.Minute, Waits: &task.Waits{}, Log: testutil.Logger(t)})
	testutil.Must(t, err)
	defer func() { testutil.Must(t, p.Close()) }()
	own, err := tls.LoadX509KeyPair(cert, key)
	testutil.Must(t, err)
	transport := &http.Transport{TLSClientConfig: &tls.Config{Certificates: []tls.Certificate{own}, InsecureSkipVerify: true}}
	defer transport.CloseIdleConnections()
	query := url.Values{"registry": {reg.Host()}, "diffID": {x.DiffID.String()}}
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	response, err := (&http.Client{Transport: transport}).Get("https://" + addresses[0] + "/berth/v1/indexes/" + x.Blob.String() + "?" + query.Encode())
	testutil.Must(t, err)
	h := digest.SHA256.Digester()
	n, err := io.Copy(h.Hash(), response.Body)
	testutil.Must(t, errors.Join(err, response.Body.Close()))
	runtime.ReadMemStats(&after)
	if n != int64(len(want)) || h.Digest() != digest.FromBytes(want) {
		t.Errorf("%d bytes with status %s, want %d", n, response.Status, len(want))
	}
	if took := after.TotalAlloc - before.TotalAlloc; took > size/4 {
		t.Errorf("the transfer of %d bytes took %d bytes of memory", n, took)
	}
}

// withIndexBytes returns another store of the indexes of s with another limit.
func withIndexBytes(t *testing.T, s *Store, most int64) *indexes.Store {
	t.Helper()
	store, err := indexes.Open(filepath.Join(s.cfg.Root, indexesDir), most, testutil.Logger(t))
	testutil.Must(t, err)
	return store
}

// An index with a damaged file is not sent, and removed.
func TestDamagedIndexIsNotSent(t *testing.T) {
	for _, file := range []string{"index", "tree", "tar"} {
		t.Run(file, func(t *testing.T) {
			reg := registrytest.New(t)
			l := framed(t, "f", noise(2<<20, 8))
			reg.PutImage("app", "v1", "", l)
			s := openStore(t, indexConfig(t))
			pull(t, s, reg.Host()+"/app:v1")
			x := indexOf(t, s, l)
			path := filepath.Join(s.cfg.Root, indexesDir, x.Blob.Encoded(), file)
			b, err := os.ReadFile(path)
			testutil.Must(t, err)
			b[len(b)-1] ^= 1
			testutil.Must(t, os.Remove(path)) // the tree is a link to that of the layer
			testutil.Must(t, os.WriteFile(path, b, 0o600))
			k := peers.Key{Registry: reg.Host(), Blob: x.Blob, DiffID: x.DiffID}
			if _, err := s.OpenIndex(t.Context(), k); !errdefs.IsNotFound(err) || s.HasIndex(k) {
				t.Error(err)
			}
		})
	}
}

// A peer that sends nothing of use, or nothing at all, costs a pull no more than time.
func TestUselessIndexOfPeer(t *testing.T) {
	for name, change := range map[string]func(b []byte) []byte{
		"no index":  func([]byte) []byte { return []byte("x") },
		"truncated": func(b []byte) []byte { return b[:len(b)/2] },
		"too large": func(b []byte) []byte { return append(b, make([]byte, 8<<20)...) },
		"of another blob": func(b []byte) []byte {
			x, _, err := blobindex.DecodeWhole(b, blobindex.Bounds{Tar: 1 << 40, Data: 1 << 40})
			if err != nil {
				return nil
			}
			x.Blob = digest.FromString("another")
			b, _ = x.EncodeWhole(nil)
			return b
		},
		"no tree": func(b []byte) []byte {
			x, _, err := blobindex.DecodeWhole(b, blobindex.Bounds{Tar: 1 << 40, Data: 1 << 40})
			if err != nil {
				return nil
			}
			x.Tree = []byte("no tree")
			x.TreeDigest = digest.FromBytes(x.Tree)
			b, _ = x.EncodeWhole(nil)
			return b
		},
		"of an endless tar": func(b []byte) []byte {
			x, _, err := blobindex.DecodeWhole(b, blobindex.Bounds{Tar: 1 << 40, Data: 1 << 40})
			if err != nil {
				return nil
			}
			x.TarSize = 1 << 45
			b, _ = x.EncodeWhole(nil)
			return b
		},
		"states of another blob": func(b []byte) []byte {
			x, _, err := blobindex.DecodeWhole(b, blobindex.Bounds{Tar: 1 << 40, Data: 1 << 40})
			if err != nil {
				return nil
			}
			for i := range x.States {
				x.States[i][0] ^= 1
			}
			b, _ = x.EncodeWhole(nil)
			return b
		},
	} {
		t.Run(name, func(t *testing.T) {
			n := newSecondNode(t, func(l peers.Layers) peers.Layers { return changedIndexes{l, change} })
			pull(t, n.s, n.ref)
			if n.incomplete(t) != nil {
				t.Error("the layer is incomplete")
			}
			n.check(t)
		})
	}
}

// A registry and a node that lie together cannot get wrong files into the images of another
// registry: its pulls wait for the proof.
func TestUnprovenLayerIsOfOneRegistry(t *testing.T) {
	n := newSecondNode(t, nil)
	release := n.hold()
	img := pull(t, n.s, n.ref)
	if n.s.incomplete.layers.Claimed(img.Layers[0]) == nil {
		t.Fatal("the layer has no claim")
	}
	other := registrytest.New(t)
	other.PutImage("app", "v1", "", n.layer)
	pulled := make(chan error, 1)
	go func() {
		_, err := n.s.Pull(t.Context(), other.Host()+"/app:v1", nil)
		pulled <- err
	}()
	blob := "GET /v2/app/blobs/" + n.key().Blob.String()
	testutil.Eventually(t, "the other registry is asked", func() bool { return other.Count(blob) > 0 || other.Count("HEAD"+blob[3:]) > 0 })
	select {
	case err := <-pulled:
		t.Fatalf("the pull from another registry does not wait for the proof: %v", err)
	default:
	}
	release()
	testutil.Must(t, <-pulled)
	if n.incomplete(t) != nil {
		t.Error("the layer is incomplete")
	}
}

// stuckIndexes do not send indexes.
type stuckIndexes struct{ peers.Layers }

func (stuckIndexes) OpenIndex(ctx context.Context, _ peers.Key) (peers.Tar, error) {
	<-ctx.Done()
	return nil, ctx.Err()
}

func TestStuckPeerDoesNotStopPull(t *testing.T) {
	n := newSecondNode(t, func(l peers.Layers) peers.Layers { return stuckIndexes{l} })
	n.s.incomplete.cfg.Transfer = 100 * time.Millisecond
	pull(t, n.s, n.ref)
	n.check(t)
}

// A node sends an index for the registry only that has served the layer to it, and only while it
// has the layer.
func TestAccessToIndexes(t *testing.T) {
	n := newSecondNode(t, nil)
	other := n.key()
	other.Registry = "other.test"
	wrongTar := n.key()
	wrongTar.DiffID = digest.FromString("another tar")
	for _, k := range []peers.Key{other, wrongTar} {
		if _, err := n.first.OpenIndex(t.Context(), k); !errdefs.IsNotFound(err) || n.first.HasIndex(k) {
			t.Errorf("%+v: %v", k, err)
		}
	}
	liar := registrytest.New(t) // it names the layer, and has nothing of it
	liar.PutImage("app", "v1", "", n.layer)
	liar.Before = n.before
	n.lose()
	if _, err := n.s.Pull(t.Context(), liar.Host()+"/app:v1", nil); err == nil {
		t.Error("a registry without the blob served the image")
	}
	img, err := n.first.Get(n.ref)
	testutil.Must(t, err)
	testutil.Must(t, n.first.Remove(t.Context(), img.ID))
	if n.first.HasIndex(n.key()) {
		t.Error("the layer is gone, and its index is sent")
	}
}

// A layer whose index is not proven and that a later daemon cannot load ends as one whose proof has
// failed: its containers are killed and its images removed. The next start does it again, in case
// the daemon ended before. When the image was pulled again, its containers are not killed.
func TestUnprovenLayerIsDamaged(t *testing.T) {
	for _, damaged := range []string{"index", "claim"} {
		t.Run(damaged, func(t *testing.T) {
			n := newSecondNode(t, nil)
			release := n.hold()
			img := pull(t, n.s, n.ref)
			name := img.Layers[0]
			if n.s.incomplete.layers.Claimed(name) == nil {
				t.Fatal("the layer has no claim")
			}
			_, err := n.s.Hold("container", img.Layers)
			testutil.Must(t, err)
			testutil.Must(t, n.s.Close())
			release()
			testutil.Must(t, os.Truncate(filepath.Join(n.cfg.Root, erofsDir, lazyDir, name.Encoded(), damaged), 3))
			for range 2 {
				n.s = openUnsettled(t, n.cfg, io.Discard)
				var killed []digest.Digest
				n.s.OnDistrust(func(layer digest.Digest, reason string) {
					killed = append(killed, layer)
					if !strings.Contains(reason, "may have been wrong") {
						t.Error(reason)
					}
				})
				if !slices.Equal(killed, []digest.Digest{name}) {
					t.Errorf("killed %v", killed)
				}
				if _, err := n.s.Get(img.ID); err == nil {
					t.Error("the image exists")
				}
				testutil.Must(t, n.s.Close())
			}
			n.s = openUnsettled(t, n.cfg, io.Discard)
			pull(t, n.s, n.ref)
			n.check(t)
			testutil.Must(t, n.s.Close())
			n.s = openUnsettled(t, n.cfg, io.Discard)
			n.s.OnDistrust(func(layer digest.Digest, _ string) { t.Errorf("killed %s after the image was pulled again", layer) })
		})
	}
}
