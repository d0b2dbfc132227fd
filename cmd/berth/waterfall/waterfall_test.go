package waterfall

import (
	"bytes"
	"encoding/xml"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"slices"
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

func svgOf(t testing.TB, c Chart) string {
	t.Helper()
	var out bytes.Buffer
	if err := c.SVG(&out); err != nil {
		t.Fatal(err)
	}
	return out.String()
}

func textOf(t testing.TB, c Chart, columns int) string {
	t.Helper()
	var out bytes.Buffer
	if err := c.Text(&out, columns); err != nil {
		t.Fatal(err)
	}
	return out.String()
}

func TestChartsMatchGoldenFiles(t *testing.T) {
	t.Parallel()
	golden(t, "sample.svg", svgOf(t, sample))
	golden(t, "sample.txt", textOf(t, sample, 80))
	var plain bytes.Buffer
	if err := SVG(&plain, "plain", sample.Spans[:5]); err != nil {
		t.Fatal(err)
	}
	golden(t, "plain.svg", plain.String())
}

// texts parses a document and returns the content of its text elements.
func texts(t testing.TB, document string) (all []string) {
	t.Helper()
	parser := xml.NewDecoder(strings.NewReader(document))
	inside := false
	for {
		token, err := parser.Token()
		if err == io.EOF {
			return all
		}
		if err != nil {
			t.Fatalf("%v in\n%s", err, document)
		}
		switch token := token.(type) {
		case xml.StartElement:
			inside = token.Name.Local == "text"
			switch token.Name.Local {
			case "svg", "title", "style", "rect", "line", "text":
			default:
				t.Fatalf("element %s", token.Name.Local)
			}
		case xml.EndElement:
			inside = false
		case xml.CharData:
			if inside {
				all = append(all, string(token))
			}
		}
	}
}

func TestSVGShowsEverySpan(t *testing.T) {
	t.Parallel()
	shown := strings.Join(texts(t, svgOf(t, sample)), "\n")
	for _, s := range sample.Spans {
		if !strings.Contains(shown, s.Name) || !strings.Contains(shown, Took(s.End-s.Start)) {
			t.Errorf("%s, %s: not in\n%s", s.Name, Took(s.End-s.Start), shown)
		}
	}
	if !strings.Contains(shown, "+"+Took(1995*ms)) {
		t.Errorf("the time of the omitted part is missing: %s", shown)
	}
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

func TestTicks(t *testing.T) {
	t.Parallel()
	for _, until := range []time.Duration{0, 1, time.Microsecond, 15 * ms, 99 * ms, time.Second, time.Hour, 2 * mostTime} {
		all := ticks(until, 10)
		if len(all) == 0 || len(all) > 11 || all[0] != 0 || all[len(all)-1] > until {
			t.Errorf("%v: %v", until, all)
		}
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
	if err := sample.SVG(failing{full}); !errors.Is(err, full) {
		t.Error(err)
	}
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
		if shown := texts(t, svgOf(t, c)); len(shown) < 2 && clean(name) != "" {
			t.Errorf("shown: %q", shown)
		}
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

// The labels of the axis are true times on both sides of a fold.
func TestMarksCountFoldedTime(t *testing.T) {
	t.Parallel()
	l := Chart{Fold: 5 * time.Millisecond, Spans: []Span{{End: 12 * time.Millisecond}, {Start: time.Second, End: time.Second + 10*time.Millisecond}}}.layout()
	var got []string
	for _, m := range l.marks(5) {
		got = append(got, fmt.Sprintf("%s at %s", tick(m.time), m.at))
	}
	if text := strings.Join(got, ", "); text != "0 at 0s, 5 ms at 5ms, 10 ms at 10ms, 1 s at 17ms, 1005 ms at 22ms, 1010 ms at 27ms" {
		t.Error(text)
	}
}

// Every tick and every fold keeps its label, and no two labels overlap, however close they are.
func TestSVGKeepsAllLabels(t *testing.T) {
	t.Parallel()
	for _, folds := range []int{0, 1, 2, 5, 40} {
		c := Chart{Fold: 5 * ms}
		for i := range folds + 1 {
			at := time.Duration(i) * 1017 * ms
			c.Spans = append(c.Spans, Span{Name: "request", Start: at, End: at + time.Duration(i%3+1)*ms})
		}
		l := c.layout()
		if len(l.folds) != folds {
			t.Fatalf("%d folds, want %d", len(l.folds), folds)
		}
		d := svg{until: l.until}
		all, rows := d.labels(l)
		if len(all) != len(l.folds)+len(l.marks(svgTicks)) {
			t.Errorf("%d folds: %d labels for %d ticks", folds, len(all), len(l.marks(svgTicks)))
		}
		for i, a := range all {
			if a.row >= rows || slices.ContainsFunc(all[i+1:], a.overlaps) {
				t.Errorf("%d folds: %+v overlaps another label, or is above all %d rows", folds, a, rows)
			}
		}
		shown := texts(t, svgOf(t, c))
		for _, a := range all {
			if !slices.Contains(shown, a.text) {
				t.Errorf("%d folds: %q is not drawn", folds, a.text)
			}
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
