package cli

import (
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"berth/cmd/berth/client"
)

// States of the layers of a finished pull, as the daemon reports them.
const (
	stateDone    = "done"
	statePresent = "present" // existed before the pull
	stateLazy    = "lazy"    // is fetched after the pull
)

// Progress shows the progress of a pull's layers.
type Progress interface {
	Update(layers []client.Layer)
	Done(ok bool) // the pull has ended, and no update follows
}

// NewProgress shows bars if w is a terminal, else plain lines.
func NewProgress(w io.Writer, now func() time.Time) Progress {
	if size, ok := Size(w); ok {
		return &bars{out: w, width: int(size.Width), height: int(size.Height)}
	}
	return &lines{out: w, state: map[string]string{}, now: now, started: now()}
}

// bars redraws one line per layer in place.
type bars struct {
	out           io.Writer
	width, height int // of the terminal
	drawn         int // lines drawn so far
	last          []client.Layer
}

// Update draws the bars.
func (b *bars) Update(layers []client.Layer) {
	b.last = layers
	layers = b.fitting(layers)
	var frame strings.Builder
	if b.drawn > 0 {
		fmt.Fprintf(&frame, "\x1b[%dA", b.drawn) // to the first line
	}
	for _, l := range layers {
		frame.WriteString("\r" + barLine(l, b.width) + "\x1b[K\n") // erase the rest of a longer line
	}
	for range b.drawn - len(layers) {
		frame.WriteString("\r\x1b[K\n")
	}
	b.drawn = max(b.drawn, len(layers))
	_, _ = io.WriteString(b.out, frame.String()) // a terminal that goes away ends the command by SIGHUP
}

// fitting drops finished layers, and then the last ones, if there are more than the terminal's
// lines, because lines that scrolled away cannot be redrawn.
func (b *bars) fitting(layers []client.Layer) []client.Layer {
	if len(layers) < b.height {
		return layers
	}
	pending := slices.DeleteFunc(slices.Clone(layers), func(l client.Layer) bool {
		return isFinal(l.State)
	})
	return pending[:min(len(pending), b.height-1)]
}

// Done draws the final state. Update is not called with it, because an ended pull has no progress.
func (b *bars) Done(ok bool) {
	if !ok || len(b.last) == 0 {
		return
	}
	b.Update(Finished(b.last))
}

// isFinal reports whether the state of a layer does not change any more.
func isFinal(state string) bool {
	return state == stateDone || state == statePresent || state == stateLazy
}

// Finished returns the layers of a successful pull in their final state.
func Finished(layers []client.Layer) []client.Layer {
	out := slices.Clone(layers)
	for i := range out {
		if !isFinal(out[i].State) {
			out[i].State, out[i].Done = stateDone, out[i].Total
		}
	}
	return out
}

// barLine returns one layer's line: "4f4fb700ef54a downloading [=====>    ] 12.0 MB / 30.1 MB".
func barLine(l client.Layer, width int) string {
	head := fmt.Sprintf("%s %-11s", client.ShortID(l.Digest), l.State)
	if l.Total > 0 {
		l.Done = min(max(l.Done, 0), l.Total)
	}
	tail := progressWords(l)
	const widest, narrowest, frame = 40, 10, 5 // frame: the blanks, the brackets and a free column
	room := min(width-len(head)-len(tail)-frame, widest)
	line := strings.TrimRight(head+" "+tail, " ")
	if room >= narrowest && l.Total > 0 && l.State != statePresent && l.State != stateLazy {
		line = head + " [" + bar(l, room) + "] " + tail
	}
	if len(line) >= width {
		line = line[:max(width-1, 0)] // a wrapped line would break the line count
	}
	return line
}

// progressWords returns how much of a layer was downloaded.
func progressWords(l client.Layer) string {
	switch {
	case l.State == statePresent || l.State == stateLazy || (l.State == stateDone && l.Total > 0):
		return Bytes(uint64(l.Total))
	case l.Total > 0:
		return Bytes(uint64(l.Done)) + " / " + Bytes(uint64(l.Total))
	case l.Done > 0:
		return Bytes(uint64(l.Done))
	}
	return ""
}

// bar draws 0 <= Done <= Total, Total > 0, in room columns.
func bar(l client.Layer, room int) string {
	full := int(int64(room) * l.Done / l.Total)
	if full == room {
		return strings.Repeat("=", room)
	}
	return strings.Repeat("=", full) + ">" + strings.Repeat(" ", room-full-1)
}

// summaryInterval is the time after which lines says how far a long download is.
const summaryInterval = 10 * time.Second

// lines prints a line when a layer's state changes, for logs and pipes.
type lines struct {
	out     io.Writer
	state   map[string]string
	last    []client.Layer
	now     func() time.Time
	started time.Time
	printed time.Time // when the last line was printed
}

// Update prints changes, and a summary if there is none for some time.
func (p *lines) Update(layers []client.Layer) {
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
			line += fmt.Sprintf(" (%s, %s of it kept from an earlier pull)", Bytes(uint64(l.Total)), Bytes(uint64(l.Kept)))
		case l.Total > 0:
			line += " (" + Bytes(uint64(l.Total)) + ")"
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
	return fmt.Sprintf("%d of %d layers complete, %s of %s of the others", complete, len(layers), Bytes(done), Bytes(total))
}

// Done prints the last changes and the duration.
func (p *lines) Done(ok bool) {
	if ok && len(p.state) > 0 {
		p.Update(Finished(p.last))
		_, _ = fmt.Fprintf(p.out, "%d layers in %.1f s\n", len(p.state), p.now().Sub(p.started).Seconds())
	}
}
