package pull

import (
	"time"

	"berth/image/lazy"
)

// Observer receives measurements of pulls, for example to export them as metrics. Its methods must
// not block. registry is the registry host of the image reference, empty for an invalid reference.
// Anyone who can create pods chooses it, so an observer bounds the number of values it keeps.
type Observer interface {
	lazy.Observer
	// Slowed reports how long a pull waited for the limit of all pulls.
	Slowed(waited time.Duration)
	// Pulled reports a finished pull.
	Pulled(registry string, result Result)
}

// Result describes a finished pull.
type Result struct {
	Took       time.Duration
	Unchanged  bool // the registry confirmed the present image
	Present    int  // layers that were present before
	Lazy       int  // layers that are fetched after the pull
	Downloaded int  // layers that were downloaded, by this pull or by a concurrent one
	Err        error
}

// noObserver ignores all measurements.
type noObserver struct{}

func (noObserver) Received(string, int)     {}
func (noObserver) Slowed(time.Duration)     {}
func (noObserver) ReadWaited(time.Duration) {}
func (noObserver) Pulled(string, Result)    {}

// result returns the measurements of a finished pull.
func (t *pullTrack) result(err error) Result {
	r := Result{Took: time.Since(t.started), Err: err}
	layers := t.layers.Load()
	r.Unchanged = layers == nil && err == nil
	if layers == nil {
		return r
	}
	for _, l := range *layers {
		switch *l.state.Load() {
		case LayerPresent:
			r.Present++
		case LayerLazy:
			r.Lazy++
		case LayerDone:
			r.Downloaded++
		}
	}
	return r
}
