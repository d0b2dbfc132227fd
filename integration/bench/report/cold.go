package report

import (
	"bytes"
	_ "embed"
	"fmt"
	"io"
	"slices"
	"strings"
)

// Columns of cold starts beside berth, which pulls whole images.
const (
	Lazy      = "berth lazy"
	ColdOther = "containerd + runc"
)

// ColdRows returns the lines of the table about cold starts: for each link and workload the time
// until the container serves, the time until the image is complete, what the registry has sent
// until the container serves, how many reads waited and for how long, and the time to read files
// afterwards.
func ColdRows(links, workloads []string) (rows []Row) {
	for _, link := range links {
		for _, w := range workloads {
			key, title := "cold-"+link+"-"+w, w+" at "+link+"bit/s"
			rows = append(rows,
				Row{Key: key + "-ready", Title: title + ": until it serves", Unit: "s"},
				Row{Key: key + "-full", Title: title + ": until the image is complete", Unit: "s"},
				Row{Key: key + "-moved", Title: title + ": received until it serves", Unit: "MiB"},
				Row{Key: key + "-waits", Title: title + ": reads that waited for content", Unit: "", Goal: 20},
				Row{Key: key + "-p99", Title: title + ": 99 % of these waits took at most", Unit: "ms"},
				Row{Key: key + "-read", Title: title + ": reading /usr/lib of the complete image", Unit: "s"})
		}
	}
	return rows
}

// ColdStarts is the section of performance.md about cold starts.
type ColdStarts struct {
	Setting string // machine, versions and date
	Image   string // describes the image
	Rows    []Row
	Results *Results
}

// coldNotes are what follows the table: goals, and why they are missed.
//
//go:embed cold.md
var coldNotes string

// coldHeading begins the section. The next heading of its level ends it.
const coldHeading = "## Cold start\n"

// Write replaces the section in the performance.md of a directory.
func (c ColdStarts) Write(dir string) error { return writeSection(dir, coldHeading, c.markdown) }

// Print writes the section.
func (c ColdStarts) Print(w io.Writer) error {
	var out bytes.Buffer
	if err := c.markdown(&out); err != nil {
		return err
	}
	_, err := out.WriteTo(w)
	return err
}

func (c ColdStarts) markdown(out *bytes.Buffer) error {
	out.WriteString(coldHeading + "\n")
	columns := []string{ColdOther, Ours, Lazy}
	t := tableWriter{w: out}
	t.printf("| | %s | lazy / eager |\n|---|---:|---:|---:|---:|\n", strings.Join(columns, " | "))
	for _, row := range c.Rows {
		if !slices.ContainsFunc(columns, func(column string) bool { return len(c.Results.Of(row.Key, column).Values) > 0 }) {
			continue
		}
		cells := []string{strings.TrimSuffix(row.Title+", "+row.Unit, ", ")}
		for _, column := range columns {
			cells = append(cells, spread(row, *c.Results.Of(row.Key, column), false))
		}
		t.printf("| %s | %s |\n", strings.Join(cells, " | "), share(*c.Results.Of(row.Key, Lazy), *c.Results.Of(row.Key, Ours)))
	}
	if t.err != nil {
		return t.err
	}
	fmt.Fprintf(out, `
%s
A node pulls an image of which it has no layer, and starts a container (`+"`contrib/bench -cold`"+`). A cell holds median, minimum and maximum. The last column compares berth's medians.

- %s
- The registry is in another network namespace. Its link has a token bucket filter with the row's rate, and each request waits 20 ms.
- "berth lazy" has the index of the layer from an earlier pull (lazy.policy = "on"). The image itself was removed.
- "until it serves" begins with PullImage, and ends with the first answer of the server: HTTP 200, or PONG from redis.
- "Reads that waited" had to wait for content that was not fetched yet. Each start knows which parts earlier starts have waited for. The first start of a row knows none, so it is not counted. The row "99 %% of these waits" shows the upper bound of a bucket of berth's metric.
- "until the image is complete" begins with PullImage, too. Without lazy layers it ends with PullImage.
`, c.Setting, c.Image)
	failures(out, c.Rows, c.Results, columns, "\n### What failed\n\n")
	out.WriteString("\n" + coldNotes + "\n")
	return nil
}

// share formats the median of a part in percent of that of the whole.
func share(part, whole Series) string {
	if len(part.Values) == 0 || len(whole.Values) == 0 || whole.Quantile(0.5) == 0 {
		return "–"
	}
	return number(100*part.Quantile(0.5)/whole.Quantile(0.5)) + " %"
}
