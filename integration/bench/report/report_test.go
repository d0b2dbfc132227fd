package report

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
)

func TestQuantile(t *testing.T) {
	values := make([]float64, 100)
	for i := range values {
		values[i] = float64(100 - i)
	}
	for _, tc := range []struct {
		values  []float64
		q, want float64
	}{
		{values, 0.5, 50}, {values, 0.99, 99}, {values, 1, 100}, {values, 0, 1},
		{[]float64{7}, 0.5, 7}, {[]float64{7}, 0.99, 7},
		{[]float64{3, 1, 2}, 0.5, 2}, {[]float64{3, 1, 2}, 0.99, 3},
	} {
		if got := (Series{Values: tc.values}).Quantile(tc.q); got != tc.want {
			t.Errorf("quantile %v of %d values: got %v, want %v", tc.q, len(tc.values), got, tc.want)
		}
	}
}

func TestNumberFormat(t *testing.T) {
	for v, want := range map[float64]string{0: "0.00", 0.304: "0.30", 9.99: "9.99", 9.996: "10.0", 45: "45.0", 99.94: "99.9", 99.96: "100", 1234.5: "1234"} {
		if got := number(v); got != want {
			t.Errorf("number(%v): got %q, want %q", v, got, want)
		}
	}
}

func TestTableCell(t *testing.T) {
	row := Row{Key: "k", Unit: "ms", Goal: 15}
	var results Results
	*results.Of("k", Ours) = Series{Values: []float64{10, 20, 14}}
	*results.Of("k", "ten") = Series{Values: []float64{28, 28, 28, 28, 28, 28, 28, 28, 28, 35}}
	*results.Of("k", "thirty") = Series{Values: slices.Repeat([]float64{7}, 30)}
	*results.Of("k", "other") = Series{Values: []float64{28}}
	*results.Of("k", "broken") = Series{Failed: "it fails"}
	*results.Of("k", "late") = Series{Values: []float64{14}, Failed: "it fails"}
	for column, want := range map[string]string{
		Ours: "**14.0** (n 3)", "other": "28.0 (×2.00, n 1)", "broken": "failed", "late": "14.0 (×1.00, n 1)", "absent": "–",
		"ten": "28.0 / 35.0 (×2.00, n 10)", "thirty": "7.00 (×0.50)",
	} {
		if got := cell(&results, row, column); got != want {
			t.Errorf("%s: got %q, want %q", column, got, want)
		}
	}
	row.Goal99 = 19
	if got := cell(&results, row, Ours); got != "14.0 (n 3)" {
		t.Errorf("missed goal for the 99th percentile: got %q", got)
	}
}

func TestKeysAreUnique(t *testing.T) {
	seen := map[string]bool{}
	for _, row := range slices.Concat(Rows, CheckpointRows) {
		if seen[row.Key] || strings.ContainsAny(row.Key, " |") {
			t.Errorf("key %q", row.Key)
		}
		seen[row.Key] = true
	}
}

func TestPage(t *testing.T) {
	var results Results
	*results.Of("start-host", Ours) = Series{Values: []float64{16}}
	*results.Of("exec", Ours) = Series{Values: []float64{4}}
	*results.Of("pss-all-idle", Ours) = Series{Values: []float64{4}}
	results.Pace("start-host").Values, results.Pace("exec").Values = []float64{8, 9, 9}, []float64{5, 6, 7}
	*results.Of("exec", "other") = Series{Failed: "it `fails`\nfor this reason"}
	dir := t.TempDir()
	page := Page{Setting: "here", Results: &results, Columns: []Column{{Name: "other"}, {Name: Ours}},
		Timelines: []Timeline{{Network: "host", Name: Ours, Took: 3 * time.Millisecond, Spans: []Span{{Name: "RunPodSandbox", End: 3 * time.Millisecond}}}}}
	if err := page.Write(dir); err != nil {
		t.Fatal(err)
	}
	content, err := os.ReadFile(filepath.Join(dir, "performance.md"))
	if err != nil {
		t.Fatal(err)
	}
	if strings.Contains(string(content), "### PSS") {
		t.Errorf("a row without a goal misses one:\n%s", content)
	}
	if begin, _, _ := strings.Cut(string(content), "\n| host network"); strings.Count(begin, "\n") > 10 {
		t.Errorf("the table does not begin within ten lines:\n%s", content)
	}
	for _, want := range []string{
		"| host network, to Running, ms | 15.0 | – | 16.0 (n 1) | ×1.50 |\n",
		"| ExecSync `true`, ms | 5.00 | failed | **4.00** (n 1) | ×1.00 |\n",
		"### host network, to Running\n\n16.0 instead of 15.0 ms.\n\n",
		"- ExecSync `true`, other, after 0 samples: `it 'fails'`\n",
		"shortest one (6.0 ms)", "StopPodSandbox, built-in network, ms | 8.00 | – | – | – |",
		"RunPodSandbox  ",
	} {
		if !strings.Contains(string(content), want) {
			t.Errorf("the page lacks %q:\n%s", want, content)
		}
	}
}

