package operator

import (
	"fmt"
	"io"
	"slices"
	"time"

	"berth/cmd/berth/cli"
	"berth/cmd/berth/client"
)

// States of the layers of a finished pull, as the daemon reports them.
const (
	stateDone    = "done"
	statePresent = "present" // existed before the pull
	stateLazy    = "lazy"    // is fetched after the pull
)

// progress shows the progress of a pull's layers.
type progress interface {
	update(layers []client.Layer)
	done(ok bool) // the pull has ended, and no update follows
}

// isFinal reports whether the state of a layer does not change any more.
func isFinal(state string) bool {
	return state == stateDone || state == statePresent || state == stateLazy
}

// finished returns the layers of a successful pull in their final state.
func finished(layers []client.Layer) []client.Layer {
	out := slices.Clone(layers)
	for i := range out {
		if !isFinal(out[i].State) {
			out[i].State, out[i].Done = stateDone, out[i].Total
		}
	}
	return out
}

// summaryInterval is the time after which lines says how far a long download is.
const summaryInterval = 10 * time.Second

// lines prints a line when a layer's state changes.
type lines struct {
	out     io.Writer
	state   map[string]string
	last    []client.Layer
	now     func() time.Time
	started time.Time
	printed time.Time // when the last line was printed
}

func newLines(out io.Writer, now func() time.Time) *lines {
	return &lines{out: out, state: map[string]string{}, now: now, started: now()}
}

// update prints changes, and a summary if there is none for some time.
func (p *lines) update(layers []client.Layer) {
	p.last = layers
	now := p.now()
	for _, l := range layers {
		if p.state[l.Digest] == l.State {
			continue
		}
		p.state[l.Digest], p.printed = l.State, now
		line := client.ShortID(l.Digest) + ": " + l.State
		switch {
		case l.State != stateDone && l.Kept > 0:
			line += fmt.Sprintf(" (%s, %s of it kept from an earlier pull)", cli.Bytes(uint64(l.Total)), cli.Bytes(uint64(l.Kept)))
		case l.Total > 0:
			line += " (" + cli.Bytes(uint64(l.Total)) + ")"
		}
		_, _ = fmt.Fprintln(p.out, line) // the command's last output reports a broken pipe
	}
	if now.Sub(p.printed) >= summaryInterval {
		p.printed = now
		_, _ = fmt.Fprintln(p.out, summary(layers))
	}
}

// summary returns how much of all layers was downloaded.
func summary(layers []client.Layer) string {
	var done, total uint64
	complete := 0
	for _, l := range layers {
		if isFinal(l.State) {
			complete++
			continue
		}
		done += uint64(max(l.Done, 0))
		total += uint64(max(l.Total, 0))
	}
	return fmt.Sprintf("%d of %d layers complete, %s of %s of the others", complete, len(layers), cli.Bytes(done), cli.Bytes(total))
}

// done prints the last changes and the duration.
func (p *lines) done(ok bool) {
	if ok && len(p.state) > 0 {
		p.update(finished(p.last))
		_, _ = fmt.Fprintf(p.out, "%d layers in %.1f s\n", len(p.state), p.now().Sub(p.started).Seconds())
	}
}
