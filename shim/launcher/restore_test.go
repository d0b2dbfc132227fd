package launcher

import (
	"strings"
	"testing"
	"unicode"
)

// An error of CRIU becomes part of a status that clients store and show on terminals.
func TestFirstError(t *testing.T) {
	const real = "(00.010207) Error (criu/files-reg.c:2143): File f has bad size 1 (expect 2)"
	for log, want := range map[string]string{
		"":                                "",
		"(00.01) Warn (x): y\n":           "",
		real:                              ": (criu/files-reg.c:2143): File f has bad size 1 (expect 2)",
		"a\n" + real + "\nError (b): c\n": ": (criu/files-reg.c:2143): File f has bad size 1 (expect 2)",
		"Error (x): can't set RLIMIT_NOFILE\nError (y): z\n": ": (y): z",
		"Error (x): \x1b[2J\x00\xff\u202e\n":                 ": (x): [2J?",
	} {
		if got := firstError(strings.NewReader(log)); got != want {
			t.Errorf("%q: %q, want %q", log, got, want)
		}
	}
	for _, text := range []string{"x", "ä", "\x1b"} {
		got := firstError(strings.NewReader("Error (" + strings.Repeat(text, maxCRIULog)))
		if len(got) > maxCause+16 || strings.ContainsFunc(got, func(r rune) bool { return !unicode.IsPrint(r) }) {
			t.Errorf("%q: an error of %d bytes: %.40q", text, len(got), got)
		}
	}
}
