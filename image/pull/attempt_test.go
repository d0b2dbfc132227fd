package pull

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"testing"

	"google.golang.org/grpc/codes"

	"berth/image/layer"
	"berth/image/lazy"
	"berth/image/peers"
	"berth/image/tree"
	"berth/image/unpack"
	"berth/image/unpack/budget"
	"berth/internal/errdefs"
)

// grown is what a budget gives a layer that had too little memory.
func grown(t *testing.T) budget.Shortage {
	t.Helper()
	b := budget.New(budget.Config{Memory: 1 << 30})
	more, ok := b.Grow(budget.Shortage{}, unpack.Limits{}, &unpack.Error{Code: unpack.MoreMemory, Err: errors.New("little")})
	if !ok {
		t.Fatal("the budget does not grow")
	}
	return more
}

// Each fault in each state: what follows, and that every chain of attempts ends.
func TestNext(t *testing.T) {
	t.Parallel()
	more := grown(t)
	for _, c := range []struct {
		name string
		a    attempt
		why  fault
		left options
		want attempt // equal to a: nothing follows
		ends bool
	}{
		{"nothing is left", attempt{}, corrupt, options{}, attempt{}, true},
		{"a final fault, of one layer", attempt{registry: true}, final, options{hosts: 3}, attempt{}, true},
		{"a final fault of one name", attempt{}, final, options{names: 2}, attempt{name: 1}, false},
		{"the last name", attempt{name: 1}, final, options{names: 2}, attempt{}, true},
		{"a new name begins anew", attempt{whole: true, fallback: true}, final, options{names: 2}, attempt{name: 1}, false},
		{"another pull's download", attempt{}, othersFault, options{shared: true}, attempt{}, false},
		{"another pull's download, of an image", attempt{}, othersFault, options{whole: true}, attempt{}, true},
		{"little memory", attempt{registry: true}, littleMemory, options{hosts: 1, more: more}, attempt{registry: true, more: more}, false},
		{"little memory, twice", attempt{registry: true, more: more}, littleMemory, options{hosts: 1, more: more}, attempt{}, true},
		{"little memory, from a peer", attempt{}, littleMemory, options{peers: true, more: more}, attempt{more: more}, false},
		{"a bad peer", attempt{}, badPeer, options{peers: true}, attempt{peers: 1}, false},
		{"a bad peer, after one with little memory", attempt{more: more}, badPeer, options{peers: true, more: more}, attempt{peers: 1, more: more}, false},
		{"the last bad peer", attempt{peers: maxSources - 1}, badPeer, options{peers: true}, attempt{peers: maxSources - 1, registry: true}, false},
		{"no peer has it", attempt{}, final, options{peers: true}, attempt{registry: true}, false},
		{"corrupt, of a peer that is not to blame", attempt{}, corrupt, options{peers: true, hosts: 2}, attempt{registry: true}, false},
		{"the registry begins with the usual memory", attempt{more: more}, final, options{peers: true, more: more}, attempt{registry: true}, false},
		{"corrupt", attempt{registry: true}, corrupt, options{hosts: 2}, attempt{registry: true, host: 1}, false},
		{"corrupt, the last host", attempt{registry: true, host: 1}, corrupt, options{hosts: 2}, attempt{}, true},
		{"corrupt, every host is wrong", attempt{registry: true}, corrupt, options{hosts: 0}, attempt{}, true},
		{"another host begins with the usual memory", attempt{registry: true, more: more}, corrupt, options{hosts: 2, more: more}, attempt{registry: true, host: 1}, false},
		{"too large for one layer", attempt{registry: true}, tooLarge, options{hosts: 2}, attempt{}, true},
		{"too large for a driver", attempt{}, tooLarge, options{driver: true, whole: true}, attempt{fallback: true}, false},
		{"too large for both", attempt{fallback: true}, tooLarge, options{driver: true, whole: true}, attempt{}, true},
		{"too large by a table", attempt{}, tooLarge, options{whole: true, tables: true}, attempt{whole: true}, false},
		{"too large for a driver, perhaps by a table", attempt{}, tooLarge, options{driver: true, whole: true, tables: true}, attempt{fallback: true}, false},
		{"too large for both, perhaps by a table", attempt{fallback: true}, tooLarge, options{driver: true, whole: true, tables: true}, attempt{whole: true}, false},
		{"a large tree, with memory left", attempt{registry: true}, largeTree, options{hosts: 1, more: more}, attempt{registry: true, more: more}, false},
		{"a large tree, with no memory left", attempt{registry: true, more: more}, largeTree, options{hosts: 1, more: more}, attempt{}, true},
		{"a large tree, for the image", attempt{}, largeTree, options{driver: true, whole: true}, attempt{fallback: true}, false},
		{"malformed", attempt{}, badTree, options{driver: true, whole: true}, attempt{}, true},
		{"malformed, perhaps by a table", attempt{}, badTree, options{whole: true, tables: true}, attempt{whole: true}, false},
		{"malformed without tables", attempt{whole: true}, badTree, options{tables: true}, attempt{}, true},
		{"an incomplete layer fails", attempt{}, failedLayer, options{whole: true}, attempt{whole: true}, false},
		{"an incomplete layer fails, again", attempt{whole: true}, failedLayer, options{}, attempt{}, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			b, how := next(c.a, c.why, c.left)
			if (how == "") != c.ends || !c.ends && b != c.want {
				t.Errorf("%+v follows %q, want %+v, end %v", b, how, c.want, c.ends)
			}
		})
	}
}

