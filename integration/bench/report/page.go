package report

import (
	"bytes"
	_ "embed"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"berth/cmd/berth/waterfall"
)

// Span is a part of a pod's start.
type Span struct {
	Name       string
	Begin, End time.Duration
	Depth      int
}

// Timeline is the start of one pod.
type Timeline struct {
	Network string // host, cni or own
	Name    string
	Took    time.Duration
	Spans   []Span
}

// Page is performance.md.
type Page struct {
	Setting   string // machine, versions and date
	Results   *Results
	Columns   []Column
	Timelines []Timeline
}

// why.md holds the reasons for missed goals: a heading "## KEY" and Markdown text per row.
//
//go:embed why.md
var why string

// Write writes performance.md into a directory.
func (p Page) Write(dir string) error {
	var out bytes.Buffer
	separate, err := oldSections(dir)
	if err != nil {
		return err
	}
	if err := p.markdown(&out, separate); err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(dir, "performance.md"), out.Bytes(), 0o644)
}

// drawing is one figure of timelines.
type drawing struct {
	title    string
	networks []string
}

var drawings = []drawing{
	{"One pod on the host's network, to Running:", []string{"host"}},
	{"One pod with CNI plugins or the built-in network, to Running:", []string{"cni", "own"}},
}

const (
	drawingColumns = 100
	shortestSpan   = 500 * time.Microsecond // shorter ones are not drawn
)

// draw draws the starts of all runtimes on one axis, each from its own beginning.
func (p Page) draw(out *bytes.Buffer, d drawing) error {
	var spans []waterfall.Span
	for _, t := range p.Timelines {
		if !slices.Contains(d.networks, t.Network) || len(t.Spans) == 0 {
			continue
		}
		spans = append(spans, waterfall.Span{Name: t.Name, Start: t.Spans[0].Begin, End: t.Spans[0].Begin + t.Took})
		for _, s := range t.Spans {
			spans = append(spans, waterfall.Span{Name: s.Name, Start: s.Begin, End: s.End, Depth: s.Depth + 1})
		}
	}
	return waterfall.Chart{Spans: spans, Hide: shortestSpan}.Text(out, drawingColumns)
}

// drawingsHeading begins the last section.
const drawingsHeading = "## Where the time goes\n"

// markdown writes the page. separate holds its sections that are measured separately.
func (p Page) markdown(out *bytes.Buffer, separate string) error {
	fmt.Fprint(out, `# Performance

For everyone who compares runtimes.

`)
	if err := Table(out, Rows, p.Results, p.Columns); err != nil {
		return err
	}
	fmt.Fprint(out, `
A cell holds the median and, after the slash, the 99th percentile. A bold value reaches its goal. [How to read the table](#how-to-read-the-table) has the details.
`)
	p.explain(out)
	misses(out, Rows, p.Results, "\n## Goals that berth does not reach\n\n")
	failures(out, Rows, p.Results, names(p.Columns), "\n## What failed\n\n")
	if separate != "" {
		fmt.Fprint(out, "\n", strings.TrimRight(separate, "\n"), "\n")
	}
	fmt.Fprint(out, "\n", drawingsHeading, "\nThe median of five pods. Berth's calls show the spans of `berth trace`.\n\n")
	for _, d := range drawings {
		fmt.Fprintf(out, "%s\n\n```text\n", d.title)
		if err := p.draw(out, d); err != nil {
			return err
		}
		fmt.Fprint(out, "```\n\n")
	}
	return nil
}

