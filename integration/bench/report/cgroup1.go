package report

import (
	"bytes"
	"fmt"
)

// Cgroup1 is the section of performance.md about cgroup v1.
type Cgroup1 struct {
	Setting string // machine, versions and date
	Results *Results
	Columns []Column
}

// cgroup1Heading begins the section. The next heading of its level ends it.
const cgroup1Heading = "## Cgroup v1\n"

// Write replaces the section in the performance.md of a directory.
func (c Cgroup1) Write(dir string) error { return writeSection(dir, cgroup1Heading, c.markdown) }

func (c Cgroup1) markdown(out *bytes.Buffer) error {
	out.WriteString(cgroup1Heading + "\n")
	if err := Table(out, Cgroup1Rows, c.Results, c.Columns); err != nil {
		return err
	}
	fmt.Fprintf(out, `
%s
Rows of the first table on cgroup v1 (`+"`contrib/bench -cgroup1`"+`). A container has 14 more mounts than on cgroup v2. The kernel moves the init of an exec into its cgroup and waits for an RCU grace period, which takes 6 to 7 ms. On cgroup v2 it creates init inside its cgroup.

`, c.Setting)
	failures(out, Cgroup1Rows, c.Results, names(c.Columns), "### What failed\n\n")
	return nil
}
