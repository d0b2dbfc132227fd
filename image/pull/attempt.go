package pull

import (
	"context"
	"errors"
	"log/slog"

	"google.golang.org/grpc/codes"

	"berth/image/layer"
	"berth/image/lazy"
	"berth/image/peers"
	"berth/image/tree"
	"berth/image/unpack"
	"berth/image/unpack/budget"
	"berth/internal/errdefs"
)

// attempt says how a try differs from the first try, which is the zero value.
type attempt struct {
	name     int             // index of the reference to pull, if a short name stands for several
	whole    bool            // no layer is created from an index
	fallback bool            // layers are stored by the other driver
	peers    int             // number of peers that could not send the layer
	registry bool            // peers are not asked
	host     int             // number of the host to ask first; above 0: without kept bytes and parallel parts
	more     budget.Shortage // resources that were too small in an earlier attempt
}

// fault is the kind of error that ended an attempt. Errors have the same kind if the same change
// may help.
type fault int

const (
	final        fault = iota // nothing that an attempt can change
	failedLayer               // an incomplete layer cannot be completed
	badTree                   // the tree of a layer is malformed
	tooLarge                  // the driver cannot store the image
	littleMemory              // berth-unpack needs more memory or a larger window
	largeTree                 // littleMemory; if there is no more memory, tooLarge
	corrupt                   // the content has another digest
	badPeer                   // a peer has sent wrong content, or not all of it
	othersFault               // the shared download of another pull has failed
	allFaults                 // the number of faults
)

// options are the changes that a loop can still make, see the package documentation. The zero value
// allows none.
type options struct {
	names  int             // number of references that a short name stands for
	shared bool            // this pull can start a download of its own
	whole  bool            // layers may have been created from indexes; they can be fetched whole
	tables bool            // some of these indexes are tables of contents, which may be wrong
	driver bool            // another driver can store the image
	peers  bool            // the attempt asked peers; the registry is left, and perhaps another peer
	hosts  int             // transfers of the blob that its registry allows after corrupt content
	more   budget.Shortage // resources of which the layer can get more
}

// next returns the attempt b that follows an attempt a, which ended with the fault why. how
// describes the change for the log. It is empty if none of the options helps; then the loop ends.
func next(a attempt, why fault, left options) (b attempt, how string) {
	b = a
	large := why == tooLarge || why == largeTree
	switch {
	case why == othersFault && left.shared:
		return b, "by this pull"
	case (why == littleMemory || why == largeTree) && left.more != a.more:
		b.more = left.more
		return b, "with more memory"
	case why == badPeer && left.peers && a.peers+1 < maxSources:
		b.peers++
		return b, "from another peer"
	case left.peers: // whatever the fault was
		b.registry, b.more = true, budget.Shortage{}
		return b, "from its registry"
	case why == corrupt && a.host+1 < left.hosts:
		b.host, b.more = a.host+1, budget.Shortage{}
		return b, "from the next host, from its beginning"
	case large && left.driver && !a.fallback:
		b.fallback = true
		return b, "by the other layer driver"
	case left.whole && why == failedLayer, left.whole && left.tables && (why == badTree || large):
		b.whole, b.fallback = true, false
		return b, "whole, because an index was wrong"
	case a.name+1 < left.names:
		return attempt{name: a.name + 1}, "by the next name"
	}
	return a, ""
}

// faultOf returns the fault of an error.
func faultOf(err error) fault {
	var shared *sharedError
	var peer *peerError
	code := unpack.CodeOf(err)
	little := code == unpack.MoreMemory || code == unpack.MoreWindow
	switch {
	case errors.As(err, &shared):
		return othersFault
	case errors.As(err, &peer):
		return badPeer
	case errors.Is(err, lazy.ErrFailed): // whatever its cause, also little memory
		return failedLayer
	case little && errors.Is(err, layer.ErrTooLarge):
		return largeTree
	case little:
		return littleMemory
	case errors.Is(err, layer.ErrTooLarge):
		return tooLarge
	case errors.Is(err, tree.ErrMalformed):
		return badTree
	case errdefs.Code(err) == codes.DataLoss:
		return corrupt
	}
	return final
}

// retry calls do until it succeeds, no other attempt can help (see next), or ctx has ended. It
// returns the last error. do returns the options that are left after its error.
func (p *Puller) retry(ctx context.Context, what string, first attempt, do func(attempt) (options, error)) error {
	for a := first; ; {
		left, err := do(a)
		if err == nil || ctx.Err() != nil {
			return err
		}
		why := faultOf(err)
		b, how := next(a, why, left)
		if how == "" {
			return err
		}
		p.log.Log(ctx, levelOf(why, err), "trying again", "what", what, "how", how, "error", err)
		a = b
	}
}

// levelOf returns the level at which another attempt is logged. An operator should see that a
// registry or an index is wrong. It is usual that no peer has a layer.
func levelOf(why fault, err error) slog.Level {
	switch {
	case errors.Is(err, peers.ErrNone):
		return slog.LevelDebug
	case why == corrupt, why == failedLayer, why == badTree:
		return slog.LevelWarn
	}
	return slog.LevelInfo
}

// sharedError is the error of a download that another pull has started.
type sharedError struct{ err error }

func (e *sharedError) Error() string { return e.err.Error() }
func (e *sharedError) Unwrap() error { return e.err }

// peerError is an error for which a peer is to blame.
type peerError struct{ err error }

func (e *peerError) Error() string { return e.err.Error() }
func (e *peerError) Unwrap() error { return e.err }
