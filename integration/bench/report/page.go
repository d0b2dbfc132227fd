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

// Timeline is how one pod was started.
type Timeline struct {
	Network string // host, cni or own
	Name    string
	Took    time.Duration
	Spans   []Span
}

// Page is performance.md.
type Page struct {
	Setting   string // what was measured where
	Cgroup1   bool   // the machine has cgroup v1
	Results   *Results
	Columns   []Column
	Timelines []Timeline
}

// why.md holds what people have found out about rows that miss their goal: "## KEY" and text.
//
//go:embed why.md
var why string

// Write writes performance.md and its drawings into a directory.
func (p Page) Write(dir string) error {
	for _, d := range drawings {
		var out bytes.Buffer
		if err := p.draw(&out, d); err != nil {
			return err
		}
		if err := os.WriteFile(filepath.Join(dir, d.file), out.Bytes(), 0o644); err != nil {
			return err
		}
	}
	var out bytes.Buffer
	if err := p.markdown(&out); err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(dir, "performance.md"), out.Bytes(), 0o644)
}

// drawing is one picture of timelines.
type drawing struct {
	file, title string
	networks    []string
}

var drawings = []drawing{
	{"performance-host.svg", "one pod on the host's network, to Running", []string{"host"}},
	{"performance-cni.svg", "one pod on a network of its own, to Running", []string{"cni", "own"}},
}

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
	return waterfall.SVG(out, d.title, spans)
}

func (p Page) markdown(out *bytes.Buffer) error {
	fmt.Fprintf(out, `# Performance

<!-- contrib/bench writes this page. What it says about goals that are missed is in integration/bench/report/why.md. -->

%s
Each cell is the median, and the 99th percentile where it differs (with fewer than 100 values, as in all rows but those of 64 pods, it is the
greatest); in parentheses the median in units of berth's, and n, how many values there are, where these are fewer than 30; of fewer than 10 there is the
median alone. The runtimes' samples alternate, forwards and backwards, but in three rows: those of 500 pods are
measured with one runtime after the other, since its pods take their part of the machine, and that of 100 idle pods with all runtimes at the same time, once: six minutes, for
berth's slowest period is five. A row
has fewer where a runtime has used up its time for it, mostly 100 to 120 s; more would take hours for all of it. A dash is what was not measured: containerd is one and the same with both OCI runtimes where no pod is started, and in rows that take
long, all but berth have no network of their own, and the last row needs the option -kubelet. Machine is how slow it was meanwhile, for it is shared with strangers: the time of ten starts of a small program before each sample of berth's, the
median, in units of the row with the smallest (%.1f ms). A goal that berth reaches is in bold; the goals are of a machine on which containerd
with runc takes 121 ms for the first row. "To Running" is RunPodSandbox, CreateContainer and StartContainer together, one pod after another unless said. CPU time is that of the
runtime's cgroup with its pods, so it holds what ended processes, plugins and preparations for the next pod have used; before each sample the
runtime comes to rest. Memory is the proportional set size (PSS). What a daemon keeps ready is
all processes that it has started for no pod: berth has two launchers, which wait for the next container; shims and monitors are the pods'. A launcher has some 1.7 MiB for itself, two thirds of
it Go's heap, and both share 6 MiB of their program, a sealed copy in memory that no container can write to (CVE-2019-5736). It is the memory of a runtime which was left alone for 5 s (berth gives memory back after 3) and then has answered the two lists that kubelet asks for
every second; while 100 pods are idle nobody asks anything (containerd 2.4 has its shims read all pods' statistics every second by
itself, by default). An image's disk is free when no file of its is left in the runtime's directory, by looks 10 ms apart, each of which lists that directory (on the same processors): containerd deletes before it answers, berth after. What the kernel's own threads do for a pod, such as taking a network namespace apart, is in nobody's. The pods' only process is
the same small program for all, which waits for SIGTERM. [contrib/bench](../contrib/bench) repeats all of it.

`, p.Setting, p.Results.QuickestPace())
	for _, caveat := range p.caveats() {
		fmt.Fprintf(out, "%s\n\n", caveat)
	}
	if err := Table(out, p.Results, p.Columns, func(Row) bool { return true }); err != nil {
		return err
	}
	p.misses(out)
	p.failures(out)
	fmt.Fprint(out, "\n## Where the time goes\n\nOf five pods the one in the middle. Below berth's calls are its own spans, those of `berth trace`, where it has them.\n\n")
	for _, d := range drawings {
		fmt.Fprintf(out, "![%s](%s)\n\n", d.title, d.file)
	}
	return nil
}

// caveats are what the figures do not show.
func (p Page) caveats() (all []string) {
	if p.Cgroup1 {
		all = append(all, `All figures are of cgroup v1 alone. With v2 alone, as most nodes have it, none were taken side by side. What is known: an exec takes berth 6 to 7 ms less there
(BenchmarkExec in shim), for its init is born in its cgroup instead of being moved there, which waits for an RCU grace period; and a container has 14 mounts less.`)
	}
	if !slices.ContainsFunc(p.Columns, func(c Column) bool { return strings.Contains(strings.ToLower(c.Version), "cri-o") }) {
		all = append(all, "CRI-O, which is what needs conmon, could not be had where this page was made; contrib/bench takes one that runs, as `NAME=SOCKET`.")
	}
	return all
}

// misses explains the goals that berth does not reach.
func (p Page) misses(out *bytes.Buffer) {
	reasons := parseWhy(why)
	heading := "\n## Goals that berth does not reach\n\n"
	for _, row := range Rows {
		s := *p.Results.Of(row.Key, Ours)
		if row.Goal == 0 || len(s.Values) == 0 || row.reached(s) {
			continue
		}
		reason := reasons[row.Key]
		if reason == "" {
			reason = "Nobody has found out why yet."
		}
		got := number(s.Quantile(0.5))
		if row.Goal99 != 0 {
			got += " / " + number(s.Quantile(0.99))
		}
		fmt.Fprintf(out, "%s- **%s**: %s instead of %s %s. %s\n", heading, row.Title, got, row.goal(), row.Unit, reason)
		heading = ""
	}
}

// failures names what could not be measured.
func (p Page) failures(out *bytes.Buffer) {
	heading := "\n## What failed\n\n"
	for _, row := range Rows {
		for _, c := range p.Columns {
			if s := p.Results.Of(row.Key, c.Name); s.Failed != "" {
				fmt.Fprintf(out, "%s- %s, %s, after %d samples: `%s`\n", heading, row.Title, c.Name, len(s.Values), strings.ReplaceAll(firstLine(s.Failed), "`", "'"))
				heading = ""
			}
		}
	}
}

func firstLine(text string) string {
	line, _, _ := strings.Cut(text, "\n")
	return line
}

// parseWhy returns the texts by their rows' keys.
func parseWhy(text string) map[string]string {
	reasons := map[string]string{}
	for _, section := range strings.Split("\n"+text, "\n## ")[1:] {
		key, body, _ := strings.Cut(section, "\n")
		reasons[strings.TrimSpace(key)] = strings.Join(strings.Fields(body), " ")
	}
	return reasons
}
