package report

import (
	"bytes"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
)

// startCostHeading begins a section that is written by hand.
const startCostHeading = "## What a start costs\n"

// sections are the headings of the sections that are measured separately, in the order of the page.
var sections = []string{cgroup1Heading, checkpointHeading, coldHeading, startCostHeading}

// writeSection replaces a section in the performance.md of a directory.
func writeSection(dir, heading string, markdown func(*bytes.Buffer) error) error {
	path := filepath.Join(dir, "performance.md")
	page, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	before, _, after := cutSection(string(page), heading)
	var out bytes.Buffer
	if err := markdown(&out); err != nil {
		return err
	}
	return os.WriteFile(path, []byte(strings.TrimRight(before, "\n")+"\n\n"+out.String()+after), 0o644)
}

// cutSection splits a page into what is before a section, the section, and what is after it. In a
// page without the section it belongs before the drawings.
func cutSection(page, heading string) (before, section, after string) {
	before, rest, found := strings.Cut(page, heading)
	if !found {
		before, after, found = strings.Cut(page, drawingsHeading)
		if found {
			after = drawingsHeading + after
		}
		return before, "", after
	}
	section = heading + rest
	if end := strings.Index(rest, "\n## "); end >= 0 {
		section, after = heading+rest[:end+1], rest[end+1:]
	}
	return before, section, after
}

// oldSections returns the sections of the page in a directory that are measured separately.
func oldSections(dir string) (all string, err error) {
	page, err := os.ReadFile(filepath.Join(dir, "performance.md"))
	if errors.Is(err, fs.ErrNotExist) {
		return "", nil
	}
	for _, heading := range sections {
		_, section, _ := cutSection(string(page), heading)
		all += section
	}
	return all, err
}
