package exporter

import (
	"flag"
	"os"
	"strings"
	"testing"
)

var update = flag.Bool("update", false, "write docs/metrics.md")

const reference = "../../../docs/metrics.md"

// docs/metrics.md has the table of metrics between two marks.
func TestReferenceListsMetrics(t *testing.T) {
	page, err := os.ReadFile(reference)
	if err != nil {
		t.Fatal(err)
	}
	const begin, end = "<!-- metrics -->\n", "<!-- end of metrics -->\n"
	head, rest, found := strings.Cut(string(page), begin)
	_, tail, foundEnd := strings.Cut(rest, end)
	if !found || !foundEnd {
		t.Fatalf("%s lacks its marks", reference)
	}
	var table strings.Builder
	table.WriteString("| Metric | Group | Type | Labels | Meaning |\n|---|---|---|---|---|\n")
	for _, m := range newWatching().Metrics() {
		table.WriteString("| `" + m.Name + "` | " + groupOf(m.Name) + " | " + m.Kind + " | " + strings.Join(m.Labels, ", ") + " | " + m.Help + " |\n")
	}
	want := head + begin + table.String() + end + tail
	if *update {
		if err := os.WriteFile(reference, []byte(want), 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	if string(page) != want {
		t.Errorf("%s is out of date: run go test ./cmd/berthd/exporter -run Reference -update", reference)
	}
}
