package cli

import (
	"io"
	"os"
	"strings"
	"unicode"
	"unicode/utf8"
)

// Color is an SGR parameter of a terminal's colors.
type Color string

// Colors of states.
const (
	Plain Color = ""
	Green Color = "32"
	Red   Color = "31"
)

// Colored reports whether output to w may have colors: w is a terminal, and the environment
// variable NO_COLOR is empty (no-color.org).
func Colored(w io.Writer) bool {
	_, isTerminal := Size(w)
	return isTerminal && os.Getenv("NO_COLOR") == "" && os.Getenv("TERM") != "dumb"
}

// Cell is one field of a table.
type Cell struct {
	Text  string
	Color Color
}

// Cells are texts without colors.
func Cells(texts ...string) (row []Cell) {
	for _, text := range texts {
		row = append(row, Cell{Text: text})
	}
	return row
}

// gap separates the columns of a table.
const gap = "   "

// Table writes rows as aligned columns, with colors if w may have them. The texts may come from
// images and manifests, so Table removes characters that control a terminal.
func Table(w io.Writer, rows [][]Cell) error {
	var widths []int
	for _, row := range rows {
		for i := range row {
			row[i].Text = Printable(row[i].Text)
			if i == len(widths) {
				widths = append(widths, 0)
			}
			widths[i] = max(widths[i], utf8.RuneCountInString(row[i].Text))
		}
	}
	colored := Colored(w)
	var out strings.Builder
	for _, row := range rows {
		for i, cell := range row {
			text := cell.Text
			if colored && cell.Color != Plain {
				text = "\x1b[" + string(cell.Color) + "m" + text + "\x1b[0m"
			}
			out.WriteString(text)
			if i < len(row)-1 {
				out.WriteString(strings.Repeat(" ", widths[i]-utf8.RuneCountInString(cell.Text)) + gap)
			}
		}
		out.WriteByte('\n')
	}
	_, err := io.WriteString(w, out.String())
	return err
}

// Printable replaces characters that could control a terminal.
func Printable(s string) string {
	return strings.Map(func(r rune) rune {
		if unicode.IsPrint(r) {
			return r
		}
		return unicode.ReplacementChar
	}, s)
}
