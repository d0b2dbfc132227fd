package cli

import (
	"fmt"
	"os"
	"time"

	"github.com/moby/term"
)

// Bytes formats a number of bytes for people.
func Bytes(bytes uint64) string {
	const step = 1000
	if bytes < step {
		return fmt.Sprintf("%d B", bytes)
	}
	value, units := float64(bytes), "kMGTPE"
	unit := -1
	for value >= step-0.05 && unit < len(units)-1 {
		value /= step
		unit++
	}
	return fmt.Sprintf("%.1f %cB", value, units[unit])
}

// Age formats roughly how long ago something was.
func Age(now, then time.Time) string {
	d := now.Sub(then)
	switch {
	case d < time.Minute:
		return fmt.Sprintf("%ds", max(d, 0)/time.Second)
	case d < time.Hour:
		return fmt.Sprintf("%dm", d/time.Minute)
	case d < 48*time.Hour:
		return fmt.Sprintf("%dh", d/time.Hour)
	}
	return fmt.Sprintf("%dd", d/(24*time.Hour))
}

// Size returns the size of the terminal w, or false if w is not a terminal.
func Size(w any) (term.Winsize, bool) {
	f, ok := w.(*os.File)
	if !ok || !term.IsTerminal(f.Fd()) {
		return term.Winsize{}, false
	}
	if size, err := term.GetWinsize(f.Fd()); err == nil && size.Width > 0 && size.Height > 0 {
		return *size, true
	}
	return term.Winsize{Width: 80, Height: 24}, true // a terminal without a known size, for example a serial line
}
