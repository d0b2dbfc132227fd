package layer

import (
	"context"
	"fmt"
	"strings"
	"testing"

	"github.com/opencontainers/go-digest"
	"google.golang.org/grpc/codes"

	"berth/image/unpack"
	"berth/internal/errdefs"
	"berth/internal/testutil"
)

// longWay returns entries with a path to the directory d through forty symlinks of about 800 names
// each.
func longWay() (entries []header) {
	entries = append(entries, dir("d", 0o755))
	for i := range maxViewLinks {
		next := fmt.Sprintf("l%d", i+1)
		if i == maxViewLinks-1 {
			next = "d"
		}
		entries = append(entries, symlink(fmt.Sprintf("l%d", i), strings.Repeat("d/../", 816)+next))
	}
	return append(entries, file("d/f", "1"))
}

// The work for a chain of layers is limited, both for many lookups in one layer and for a few in
// each of many layers.
func TestStackLimitsEffort(t *testing.T) {
	s := openStore(t, t.TempDir())
	s.effort = 1 << 18
	low := create(t, s, makeTar(t, longWay()...))
	var links, implied []header
	for i := range 10 {
		links = append(links, hardlink(fmt.Sprint(i), "l0/f"))
	}
	for i := range 1000 {
		implied = append(implied, file(fmt.Sprintf("d/%d/x", i), ""))
	}
	wide := []digest.Digest{low}
	for i := range 50 {
		wide = append(wide, create(t, s, makeTar(t, dir("d", 0o755), file(fmt.Sprintf("d/%d", i), ""))))
	}
	for name, chain := range map[string][]digest.Digest{
		"long ways":   {low, create(t, s, makeTar(t, links...))},
		"many layers": append(wide, create(t, s, makeTar(t, implied...))),
	} {
		_, err := s.Stack(context.Background(), chain)
		if errdefs.Code(err) != codes.FailedPrecondition || !strings.Contains(fmt.Sprint(err), "work limit") {
			t.Errorf("%s: %v", name, err)
		}
	}
	short := create(t, s, makeTar(t, hardlink("1", "l0/f"), hardlink("2", "l39/f"))) // one long way is fine
	if _, err := s.Stack(context.Background(), []digest.Digest{low, short}); err != nil {
		t.Error(err)
	}
}

// If it takes long to find out that a chain needs no join, the result is recorded. Later daemons
// use it.
func TestEmptyJoinIsRecorded(t *testing.T) {
	root := t.TempDir()
	s := openStore(t, root)
	var few, many, list []header
	for i := range 10_000 {
		name := fmt.Sprintf("d/%d", i)
		list = append(list, dir(name, 0o755))
		if many = append(many, file(name+"/x", "")); i < 10 {
			few = append(few, file(name+"/y", ""))
		}
	}
	low := create(t, s, makeTar(t, list...))
	short, long := []digest.Digest{low, create(t, s, makeTar(t, few...))}, []digest.Digest{low, create(t, s, makeTar(t, many...))}
	for _, chain := range [][]digest.Digest{short, long} {
		if dirs, err := s.Stack(context.Background(), chain); err != nil || len(dirs) != 2 {
			t.Errorf("%d layers to mount: %v", len(dirs), err)
		}
	}
	if names := entries(t, root, "joins"); len(names) != 1 {
		t.Fatalf("on disk: %q", names)
	}
	again, err := Open(root, NewDirectory(unpack.Layer), Reserve{}, nil, discardLog()) // the first one stays: it does nothing
	testutil.Must(t, err)
	defer func() { testutil.Must(t, again.Close()) }()
	again.effort = longEffort / 2
	for _, chain := range [][]digest.Digest{short, long} {
		if dirs, err := again.Stack(context.Background(), chain); err != nil || len(dirs) != 2 {
			t.Errorf("%d layers to mount: %v", len(dirs), err)
		}
	}
	testutil.Must(t, again.Remove(long[1]))
	expectEmpty(t, root+"/joins")
}

// endsAfter is a context that is cancelled when it has been looked at a number of times.
type endsAfter struct {
	context.Context
	looks int
}

func (e *endsAfter) Err() error {
	if e.looks--; e.looks < 0 {
		return context.Canceled
	}
	return nil
}

// A join ends with its context, in the middle of one link.
func TestJoinIsCancelled(t *testing.T) {
	s := openStore(t, t.TempDir())
	chain := []digest.Digest{create(t, s, makeTar(t, longWay()...)), create(t, s, makeTar(t, hardlink("1", "l0/f")))}
	if _, err := s.Stack(&endsAfter{context.Background(), 10_000}, chain); errdefs.Code(err) != codes.Canceled {
		t.Error(err)
	}
	if _, err := s.Stack(context.Background(), chain); err != nil {
		t.Error(err)
	}
}

// The cache of a view is bounded, and lookups give the same results when it is full.
func TestViewCacheIsBounded(t *testing.T) {
	s := openStore(t, t.TempDir())
	id := create(t, s, makeTar(t, dir("d", 0o755), file("d/f", "1")))
	v, err := openView(newEffort(context.Background(), allEffort), []string{s.layerDir(id) + "/" + treeDir})
	testutil.Must(t, err)
	defer v.close()
	for i := range 5 {
		v.size = maxSeen - i*40
		if f, err := v.resolve("d/f"); err != nil || f.path != "d/f" || v.size > maxSeen {
			t.Errorf("%+v, %v; %d words", f, err, v.size)
		}
	}
	if len(v.seen) != 2 {
		t.Errorf("it remembers %d", len(v.seen))
	}
}
