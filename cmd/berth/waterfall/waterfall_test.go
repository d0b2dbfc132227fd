package waterfall

import (
	"bytes"
	"errors"
	"flag"
	"os"
	"strings"
	"testing"
	"time"
	"unicode"
	"unicode/utf8"

	"berth/internal/testutil"
)

var update = flag.Bool("update", false, "write the golden files")

const ms = time.Millisecond

// sample is a pod's start: a network beside a pause, and seconds later a container that fails.
var sample = Chart{Title: "default/web", Fold: 5 * ms, Spans: []Span{
	{Name: "RunPodSandbox", Start: 100 * ms, End: 124 * ms},
	{Name: "record", Start: 100*ms + 200*time.Microsecond, End: 101 * ms, Depth: 1},
	{Name: "network", Start: 101 * ms, End: 123 * ms, Depth: 1},
	{Name: "bridge", Start: 102 * ms, End: 118 * ms, Depth: 2},
	{Name: "launch", Start: 101 * ms, End: 108 * ms, Depth: 1},
	{Name: "StartContainer web", Start: 2124 * ms, End: 2136 * ms, Failed: true},
}}

func golden(t *testing.T, name, got string) {
	t.Helper()
	path := "testdata/" + name
	if *update {
		if err := os.WriteFile(path, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if got != string(want) {
		t.Errorf("%s differs (-update writes it):\n%s", path, got)
	}
}

func textOf(t testing.TB, c Chart, columns int) string {
	t.Helper()
	var out bytes.Buffer
	if err := c.Text(&out, columns); err != nil {
		t.Fatal(err)
	}
	return out.String()
}

func TestChartMatchesGoldenFile(t *testing.T) {
	t.Parallel()
	golden(t, "sample.txt", textOf(t, sample, 80))
}

func TestLongGapsAreFolded(t *testing.T) {
	t.Parallel()
	l := sample.layout()
	if len(l.folds) != 1 || l.folds[0].omitted != 1995*ms || l.until != 41*ms {
		t.Errorf("%+v", l)
	}
	if last := l.bars[5]; last.Start != 29*ms || last.from != 2024*ms {
		t.Errorf("%+v", last)
	}
	unfolded := sample
	unfolded.Fold = 0
	if l := unfolded.layout(); len(l.folds) != 0 || l.until != 2036*ms {
		t.Errorf("%+v", l)
	}
}

func TestTookKeepsSignificantDigits(t *testing.T) {
	t.Parallel()
	for d, want := range map[time.Duration]string{0: "0.00 ms", 1234 * time.Microsecond: "1.23 ms", 12345 * time.Microsecond: "12.3 ms",
		123 * ms: "123 ms", 1230 * ms: "1.23 s", 72 * time.Second: "72.0 s"} {
		if got := Took(d); got != want {
			t.Errorf("%v: %s, want %s", d, got, want)
		}
	}
}

func TestWriteErrors(t *testing.T) {
	t.Parallel()
	full := errors.New("full")
	if err := sample.Text(failing{full}, 80); !errors.Is(err, full) {
		t.Error(err)
	}
}

type failing struct{ err error }

func (f failing) Write([]byte) (int, error) { return 0, f.err }

func FuzzNames(f *testing.F) {
	f.Add("</text><script>alert(1)</script>", 0, int64(1), int64(2))
	f.Add("\x1b]0;owned\x07 & \u202e\xff\x00", -5, int64(-1<<63), int64(1<<63-1))
	f.Add(strings.Repeat("é", 500), 99, int64(5), int64(-5))
	f.Fuzz(func(t *testing.T, name string, depth int, from, to int64) {
		c := Chart{Title: name, Fold: ms, Spans: []Span{{Name: name, Depth: depth, Start: time.Duration(from), End: time.Duration(to)}, {Name: name}}}
		for _, r := range textOf(t, c, 80) {
			if r != '\n' && !unicode.IsPrint(r) {
				t.Fatalf("%q is printed", r)
			}
		}
		if n := utf8.RuneCountInString(clean(name)); n > maxName+1 {
			t.Errorf("%d characters", n)
		}
	})
}

// Short steps are counted instead of drawn; an operation is always drawn.
func TestShortSpansAreHidden(t *testing.T) {
	t.Parallel()
	spans := []Span{
		{Name: "operation", End: 20 * time.Microsecond},
		{Name: "short", Depth: 1, End: 49 * time.Microsecond},
		{Name: "long", Depth: 1, End: 50 * time.Microsecond},
		{Name: "other", Depth: 2, End: time.Microsecond},
	}
	var out strings.Builder
	testutil.Must(t, Chart{Spans: spans, Hide: 50 * time.Microsecond}.Text(&out, 100))
	for text, want := range map[string]bool{"operation": true, "long": true, "short ": false, "other": false, "2 steps under 0.05 ms are not shown": true} {
		if strings.Contains(out.String(), text) != want {
			t.Errorf("%q is drawn: %v\n%s", text, !want, out.String())
		}
	}
}

// Spans that were not recorded are counted.
func TestLostSpansAreNamed(t *testing.T) {
	t.Parallel()
	c := Chart{Spans: []Span{{Name: "pull", End: ms}, {Name: "short", Depth: 1}}, Hide: 50 * time.Microsecond, Lost: 3}
	const want = "1 step under 0.05 ms is not shown; 3 steps beyond the limit are not shown"
	if out := textOf(t, c, 80); !strings.Contains(out, want) {
		t.Errorf("not %q:\n%s", want, out)
	}
}
