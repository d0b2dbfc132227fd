package state

import (
	"cmp"
	"slices"
	"testing"

	"google.golang.org/grpc/codes"

	"berth/internal/errdefs"
)

type item string

func (i item) Visible() bool { return i != "hidden" }

func TestFindAcceptsUniquePrefix(t *testing.T) {
	t.Parallel()
	ix := NewIndex[item]("container")
	for _, id := range []string{"abc1", "abc2", "def", "defghi"} {
		ix.Put(id, item(id))
	}
	ix.Put("half1", "hidden")
	ix.Put("half2", "half2")
	ix.Put("gone", "gone")
	ix.Remove("gone")
	cases := []struct {
		id, want item
		code     codes.Code
	}{
		{"abc1", "abc1", codes.OK},
		{"abc", "", codes.InvalidArgument},
		{"def", "def", codes.OK}, // an exact match wins over a prefix
		{"defg", "defghi", codes.OK},
		{"half1", "", codes.NotFound},
		{"half", "half2", codes.OK}, // the only visible match
		{"gone", "", codes.NotFound},
		{"x", "", codes.NotFound},
		{"", "", codes.InvalidArgument},
	}
	for _, c := range cases {
		got, err := ix.Find(string(c.id))
		if got != c.want || errdefs.Code(err) != c.code {
			t.Errorf("Find(%q) = %q, %v; want %q, %v", c.id, got, err, c.want, c.code)
		}
	}
}

func TestSnapshotDoesNotChange(t *testing.T) {
	t.Parallel()
	ix := NewIndex[item]("pod")
	ix.Put("a", "1")
	before := ix.Snapshot()
	ix.Put("b", "2")
	ix.Remove("a")
	if len(before) != 1 || before["a"] != "1" {
		t.Errorf("an old snapshot changed: %v", before)
	}
}

func TestSortedFollowsChanges(t *testing.T) {
	t.Parallel()
	ix := NewIndex[item]("pod")
	want := func(want ...item) {
		t.Helper()
		for range 2 {
			if got := ix.Sorted(cmp.Compare); !slices.Equal(got, want) {
				t.Errorf("got %v, want %v", got, want)
			}
		}
	}
	want()
	ix.Put("b", "b")
	ix.Put("a", "a")
	want("a", "b")
	ix.Put("c", "0") // sorted by object, not by ID
	want("0", "a", "b")
	ix.Remove("a")
	want("0", "b")
	ix.PutAll(map[string]item{"a": "a", "c": "1"})
	want("1", "a", "b")
}
