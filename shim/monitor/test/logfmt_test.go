package test

import (
	"bytes"
	"strings"
	"testing"
	"time"
)

// overhead is RECORD_OVERHEAD of logfmt.h.
const overhead = len("2006-01-02T15:04:05.999999999Z stdout F \n")

// encode encodes bytes in pieces of that length into a buffer of that size.
func encode(t *testing.T, max, piece, room int, data []byte) string {
	t.Helper()
	return string(ask(t, 'l', uint32(max), uint32(piece), uint32(room), data))
}

func TestRecords(t *testing.T) {
	for _, tt := range []struct {
		name       string
		max, piece int
		data       string
		want       string
	}{
		{"nothing", 8, 1, "", ""},
		{"a line", 8, 100, "abc\n", "T stdout F abc\n"},
		{"lines in one piece", 8, 100, "a\n\nb\n", "T stdout F a\nT stdout F \nT stdout F b\n"},
		{"a line in pieces", 8, 1, "abc\n", "T stdout F abc\n"},
		{"no newline at the end", 8, 100, "a\nb", "T stdout F a\nT stdout P b\n"},
		{"exactly the maximum", 4, 100, "abcd\n", "T stdout F abcd\n"},
		{"exactly the maximum, newline later", 4, 4, "abcd\n", "T stdout F abcd\n"},
		{"one more than the maximum", 4, 100, "abcde\n", "T stdout P abcd\nT stdout F e\n"},
		{"twice the maximum", 4, 100, "abcdefgh\n", "T stdout P abcd\nT stdout F efgh\n"},
		{"the maximum is held, then more", 4, 4, "abcde", "T stdout P abcd\nT stdout P e\n"},
		{"carriage returns stay", 8, 100, "a\r\n", "T stdout F a\r\n"},
		{"zero bytes stay", 8, 100, "a\x00b\n", "T stdout F a\x00b\n"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			for _, room := range []int{tt.max + overhead, 1 << 10} {
				if got := encode(t, tt.max, tt.piece, room, []byte(tt.data)); got != tt.want {
					t.Errorf("got  %q\nwant %q", got, tt.want)
				}
			}
		})
	}
}

// A maximum that is not positive means 16 KiB.
func TestRecordsDefaultMaximum(t *testing.T) {
	const most = 16 << 10
	line := strings.Repeat("x", most)
	if got, want := encode(t, 0, most+1, 1<<16, []byte(line+"y\n")), "T stdout P "+line+"\nT stdout F y\n"; got != want {
		t.Errorf("got %.40q… of %d bytes, want %.40q… of %d", got, len(got), want, len(want))
	}
}

func stamp(t *testing.T, at time.Time) string {
	t.Helper()
	return string(ask(t, 't', at.Unix(), uint32(at.Nanosecond())))
}

func TestTime(t *testing.T) {
	for _, at := range []string{
		"1970-01-01T00:00:00Z", "1999-12-31T23:59:59.999999999Z", "2000-02-29T12:00:00.5Z", "2016-10-06T00:17:09.669794202Z",
		"2024-02-29T00:00:00.000000001Z", "2026-03-01T01:02:03.1234Z", "2100-02-28T23:59:59Z", "2100-03-01T00:00:00Z", "9999-12-31T23:59:59.99Z",
	} {
		parsed, err := time.Parse(time.RFC3339Nano, at)
		if err != nil {
			t.Fatal(err)
		}
		if got := stamp(t, parsed); got != at {
			t.Errorf("%s is written %s", at, got)
		}
		if len(at+" stdout F \n") > overhead {
			t.Errorf("%s: a record's overhead is longer than %d", at, overhead)
		}
	}
}

// FuzzTime compares with Go's calendar, up to the year 9999.
func FuzzTime(f *testing.F) {
	f.Add(uint64(1_790_000_000), uint32(120))
	f.Fuzz(func(t *testing.T, seconds uint64, nanoseconds uint32) {
		at := time.Unix(int64(seconds%253_402_300_800), int64(nanoseconds%1_000_000_000)).UTC()
		if got, want := stamp(t, at), at.Format(time.RFC3339Nano); got != want {
			t.Errorf("%d.%09d is written %s, not %s", at.Unix(), at.Nanosecond(), got, want)
		}
	})
}

// FuzzRecords checks that the log holds the stream's content, however the stream was split.
func FuzzRecords(f *testing.F) {
	f.Add([]byte("hello\nworld"), 5, 3)
	f.Add([]byte("\n\n\n"), 1, 1)
	f.Add(bytes.Repeat([]byte("x"), 100), 7, 13)
	f.Add([]byte("a\r\nb\x00c\n"), 2, 100)
	f.Fuzz(func(t *testing.T, data []byte, max, piece int) {
		max, piece = 1+abs(max)%64, 1+abs(piece)%64
		if got := decode(t, encode(t, max, piece, max+overhead, data), max); got != string(data) {
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
