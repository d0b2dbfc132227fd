package crilog

import (
	"bytes"
	"strings"
	"testing"
	"time"
)

func TestParseRecord(t *testing.T) {
	t.Parallel()
	at := time.Date(2026, 1, 2, 15, 4, 5, 678, time.UTC)
	const stamp = "2026-01-02T15:04:05.000000678Z"
	tests := []struct {
		line string
		want Record
		err  string
	}{
		{stamp + " stdout F hello world\n", Record{at, Stdout, false, []byte("hello world")}, ""},
		{stamp + " stderr P part\n", Record{at, Stderr, true, []byte("part")}, ""},
		{stamp + " stdout F \n", Record{at, Stdout, false, nil}, ""},
		{stamp + " stdout F:extra:P tags\n", Record{at, Stdout, false, []byte("tags")}, ""},
		{stamp + " stdout F no newline", Record{at, Stdout, false, []byte("no newline")}, ""},
		{stamp + " stdout F  two  blanks \n", Record{at, Stdout, false, []byte(" two  blanks ")}, ""},
		{"2026-01-02T16:04:05.000000678+01:00 stdout F zone\n", Record{at, Stdout, false, []byte("zone")}, ""},
		{"", Record{}, "no space after the time"},
		{"yesterday stdout F x\n", Record{}, "time"},
		{stamp + " stdlog F x\n", Record{}, "neither stdout nor stderr"},
		{stamp + " stdout\n", Record{}, "neither stdout nor stderr"},
		{stamp + " stdout F\n", Record{}, "no tag"},
		{stamp + " stdout X x\n", Record{}, "neither P nor F"},
	}
	for _, test := range tests {
		got, err := Parse([]byte(test.line))
		switch {
		case test.err == "" && err != nil:
			t.Errorf("%q: %v", test.line, err)
		case test.err != "" && (err == nil || !strings.Contains(err.Error(), test.err)):
			t.Errorf("%q: error %v, want %q", test.line, err, test.err)
		case !sameRecord(got, test.want):
			t.Errorf("%q: %+v, want %+v", test.line, got, test.want)
		}
	}
}

func sameRecord(a, b Record) bool {
	return a.Time.Equal(b.Time) && a.Stream == b.Stream && a.Partial == b.Partial && bytes.Equal(a.Content, b.Content)
}

func TestJoinerJoinsPartialRecords(t *testing.T) {
	t.Parallel()
	var j joiner
	var lines []string
	for _, r := range []Record{
		{Stream: Stdout, Partial: true, Content: []byte("a")},
		{Stream: Stderr, Partial: true, Content: []byte("x")},
		{Stream: Stdout, Partial: true, Content: []byte("b")},
		{Stream: Stdout, Content: []byte("c")},
		{Stream: Stdout, Content: []byte("d")},
	} {
		if line, ok := j.add(r); ok {
			lines = append(lines, string(line.Content))
		}
	}
	if got := strings.Join(lines, " "); got != "abc d" {
		t.Errorf("lines %q", got)
	}
	rest := j.flush()
	if len(rest) != 1 || rest[0].Stream != Stderr || string(rest[0].Content) != "x" || !rest[0].Partial {
		t.Errorf("rest %+v", rest)
	}
	if more := j.flush(); more != nil {
		t.Errorf("flushed twice: %+v", more)
	}
}

func TestJoinerBoundsMemory(t *testing.T) {
	t.Parallel()
	var j joiner
	part := bytes.Repeat([]byte("x"), 64<<10)
	total, pieces := 0, 0
	for range 100 {
		if line, ok := j.add(Record{Stream: Stdout, Partial: true, Content: part}); ok {
			pieces++
			total += len(line.Content)
			if !line.Partial || len(line.Content) > maxLine+len(part) {
				t.Fatalf("piece of %d bytes, partial %t", len(line.Content), line.Partial)
			}
		}
	}
	for _, rest := range j.flush() {
		total += len(rest.Content)
	}
	if pieces != 6 || total != 100*len(part) {
		t.Errorf("%d pieces, %d bytes", pieces, total)
	}
}

func FuzzParse(f *testing.F) {
	for _, seed := range []string{
		"2026-01-02T15:04:05.000000678Z stdout F hello\n", "2026-01-02T15:04:05Z stderr P:x \n",
		"", " ", "\n", "2026-01-02T15:04:05Z stdout F", "2026-01-02T15:04:05Z stdout  x", "x stdout F y",
	} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, line []byte) {
		r, err := Parse(line)
		if err != nil {
			return
		}
		if r.Stream != Stdout && r.Stream != Stderr {
			t.Fatalf("stream %q", r.Stream)
		}
		if !bytes.HasSuffix(bytes.TrimSuffix(line, []byte{'\n'}), r.Content) {
			t.Fatalf("content %q is not the end of %q", r.Content, line)
		}
		var j joiner
		if got, ok := j.add(r); ok == r.Partial || ok && !bytes.Equal(got.Content, r.Content) {
			t.Fatalf("joined %+v, %t", got, ok)
		}
	})
}
