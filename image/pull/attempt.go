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

// attempt says how a try differs from the first one, which is the zero value.
type attempt struct {
	name     int             // of the references that a short name may stand for
	whole    bool            // no layer is created from an index
	fallback bool            // layers are stored by the other driver
	peers    int             // peers that could not send the layer
	registry bool            // peers are not asked
	host     int             // first host of the registry; kept bytes and pieces are used with 0 only
	more     budget.Shortage // what an earlier attempt had too little of
}

// fault is the kind of error that ended an attempt, as far as another attempt depends on it.
type fault int

const (
	final        fault = iota // nothing that an attempt can change
	failedLayer               // an incomplete layer cannot be completed
	badTree                   // the tree of a layer is malformed
	tooLarge                  // the driver cannot store the image
	littleMemory              // the process that unpacks needs more memory or a larger window
	largeTree                 // tooLarge, if the process cannot get more memory
	corrupt                   // the content has another digest
	badPeer                   // a peer did not send what it should
	othersFault               // the shared download of another pull has failed
	allFaults                 // their number
)

// options are what the caller of next can still do. The zero value is nothing.
type options struct {
	names  int             // references of a short name
	shared bool            // the work may be done without other pulls
	whole  bool            // layers may have been created from indexes; they can be fetched whole
	tables bool            // some of these indexes are tables of contents, which may be wrong
	driver bool            // another driver can store the image
	peers  bool            // another peer may be asked
	hosts  int             // transfers of the blob that its registry allows after corrupt content
	more   budget.Shortage // the budget can give the layer more
}

// next is the table of all retries of a pull: what follows a fault of an attempt. how says it for
// the log; it is empty if the fault ends the work. A change that is not among the options is left
// to the caller's caller.
//
// Names, drivers and indexes concern the whole image. Peers, hosts and memory concern one layer.
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
	case left.peers:
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

// retry is the loop of all retries. It calls do until it succeeds or next gives up, and returns the
// last error. do returns what is left to do after its error. A canceled pull ends.
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

// levelOf returns the level of the log about another attempt. A registry or an index that is wrong
// is worth a look. That no peer has a layer is usual.
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