func TestParseWhy(t *testing.T) {
	got := parseWhy("What this is.\n\n## exec\nBecause\nof that.\n\n## start-host\nx\n")
	if len(got) != 2 || got["exec"] != "Because\nof that." || got["start-host"] != "x" {
		t.Errorf("got %q", got)
	}
}

// Each reason explains an existing row.
func TestReasonsBelongToRows(t *testing.T) {
	for key, reason := range parseWhy(why) {
		if !slices.ContainsFunc(slices.Concat(Rows, CheckpointRows), func(r Row) bool { return r.Key == key }) || reason == "" {
			t.Errorf("%q: %q", key, reason)
		}
	}
}

// A measurement of cgroup v1 replaces its own section, before the other sections.
func TestCgroup1Section(t *testing.T) {
	dir := t.TempDir()
	page := Page{Setting: "all rows", Results: &Results{}, Columns: []Column{{Name: Ours}}}
	if err := page.Write(dir); err != nil {
		t.Fatal(err)
	}
	for _, start := range []float64{30, 50} {
		var results Results
		*results.Of("start-host", Ours) = Series{Values: []float64{start}}
		if err := (Cgroup1{Setting: "cgroup v1\n", Results: &results, Columns: page.Columns}).Write(dir); err != nil {
			t.Fatal(err)
		}
	}
	content, err := os.ReadFile(filepath.Join(dir, "performance.md"))
	if err != nil {
		t.Fatal(err)
	}
	_, section, after := cutSection(string(content), cgroup1Heading)
	if !strings.Contains(section, "| host network, to Running, ms | 15.0 | 50.0 (n 1) |") || strings.Contains(section, "PSS") {
		t.Errorf("the section does not have the rows that depend on cgroups:\n%s", section)
	}
	if !strings.HasPrefix(after, drawingsHeading) || strings.Count(string(content), cgroup1Heading) != 1 {
		t.Errorf("the section has another place:\n%s", content)
	}
}

// A measurement of checkpoints replaces its own section only, and a measurement of everything else
// keeps it.
func TestCheckpointSection(t *testing.T) {
	dir := t.TempDir()
	page := Page{Setting: "all rows", Results: &Results{}, Columns: []Column{{Name: Ours}}}
	if err := page.Write(dir); err != nil {
		t.Fatal(err)
	}
	for _, frozen := range []float64{30, 50} {
		var results Results
		*results.Of("shell-frozen", Ours) = Series{Values: []float64{frozen - 1, frozen, frozen + 2}}
		*results.Of("shell-frozen", ByHand) = Series{Values: []float64{2 * frozen}}
		*results.Of("skew", ByHand) = Series{Failed: "it fails"}
		if err := (Checkpoints{Setting: "checkpoints only\n", Results: &results}).Write(dir); err != nil {
			t.Fatal(err)
		}
	}
	if err := page.Write(dir); err != nil {
		t.Fatal(err)
	}
	content, err := os.ReadFile(filepath.Join(dir, "performance.md"))
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{
		"all rows", "checkpoints only", "| shell: frozen, ms | 40.0 | 100 (100 to 100), n 1 | 50.0 (49.0 to 52.0), n 3 | ×2.00 |\n",
		"### shell: frozen\n\n50.0 instead of 40.0 ms.", "runc + CRIU, after 0 samples: `it fails`\n\n## Where the time goes\n\nThe median",
	} {
		if strings.Count(string(content), want) != 1 {
			t.Errorf("the page does not have %q once:\n%s", want, content)
		}
	}
	if strings.Count(string(content), "\n## ") != 4 { // and how the table was measured, how to read it
		t.Errorf("the page has other sections:\n%s", content)
	}
}
