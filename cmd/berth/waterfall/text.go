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
	leastBars = 16              // minimum number of columns for bars
	figures   = "   %9s  %9s  " // a span's beginning and its duration
	mostName  = 40              // maximum number of columns for indented names
)

// Text draws the chart with the given number of columns, which must leave room for bars beside
// names and figures.
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
	if note := c.note(l); note != "" {
		fmt.Fprintln(d, note)
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

// text writes a drawing. Flush returns its errors.
type text struct {
	*bufio.Writer
	names, bars int // in columns
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

// cell returns a place on the axis in eighths of a column.
func (d text) cell(at time.Duration) int {
	return int(float64(8*d.bars) * float64(at) / float64(d.until))
}

// bar draws a span. The end of a bar is exact to an eighth of a column, and its start to a column.
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
