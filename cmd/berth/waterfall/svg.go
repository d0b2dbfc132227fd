package waterfall

import (
	"bufio"
	"encoding/xml"
	"fmt"
	"io"
	"math"
	"slices"
	"strings"
	"time"
	"unicode/utf8"
)

// Lengths in the SVG, in pixels.
const (
	width      = 960
	margin     = 12
	namesWidth = 290
	tookWidth  = 64 // space for the last bar's figure
	barsLeft   = margin + namesWidth
	barsWidth  = width - barsLeft - tookWidth - margin
	headHeight = 58 // title and axis with one row of labels
	rowHeight  = 20
	barHeight  = 12
	indent     = 14
	minBar     = 1.5 // minimum width of a visible bar
	svgTicks   = 10

	labelHeight = 14  // of a further row of labels
	labelSpace  = 8   // between two labels
	letterWidth = 6.3 // of a label, on average
)

// style has colours for light and dark pages; d0 to d3 are the depths.
const style = `
text{font:12px system-ui,sans-serif;fill:#24292f}
.title{font-size:14px;font-weight:600}
.took,.tick{font-size:11px;fill:#57606a}
.page{fill:#fff}
.grid{stroke:#d8dee4}
.fold{stroke:#9a6700;stroke-dasharray:3 3}
.d0{fill:#0969da}.d1{fill:#54aeff}.d2{fill:#8250df}.d3{fill:#c297ff}
.failed{fill:#cf222e}
@media(prefers-color-scheme:dark){
text{fill:#e6edf3}.took,.tick{fill:#9198a1}.page{fill:#0d1117}.grid{stroke:#30363d}
}
`

// SVG draws the chart as an SVG 1.1 document.
func (c Chart) SVG(w io.Writer) error {
	l := c.layout()
	d := svg{Writer: bufio.NewWriter(w), until: max(l.until, time.Microsecond)}
	note := c.note(l)
	labels, rows := d.labels(l)
	head := headHeight + labelHeight*(rows-1)
	height := head + rowHeight*len(l.bars) + margin
	if note != "" {
		height += rowHeight
	}
	d.printf(
		"<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"%d\" height=\"%d\" viewBox=\"0 0 %d %d\" role=\"img\">\n",
		width,
		height,
		width,
		height,
	)
	d.printf("<title>%s</title>\n<style>%s</style>\n", escaped(l.title), style)
	d.printf("<rect class=\"page\" width=\"%d\" height=\"%d\"/>\n", width, height)
	d.text(margin, 22, "title", "start", l.title)
	for _, a := range labels {
		d.line(a.x, head, head+rowHeight*len(l.bars), a.class)
		d.text(a.x, float64(head-10-labelHeight*a.row), "tick", "middle", a.text)
	}
	for i, s := range l.bars {
		d.row(s, head+rowHeight*i)
	}
	if note != "" {
		d.text(margin, float64(height-margin), "took", "start", note)
	}
	d.printf("</svg>\n")
	return d.Flush()
}

// svg writes a document. Flush returns its errors.
type svg struct {
	*bufio.Writer
	until time.Duration
}

func (d svg) printf(format string, args ...any) { fmt.Fprintf(d, format, args...) }

func (d svg) x(at time.Duration) float64 {
	return barsLeft + barsWidth*float64(at)/float64(d.until)
}

func (d svg) text(x, y float64, class, anchor, text string) {
	d.printf("<text x=\"%.1f\" y=\"%.1f\" class=\"%s\" text-anchor=\"%s\">%s</text>\n", x, y, class, anchor, escaped(text))
}

func (d svg) line(x float64, head, bottom int, class string) {
	d.printf("<line x1=\"%.1f\" y1=\"%d\" x2=\"%.1f\" y2=\"%d\" class=\"%s\"/>\n", x, head-4, x, bottom, class)
}

// axisLabel is a tick or a fold of the axis, with its label.
type axisLabel struct {
	x     float64
	text  string
	class string // of the line
	row   int    // 0: just above the bars
}

// overlaps reports whether two labels in one row would overlap.
func (a axisLabel) overlaps(b axisLabel) bool {
	width := letterWidth*float64(utf8.RuneCountInString(a.text)+utf8.RuneCountInString(b.text))/2 + labelSpace
	return a.row == b.row && math.Abs(a.x-b.x) < width
}

// labels returns the labels of the ticks and folds, and the number of rows that they need, at least
// one. A label that would overlap another one moves to a higher row.
func (d svg) labels(l layout) (all []axisLabel, rows int) {
	rows = 1
	add := func(at time.Duration, text, class string) {
		label := axisLabel{x: d.x(at), text: text, class: class}
		for slices.ContainsFunc(all, label.overlaps) {
			label.row++
		}
		all, rows = append(all, label), max(rows, label.row+1)
	}
	for _, m := range l.marks(svgTicks) {
		add(m.at, tick(m.time), "grid")
	}
	for _, f := range l.folds {
		add(f.at, "+"+Took(f.omitted), "fold")
	}
	return all, rows
}

func (d svg) row(s bar, y int) {
	class := fmt.Sprintf("d%d", min(s.Depth, 3))
	if s.Failed {
		class = "failed"
	}
	middle := float64(y) + rowHeight/2
	d.text(margin+float64(s.Depth*indent), middle+4, "name", "start", s.Name)
	from := d.x(s.Start)
	long := max(d.x(s.End)-from, minBar)
	d.printf("<rect x=\"%.1f\" y=\"%.1f\" width=\"%.1f\" height=\"%d\" rx=\"1\" class=\"%s\"/>\n", from,
		middle-barHeight/2, long, barHeight, class)
	d.text(from+long+4, middle+4, "took", "start", Took(s.End-s.Start))
}

// escaped returns text for use between two tags.
func escaped(text string) string {
	var b strings.Builder
	_ = xml.EscapeText(&b, []byte(text)) // a Builder does not fail
	return b.String()
}
