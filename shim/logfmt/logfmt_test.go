package logfmt

import (
	"bytes"
	"strings"
	"testing"
	"time"
)

// encode feeds pieces one after another through a buffer of the given capacity.
func encode(e *Encoder, capacity int, pieces ...string) string {
	var log []byte
	for _, piece := range pieces {
		rest := []byte(piece)
		for len(rest) > 0 {
			var out []byte
			out, rest = e.Append(make([]byte, 0, capacity), []byte("T"), rest)
			log = append(log, out...)
		}
	}
	return string(e.Flush(log, []byte("T")))
}

func TestAppend(t *testing.T) {
	for _, tt := range []struct {
		name   string
		max    int
		pieces []string
		want   string
	}{
		{"nothing", 8, nil, ""},
		{"a line", 8, []string{"abc\n"}, "T stdout F abc\n"},
		{"lines in one piece", 8, []string{"a\n\nb\n"}, "T stdout F a\nT stdout F \nT stdout F b\n"},
		{"a line in pieces", 8, []string{"a", "b", "c\n"}, "T stdout F abc\n"},
		{"no newline at the end", 8, []string{"a\nb"}, "T stdout F a\nT stdout P b\n"},
		{"exactly the maximum", 4, []string{"abcd\n"}, "T stdout F abcd\n"},
		{"exactly the maximum, newline later", 4, []string{"abcd", "\n"}, "T stdout F abcd\n"},
		{"one more than the maximum", 4, []string{"abcde\n"}, "T stdout P abcd\nT stdout F e\n"},
		{"twice the maximum", 4, []string{"abcdefgh\n"}, "T stdout P abcd\nT stdout F efgh\n"},
		{"the maximum is held, then more", 4, []string{"abcd", "e"}, "T stdout P abcd\nT stdout P e\n"},
		{"carriage returns stay", 8, []string{"a\r\n"}, "T stdout F a\r\n"},
		{"zero bytes stay", 8, []string{"a\x00b\n"}, "T stdout F a\x00b\n"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if got := encode(NewEncoder("stdout", tt.max), 1<<10, tt.pieces...); got != tt.want {
				t.Errorf("got  %q\nwant %q", got, tt.want)
			}
		})
	}
}

func TestAppendStopsAtCapacity(t *testing.T) {
	e := NewEncoder("stderr", 4)
	dst := make([]byte, 0, Overhead+4)
	out, rest := e.Append(dst, []byte("T"), []byte("abcd\nefgh\n"))
	if string(out) != "T stderr F abcd\n" || string(rest) != "efgh\n" {
		t.Errorf("Append = %q, rest %q", out, rest)
	}
	if cap(out) != cap(dst) {
		t.Errorf("the buffer grew from %d to %d bytes", cap(dst), cap(out))
	}
}

func TestAppendTime(t *testing.T) {
	at := time.Date(2016, 10, 6, 2, 17, 9, 669794202, time.FixedZone("", 2*60*60))
	if got, want := string(AppendTime(nil, at)), "2016-10-06T00:17:09.669794202Z"; got != want {
		t.Errorf("AppendTime = %q, want %q", got, want)
	}
	if longest := len(AppendTime(nil, at)) + len(" stdout F \n"); longest > Overhead {
		t.Errorf("a record's overhead is %d bytes, more than Overhead, %d", longest, Overhead)
	}
}

// FuzzAppend checks that the log says what the stream said, however it was cut.
func FuzzAppend(f *testing.F) {
	f.Add([]byte("hello\nworld"), 5, 3)
	f.Add([]byte("\n\n\n"), 1, 1)
	f.Add(bytes.Repeat([]byte("x"), 100), 7, 13)
	f.Add([]byte("a\r\nb\x00c\n"), 2, 100)
	f.Fuzz(func(t *testing.T, data []byte, max, piece int) {
		max, piece = 1+abs(max)%64, 1+abs(piece)%64
		var pieces []string
		for rest := data; len(rest) > 0; {
			n := min(piece, len(rest))
			pieces, rest = append(pieces, string(rest[:n])), rest[n:]
		}
		if got := decode(t, encode(NewEncoder("stdout", max), max+Overhead, pieces...), max); got != string(data) {
			t.Errorf("the log says %q, the stream said %q", got, data)
		}
	})
}

func decode(t *testing.T, log string, max int) string {
	t.Helper()
	var said strings.Builder
	for record := range strings.Lines(log) {
		content, ok := strings.CutPrefix(strings.TrimSuffix(record, "\n"), "T stdout ")
		if !ok || len(content) < 2 || len(content)-2 > max {
			t.Fatalf("bad record %q", record)
		}
		said.WriteString(content[2:])
		if content[0] == 'F' {
			said.WriteByte('\n')
		}
	}
	return said.String()
}

func abs(n int) int {
	if n < 0 {
		return -(n + 1)
	}
	return n
}