// Whatever happens, with whatever is left: the attempts end, and none is made twice. Only a
// download of another pull, which has ended, may be joined again.
func TestAttemptsEnd(t *testing.T) {
	t.Parallel()
	more := grown(t)
	for bits := range 1 << 6 {
		left := options{names: 1 + bits&1*2, whole: bits&2 != 0, tables: bits&4 != 0, driver: bits&8 != 0, peers: bits&16 != 0}
		if bits&32 != 0 {
			left.hosts, left.more = 4, more
		}
		for why := range allFaults {
			seen := map[attempt]bool{}
			for a := (attempt{}); ; {
				if seen[a] {
					t.Fatalf("fault %d with %+v: %+v is made twice", why, left, a)
				}
				seen[a] = true
				now := left // as callers offer it
				now.peers, now.whole, now.tables = left.peers && !a.registry, left.whole && !a.whole, left.tables && !a.whole
				b, how := next(a, why, now)
				if how == "" {
					break
				}
				a = b
			}
		}
	}
}

func TestFaultOf(t *testing.T) {
	t.Parallel()
	of := func(code unpack.Code) error { return &unpack.Error{Code: code, Err: errors.New("x")} }
	for _, c := range []struct {
		err  error
		want fault
	}{
		{context.Canceled, final},
		{errdefs.NotFound("no image"), final},
		{errdefs.Unavailable("no registry"), final},
		{of(unpack.FailedPrecondition), final},
		{of(unpack.MoreMemory), littleMemory},
		{of(unpack.MoreWindow), littleMemory},
		{errdefs.New(codes.DataLoss, "another digest"), corrupt},
		{errdefs.New(codes.DataLoss, "%w: EIO", lazy.ErrFailed), failedLayer},
		{errdefs.New(codes.DataLoss, "%w: %w", lazy.ErrFailed, of(unpack.MoreMemory)), failedLayer},
		{errdefs.New(codes.DataLoss, "%w: %w: %w", lazy.ErrFailed, layer.ErrTooLarge, of(unpack.MoreMemory)), failedLayer},
		{fmt.Errorf("stack layers: %w", layer.ErrTooLarge), tooLarge},
		{fmt.Errorf("%w: %w", layer.ErrTooLarge, of(unpack.MoreMemory)), largeTree},
		{fmt.Errorf("layer: %w", tree.ErrMalformed), badTree},
		{&peerError{errdefs.New(codes.DataLoss, "another digest")}, badPeer},
		{fmt.Errorf("x: %w", &sharedError{of(unpack.MoreMemory)}), othersFault},
	} {
		if got := faultOf(c.err); got != c.want {
			t.Errorf("%v: fault %d, want %d", c.err, got, c.want)
		}
	}
}

// Operators see what is wrong with a registry or an index, and not what is usual.
func TestLevelOf(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		err  error
		want slog.Level
	}{
		{fmt.Errorf("ask the home nodes: %w", peers.ErrNone), slog.LevelDebug},
		{errUnconfirmed, slog.LevelInfo},
		{&peerError{errdefs.New(codes.DataLoss, "another digest")}, slog.LevelInfo},
		{fmt.Errorf("stack layers: %w", layer.ErrTooLarge), slog.LevelInfo},
		{errdefs.New(codes.DataLoss, "another digest"), slog.LevelWarn},
		{errdefs.New(codes.DataLoss, "%w: EIO", lazy.ErrFailed), slog.LevelWarn},
		{fmt.Errorf("layer: %w", tree.ErrMalformed), slog.LevelWarn},
	} {
		if got := levelOf(faultOf(c.err), c.err); got != c.want {
			t.Errorf("%v: %v, want %v", c.err, got, c.want)
		}
	}
}
