package errdefs

import (
	"strings"
	"unicode"
)

// Clip shortens text of another program for an error, and escapes unprintable characters.
func Clip(s string) string {
	const limit = 200
	s = strings.Map(func(r rune) rune {
		if unicode.IsPrint(r) {
			return r
		}
		return -1
	}, s)
	if len(s) > limit {
		s = strings.ToValidUTF8(s[:limit], "") + "…"
	}
	return s
}
