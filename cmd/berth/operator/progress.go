package operator

import (
	"fmt"
	"io"
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

// isFinal reports whether the state of a layer does not change any more.
func isFinal(state string) bool {
	return state == stateDone || state == statePresent || state == stateLazy
}

// summaryInterval is the time after which progress says how far a long download is.
const summaryInterval = 10 * time.Second

// progress prints a line when the state of a pull's layer changes.
type progress struct {
	out     io.Writer
	state   map[string]string
	last    []client.Layer
	now     func() time.Time
	started time.Time
	printed time.Time // when the last line was printed
}

func newProgress(out io.Writer, now func() time.Time) *progress {
	return &progress{out: out, state: map[string]string{}, now: now, started: now()}
}

// update prints changes, and a summary if there is none for some time.
func (p *progress) update(layers []client.Layer) {
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

// done prints the last changes and the duration of a pull that succeeded.
func (p *progress) done() {
	for i := range p.last {
		if l := &p.last[i]; !isFinal(l.State) {
			l.State, l.Done = stateDone, l.Total
		}
	}
	if len(p.last) > 0 {
		p.update(p.last)
		_, _ = fmt.Fprintf(p.out, "%d layers in %.1f s\n", len(p.state), p.now().Sub(p.started).Seconds())
	}
}
