// Package waterfall draws spans of time as bars below one another: in SVG for a page, in text for a terminal.
//
// # Contract
//
// Pure: a chart is made of its fields and of nothing else. Names may come from anywhere: what can't be printed is replaced and what is long
// is cut off, so that neither a terminal nor an XML parser takes a name for anything but text. The SVG needs no font, script or
// style from elsewhere, and is legible on light and dark pages.
package waterfall

import (
	"cmp"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"
	"unicode"
)

// Span is one bar.
type Span struct {
	Name   string
	Start  time.Duration // from any zero that all spans of a chart share
	End    time.Duration
	Depth  int  // how far its name is indented: 0 for what is part of nothing else
	Failed bool // it came to no good end
}

// Chart is a drawing of spans, which come one below the other in the order given.
type Chart struct {
	Title string
	Spans []Span

	// Until is how long the axis is at least: charts with the same can be compared by eye.
	Until time.Duration
	// Fold is how long a time without any span may be before it is folded into a mark; 0: as long as it likes.
	Fold time.Duration
}

// SVG draws spans as a document of SVG 1.1, with the time from the first's start on the axis.
func SVG(w io.Writer, title string, spans []Span) error {
	return Chart{Title: title, Spans: spans}.SVG(w)
}

// fold is a time without spans that the drawing leaves out.
type fold struct {
	at      time.Duration // on the axis
	omitted time.Duration
}

// bar is a span as it is drawn, with its place on the axis, which begins at 0.
type bar struct {
	Span
	from time.Duration // when it began, what is left out included
}

// layout is a chart as it is drawn.
type layout struct {
	title string
	bars  []bar // in the order of the chart's spans
	folds []fold
	until time.Duration
}

func (c Chart) layout() layout {
	l := layout{title: clean(c.Title), until: min(c.Until, mostTime), bars: make([]bar, len(c.Spans))}
	inTime := make([]*bar, len(c.Spans))
	for i, s := range c.Spans {
		s.Start = min(max(s.Start, -mostTime), mostTime)
		s.Name, s.End, s.Depth = clean(s.Name), min(max(s.Start, s.End), mostTime), min(max(s.Depth, 0), maxDepth)
		l.bars[i] = bar{Span: s}
		inTime[i] = &l.bars[i]
	}
	slices.SortStableFunc(inTime, func(a, b *bar) int { return cmp.Compare(a.Start, b.Start) })
	if len(inTime) == 0 {
		return l
	}
	first := inTime[0].Start
	left, covered := first, first // what is taken off each time, and until when there are spans
	for _, b := range inTime {
		if gap := b.Start - covered; c.Fold > 0 && gap > c.Fold {
			l.folds = append(l.folds, fold{at: covered - left + c.Fold/2, omitted: gap - c.Fold})
			left += gap - c.Fold
		}
		covered = max(covered, b.End)
		b.from = b.Start - first
		b.Start, b.End = b.Start-left, b.End-left
		l.until = max(l.until, b.End)
	}
	return l
}

const (
	maxDepth = 12
	maxName  = 48                    // runes
	mostTime = 1000 * time.Hour * 24 // before and after zero
)

// clean is a name of any origin as text of one line.
func clean(name string) string {
	var b strings.Builder
	n := 0
	for _, r := range name {
		if n == maxName {
			b.WriteRune('…')
			break
		}
		if !unicode.IsPrint(r) { // controls, and marks that turn the direction of text
			r = unicode.ReplacementChar
		}
		b.WriteRune(r)
		n++
	}
	return b.String()
}

// ticks are the places of marks on an axis of that length, at most most of them: round numbers.
func ticks(until time.Duration, most int) []time.Duration {
	step := time.Microsecond
	for i := 0; until/step > time.Duration(most); i++ { // 1, 2, 5, 10 …
		if i%3 == 1 {
			step = step / 2 * 5
		} else {
			step *= 2
		}
	}
	var all []time.Duration
	for n := range until/step + 1 {
		all = append(all, n*step)
	}
	return all
}

// tick is the label of a mark, short.
func tick(d time.Duration) string {
	switch {
	case d == 0:
		return "0"
	case d%time.Second == 0 || d >= 10*time.Second:
		return fmt.Sprintf("%g s", d.Seconds())
	case d%time.Millisecond == 0:
		return fmt.Sprintf("%d ms", d/time.Millisecond)
	}
	return fmt.Sprintf("%g ms", float64(d)/float64(time.Millisecond))
}

// Took is a length of time with the digits that matter.
func Took(d time.Duration) string {
	switch {
	case d >= 10*time.Second:
		return fmt.Sprintf("%.1f s", d.Seconds())
	case d >= time.Second:
		return fmt.Sprintf("%.2f s", d.Seconds())
	case d >= 100*time.Millisecond:
		return fmt.Sprintf("%d ms", d.Round(time.Millisecond)/time.Millisecond)
	case d >= 10*time.Millisecond:
		return fmt.Sprintf("%.1f ms", float64(d)/float64(time.Millisecond))
	}
	return fmt.Sprintf("%.2f ms", float64(d)/float64(time.Millisecond))
}
