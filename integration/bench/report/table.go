package report

import (
	"fmt"
	"io"
	"slices"
	"strings"
)

// Ours is the column with which others are compared.
const Ours = "berth"

// Table writes rows as Markdown: median and 99th percentile, the ratio of each other runtime's
// median to ours, and the slowness of the machine.
func Table(w io.Writer, rows []Row, results *Results, columns []Column) error {
	t := tableWriter{w: w}
	t.line("|", " | goal |")
	for _, c := range columns {
		t.printf(" %s |", c.Name)
	}
	t.printf(" machine |\n|---|---:|%s\n", strings.Repeat("---:|", len(columns)+1))
	for _, row := range rows {
		if row.Optional && !measured(results, row, columns) {
			continue
		}
		t.printf("| %s, %s | %s |", row.Title, row.Unit, row.goal())
		for _, c := range columns {
			t.printf(" %s |", cell(results, row, c.Name))
		}
		t.printf(" %s |\n", results.slowness(row.Key))
	}
	return t.err
}

// measured reports whether a row has a value in any column.
func measured(results *Results, row Row, columns []Column) bool {
	return slices.ContainsFunc(columns, func(c Column) bool { return len(results.Of(row.Key, c.Name).Values) > 0 })
}

// tableWriter remembers the first error.
type tableWriter struct {
	w   io.Writer
	err error
}

func (t *tableWriter) printf(format string, args ...any) {
	if t.err == nil {
		_, t.err = fmt.Fprintf(t.w, format, args...)
	}
}

func (t *tableWriter) line(parts ...string) { t.printf("%s", strings.Join(parts, "")) }

func (r Row) goal() string {
	switch {
	case r.Goal == 0:
		return ""
	case r.Goal99 == 0:
		return number(r.Goal)
	}
	return number(r.Goal) + " / " + number(r.Goal99)
}

// Below fewForTail values the table shows only the median; below fewToTell it shows their number.
const fewForTail, fewToTell = 10, 30

// cell formats the median (in bold if it reaches the goal), the 99th percentile, the ratio to ours,
// and the number of values if they are few.
func cell(results *Results, row Row, column string) string {
	s := results.Of(row.Key, column)
	switch {
	case len(s.Values) == 0 && s.Failed != "":
		return "failed"
	case len(s.Values) == 0:
		return "–"
	}
	text := number(s.Quantile(0.5))
	if column == Ours && row.reached(*s) {
		text = "**" + text + "**"
	}
	if p99 := number(s.Quantile(0.99)); len(s.Values) >= fewForTail && p99 != number(s.Quantile(0.5)) {
		text += " / " + p99
	}
	var notes []string
	if ours := results.Of(row.Key, Ours); column != Ours && len(ours.Values) > 0 && ours.Quantile(0.5) > 0 {
		notes = append(notes, "×"+number(s.Quantile(0.5)/ours.Quantile(0.5)))
	}
	if n := len(s.Values); n < fewToTell {
		notes = append(notes, fmt.Sprintf("n %d", n))
	}
	if len(notes) > 0 {
		text += " (" + strings.Join(notes, ", ") + ")"
	}
	return text
}

// reached reports whether the series reaches the row's goal.
func (r Row) reached(s Series) bool {
	return r.Goal > 0 && len(s.Values) > 0 && s.Quantile(0.5) <= r.Goal && (r.Goal99 == 0 || s.Quantile(0.99) <= r.Goal99)
}

// number prints three digits of a positive value, or all digits before the point if these are more.
func number(v float64) string {
	switch {
	case v >= 99.95:
		return fmt.Sprintf("%.0f", v)
	case v >= 9.995:
		return fmt.Sprintf("%.1f", v)
	}
	return fmt.Sprintf("%.2f", v)
}
