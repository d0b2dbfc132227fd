// Package waterfall draws time spans as text: bars below one another.
//
// # Contract
//
// The package is pure: a chart depends only on its fields. Names may come from anywhere. It
// replaces unprintable characters and truncates long names, so that a terminal does not interpret
// them.
package waterfall

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"
	"unicode"
)

// Span is one bar.
type Span struct {
	Name   string
	Start  time.Duration // from a zero that all spans of a chart share
	End    time.Duration
	Depth  int  // indentation of the name: 0 for a span without a parent
	Failed bool // the operation failed
}

// Chart is a drawing of spans, one below the other in the given order.
type Chart struct {
	Title string
	Spans []Span

	// Fold is the maximum length of a time without any span. A longer time is folded into a mark. 0
	// means no limit.
	Fold time.Duration
	// Hide is the minimum length of a drawn span. Spans without a parent are always drawn.
	Hide time.Duration
	// Lost is the number of spans that were not recorded. The drawing shows this number.
	Lost int
}

// fold is a time without spans that the drawing omits.
type fold struct {
	at      time.Duration // on the axis
	omitted time.Duration
}

// bar is a drawn span with its place on the axis, which begins at 0.
type bar struct {
	Span
	from time.Duration // beginning of the span, including folded time
}

// layout is the computed form of a chart.
type layout struct {
	title string
	bars  []bar // in the order of the chart's spans
	folds []fold
	until time.Duration
	short int // number of spans that are not drawn because they are short
}

// visible returns the spans that are drawn. The parts of a hidden span are shorter than it.
func (c Chart) visible() []Span {
	return slices.DeleteFunc(slices.Clone(c.Spans), func(s Span) bool {
		return s.Depth > 0 && s.End-s.Start < c.Hide
	})
}

func (c Chart) layout() layout {
	spans := c.visible()
	l := layout{title: clean(c.Title), bars: make([]bar, len(spans)),
		short: len(c.Spans) - len(spans)}
	inTime := make([]*bar, len(spans))
	for i, s := range spans {
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
	left, covered := first, first // time folded so far, and the end of the spans so far
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

// clean returns a name of any origin as text on one line.
func clean(name string) string {
	var b strings.Builder
	n := 0
	for _, r := range name {
		if n == maxName {
			b.WriteRune('…')
			break
		}
		if !unicode.IsPrint(r) { // control characters, and marks that change the direction of text
			r = unicode.ReplacementChar
		}
		b.WriteRune(r)
		n++
	}
	return b.String()
}

// note returns a line about the spans that are not drawn, or "".
func (c Chart) note(l layout) string {
	var parts []string
	add := func(n int, why string) {
		switch n {
		case 0:
		case 1:
			parts = append(parts, "1 step "+why+" is not shown")
		default:
			parts = append(parts, fmt.Sprintf("%d steps %s are not shown", n, why))
		}
	}
	add(l.short, "under "+Took(c.Hide))
	add(c.Lost, "beyond the limit")
	return strings.Join(parts, "; ")
}

// Took formats a duration with its significant digits.
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
