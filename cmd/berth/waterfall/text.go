package waterfall

import (
	"bufio"
	"fmt"
	"io"
	"strings"
	"time"
	"unicode/utf8"
)

const (
	leastBars = 16              // columns that bars have however narrow the terminal
	figures   = "   %9s  %9s  " // where a span begins, and how long it takes
	mostName  = 40              // columns for names with their indents
)

// Text draws the chart in lines that are so many columns wide, where names and figures leave room for bars.
func (c Chart) Text(w io.Writer, columns int) error {
	l := c.layout()
	names := utf8.RuneCountInString("span")
	for _, s := range l.bars {
		names = min(max(names, utf8.RuneCountInString(label(s))), mostName)
	}
	d := text{Writer: bufio.NewWriter(w), names: names, until: max(l.until, time.Microsecond)}
	d.bars = max(columns-names-len(fmt.Sprintf(figures, "", "")), leastBars)
	if l.title != "" {
		fmt.Fprintln(d, l.title)
	}
	d.line("span", "from", "took", "")
	folds := l.folds
	for _, s := range l.bars {
		for len(folds) > 0 && s.Start >= folds[0].at {
			d.line("", "", "", strings.Repeat(" ", d.cell(folds[0].at)/8)+"⋮ "+Took(folds[0].omitted)+" left out")
			folds = folds[1:]
		}
		d.line(label(s), Took(s.from), Took(s.End-s.Start), d.bar(s))
	}
	return d.Flush()
}

func label(s bar) string {
	name := strings.Repeat("  ", s.Depth) + s.Name
	if s.Failed {
		name += " ✗"
	}
	return name
}

// text is a drawing that is being written. Errors come from Flush.
type text struct {
	*bufio.Writer
	names, bars int // columns
	until       time.Duration
}

func (d text) line(name, from, took, bar string) {
	if n := utf8.RuneCountInString(name); n > d.names {
		name = string([]rune(name)[:d.names-1]) + "…"
	} else {
		name += strings.Repeat(" ", d.names-n)
	}
	fmt.Fprintln(d, strings.TrimRight(name+fmt.Sprintf(figures, from, took)+bar, " "))
}

// cell is a place on the axis in eighths of a column.
func (d text) cell(at time.Duration) int {
	return int(float64(8*d.bars) * float64(at) / float64(d.until))
}

// bar draws a span to an eighth of a column at its end; its start is a column's.
func (d text) bar(s bar) string {
	from, to := d.cell(s.Start), d.cell(s.End)
	column := min(from/8, d.bars-1)
	eighths := max(to-8*column, 1)
	line := strings.Repeat(" ", column) + strings.Repeat("█", eighths/8)
	if rest := eighths % 8; rest > 0 {
		line += string([]rune(" ▏▎▍▌▋▊▉")[rest])
	}
	return line
}
