package report

import (
	"bytes"
	"fmt"
	"io"
)

// ByHand is the column with which checkpoints are compared.
const ByHand = "runc + CRIU"

// CheckpointRows are the lines of the table about checkpoints.
var CheckpointRows = []Row{
	{Key: "shell-frozen", Title: "shell: frozen", Unit: "ms", Goal: 40},
	{Key: "shell-checkpoint", Title: "shell: checkpoint", Unit: "ms", Goal: 80},
	{Key: "shell-checkpoint-cpu", Title: "shell: CPU of a checkpoint", Unit: "ms"},
	{Key: "shell-start", Title: "shell: start of the restored container, until it runs", Unit: "ms", Goal: 60},
	{Key: "200m-frozen", Title: "200 MiB: frozen", Unit: "ms", Goal: 180},
	{Key: "200m-checkpoint", Title: "200 MiB: checkpoint", Unit: "ms", Goal: 240},
	{Key: "200m-checkpoint-cpu", Title: "200 MiB: CPU of a checkpoint", Unit: "ms"},
	{Key: "200m-start", Title: "200 MiB: start of the restored container, until it runs", Unit: "ms", Goal: 230},
	{Key: "200m-archive", Title: "200 MiB: a tar, on the disk", Unit: "ms"},
	{Key: "200m-archive-cpu", Title: "200 MiB: CPU of a tar, on the disk", Unit: "ms"},
	{Key: "200m-archive-frozen", Title: "200 MiB: frozen for a tar, on the disk", Unit: "ms"},
	{Key: "skew", Title: "ten containers of a pod: first frozen to last frozen", Unit: "ms", Goal: 5},
}

// Checkpoints is the section of performance.md about checkpoints.
type Checkpoints struct {
	Setting string // machine, versions and date
	Results *Results
}

// checkpointHeading begins the section. The next heading of its level ends it.
const checkpointHeading = "## Checkpoint and restore\n"

// Write replaces the section in the performance.md of a directory.
func (c Checkpoints) Write(dir string) error { return writeSection(dir, checkpointHeading, c.markdown) }

// Print writes the section.
func (c Checkpoints) Print(w io.Writer) error {
	var out bytes.Buffer
	if err := c.markdown(&out); err != nil {
		return err
	}
	_, err := out.WriteTo(w)
	return err
}

func (c Checkpoints) markdown(out *bytes.Buffer) error {
	out.WriteString(checkpointHeading + "\n")
	t := tableWriter{w: out}
	t.printf("| | goal | %s | berth | ratio |\n|---|---:|---:|---:|---:|\n", ByHand)
	for _, row := range CheckpointRows {
		theirs, ours := c.Results.Of(row.Key, ByHand), c.Results.Of(row.Key, Ours)
		t.printf("| %s, %s | %s | %s | %s | %s |\n", row.Title, row.Unit, row.goal(), spread(row, *theirs, false), spread(row, *ours, true), ratio(*theirs, *ours))
	}
	if t.err != nil {
		return t.err
	}
	fmt.Fprintf(out, `
%s
The table compares berth with runc and CRIU by hand (`+"`contrib/bench -checkpoint`"+`). A cell holds median, minimum and maximum. The ratio compares the medians. A bold median reaches its goal.
Before each sample a small program is started ten times. That took %.1f ms (median of the slowest row).

- Both sides save and restore the same image with the same mounts and limits, in the namespaces of the same pod. Samples alternate. Both sides write into a tmpfs, except in the rows "on the disk".
- "frozen" is the time that the processes notice. They look at the clock once a millisecond, and the longest gap counts. The gap includes the wait for a processor.
- "checkpoint" is CheckpointPod of a pod with one container. It includes the hashes of all files, the signature and the sync. runc only writes CRIU's images.
- "a tar" is CheckpointContainer. By hand it is runc checkpoint, tar, and a sync. Berth writes the memory once. On ext4 and XFS the file with the memory becomes the tar (fallocate with FALLOC_FL_INSERT_RANGE). On btrfs the tar shares the blocks of that file (reflink). On a tmpfs, and if the tar is on another filesystem than berth's root, the kernel copies it.
- "start" begins with StartContainer or runc restore, and ends when the process looks at the clock.
- The CPU time includes all programs and the container itself.
- "first frozen to last frozen" compares when each container last looked at the clock before its gap, so it is up to a millisecond too long. By hand, ten runs of runc pause begin at the same time.
`, c.Setting, c.Results.slowestPace())
	misses(out, CheckpointRows, c.Results, "\n")
	failures(out, CheckpointRows, c.Results, []string{ByHand, Ours}, "\n### What failed\n\n")
	out.WriteString("\n")
	return nil
}

// spread formats median, minimum and maximum, and the number of values if they are few.
func spread(row Row, s Series, ours bool) string {
	switch {
	case len(s.Values) == 0 && s.Failed != "":
		return "failed"
	case len(s.Values) == 0:
		return "–"
	}
	median := number(s.Quantile(0.5))
	if ours && row.reached(s) {
		median = "**" + median + "**"
	}
	text := fmt.Sprintf("%s (%s to %s)", median, number(s.Quantile(0)), number(s.Quantile(1)))
	if n := len(s.Values); n < fewToTell {
		text += fmt.Sprintf(", n %d", n)
	}
	return text
}

// ratio formats their median in multiples of ours.
func ratio(theirs, ours Series) string {
	if len(theirs.Values) == 0 || len(ours.Values) == 0 || ours.Quantile(0.5) == 0 {
		return "–"
	}
	return "×" + number(theirs.Quantile(0.5)/ours.Quantile(0.5))
}
