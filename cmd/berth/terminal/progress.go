package terminal

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
		return l.State == stateDone || l.State == statePresent
	})
	return pending[:min(len(pending), b.height-1)]
}

// Done draws the final state. Update is not called with it, because an ended pull has no progress.
func (b *bars) Done(ok bool) {
	if !ok || len(b.last) == 0 {
		return
	}
	b.Update(finished(b.last))
}

// finished returns the layers of a successful pull in their final state.
func finished(layers []client.Layer) []client.Layer {
	out := slices.Clone(layers)
	for i := range out {
		if out[i].State != statePresent {
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
	if room >= narrowest && l.Total > 0 && l.State != statePresent {
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
	case l.State == statePresent || (l.State == stateDone && l.Total > 0):
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

// lines prints a line when a layer's state changes, for logs and pipes.
type lines struct {
	out     io.Writer
	state   map[string]string
	now     func() time.Time
	started time.Time
}

// Update prints changes.
func (p *lines) Update(layers []client.Layer) {
	for _, l := range layers {
		if p.state[l.Digest] == l.State {
			continue
		}
		p.state[l.Digest] = l.State
		line := client.ShortID(l.Digest) + ": " + l.State
		if l.Total > 0 {
			line += " (" + Bytes(uint64(l.Total)) + ")"
		}
		_, _ = fmt.Fprintln(p.out, line) // the command's last output reports a broken pipe
	}
}

// Done prints the duration.
func (p *lines) Done(ok bool) {
	if ok && len(p.state) > 0 {
		_, _ = fmt.Fprintf(p.out, "%d layers in %.1f s\n", len(p.state), p.now().Sub(p.started).Seconds())
	}
}
