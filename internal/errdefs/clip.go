package errdefs

import (
	"strings"
	"unicode"
)

// Clip shortens foreign text for an error and escapes what is not printable.
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