// explain writes how the table was measured and what its cells mean.
func (p Page) explain(out *bytes.Buffer) {
	fmt.Fprintf(out, "\n## Measurement\n\n%s\n\n", strings.TrimSpace(p.Setting))
	fmt.Fprintf(out, `[contrib/bench](../contrib/bench) repeats all of it and writes this page. The reasons for missed goals come from integration/bench/report/why.md.

## How to read the table

- A cell holds the median and, after the slash, the 99th percentile. With fewer than 100 values the maximum replaces the percentile. With fewer than 10 values a cell holds the median only.
- Parentheses hold the median in multiples of berth's median. They also hold n, the number of values, if fewer than 30. Each runtime is measured for 100 to 120 s per row.
- A bold value reaches its goal. The goals are for a machine where containerd with runc takes 121 ms in the first row.
- A dash means not measured. In rows that start no pod, both OCI runtimes share one containerd.
- "machine" shows how slow the shared machine was during the row. Before each sample a small program is started ten times. The column compares that time with the shortest one (%.1f ms).

Terms:

- "To Running" means RunPodSandbox, CreateContainer and StartContainer. Pods start one after another unless the row says otherwise. All pods run the same small program.
- Samples of the runtimes alternate, except in the rows with 500 and 100 pods.
- Instructions are those of the runtime, its programs and its pods (perf_event_open(2), in user space and in the kernel). Other load does not change them. The rows are missing where the machine does not count instructions.
- CPU time is the time of the runtime's cgroup and its pods. It includes ended processes, plugins and preparations for the next pod. It does not include the kernel's own threads.
- Memory is the proportional set size (PSS). It is measured after the client has listed everything twice and nothing has changed for 5 s.
- With containerd's shim as a handler of berth, a pod has 7.33 MiB. containerd with the same shim has 6.10 MiB (medians of 5, 28 November 2026, contrib/bench -shim -rows pss-pod). The difference is berth's monitors and berth-task, one process per container.
- "Idle helpers" are processes that wait for the next pod. Berth keeps two launchers, which have 1.7 MiB each and share 6 MiB of program.
- Sessions: the process `+"`berth-stream`"+` takes 10.8 MiB with one session: 3.2 MiB of its own, and 7.6 MiB are pages of its file, which the kernel can drop. Daemon and sessions together take 31.1 MiB without a session, 42.0 MiB with one exec session and 68.2 MiB with 50, so 0.53 MiB for each more (`+"`TestMemoryOfSessions`"+`, 8ed74aa, 28 November 2026, two runs).
- During the row of 100 idle pods no client sends requests. containerd's shims read statistics every second by default.
- RemoveImage answers when the layers are deleted, in containerd and in berth.
`, p.Results.QuickestPace())
}

// misses explains the goals that berth does not reach. heading precedes the first one.
func misses(out *bytes.Buffer, rows []Row, results *Results, heading string) {
	reasons := parseWhy(why)
	for _, row := range rows {
		s := *results.Of(row.Key, Ours)
		if row.Goal == 0 || len(s.Values) == 0 || row.reached(s) {
			continue
		}
		reason := reasons[row.Key]
		if reason == "" {
			reason = "The reason is unknown."
		}
		got := number(s.Quantile(0.5))
		if row.Goal99 != 0 {
			got += " / " + number(s.Quantile(0.99))
		}
		fmt.Fprintf(out, "%s### %s\n\n%s instead of %s %s.\n\n%s\n", heading, row.Title, got, row.goal(), row.Unit, reason)
		heading = "\n"
	}
}

// failures lists the rows whose measurement failed. heading precedes the first one.
func failures(out *bytes.Buffer, rows []Row, results *Results, columns []string, heading string) {
	for _, row := range rows {
		for _, c := range columns {
			if s := results.Of(row.Key, c); s.Failed != "" {
				fmt.Fprintf(out, "%s- %s, %s, after %d samples: `%s`\n", heading, row.Title, c, len(s.Values), strings.ReplaceAll(firstLine(s.Failed), "`", "'"))
				heading = ""
			}
		}
	}
}

func names(columns []Column) (all []string) {
	for _, c := range columns {
		all = append(all, c.Name)
	}
	return all
}

func firstLine(text string) string {
	line, _, _ := strings.Cut(text, "\n")
	return line
}

// parseWhy returns the texts by the keys of their rows.
func parseWhy(text string) map[string]string {
	reasons := map[string]string{}
	for _, section := range strings.Split("\n"+text, "\n## ")[1:] {
		key, body, _ := strings.Cut(section, "\n")
		reasons[strings.TrimSpace(key)] = strings.TrimSpace(body)
	}
	return reasons
}
