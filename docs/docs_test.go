// Package docs holds the documents. The tests compare them with the source and check their form.
package docs

import (
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"

	"berth/integration/pages"
)

// checkout is the root of the sources.
const checkout = ".."

// Test names in pages are names of existing tests.
func TestPagesNameExistingTests(t *testing.T) {
	t.Parallel()
	tests := map[string]bool{}
	for _, content := range files(t, "_test.go") {
		for _, match := range regexp.MustCompile(`(?m)^func ((?:Test|Fuzz|Benchmark)\w+)\(`).FindAllStringSubmatch(content, -1) {
			tests[match[1]] = true
		}
	}
	name := regexp.MustCompile(`\b(?:Test|Fuzz|Benchmark)[A-Z]\w+\b`)
	for path, content := range files(t, ".md") {
		for _, named := range name.FindAllString(content, -1) {
			if !tests[named] && named != "TestName" { // a placeholder
				t.Errorf("%s names %s, which does not exist", path, named)
			}
		}
	}
}

// Paths in pages exist in the checkout. runc.md is excluded because it also names files of modules.
func TestPagesNameExistingPaths(t *testing.T) {
	t.Parallel()
	path := regexp.MustCompile("`((?:cmd|checkpoint|cni|contrib|image|integration|internal|oci|sandbox|server|shim)/[\\w./-]+)`")
	for page, content := range files(t, ".md") {
		if filepath.Base(page) == "runc.md" {
			continue
		}
		for _, match := range path.FindAllStringSubmatch(content, -1) {
			if _, err := os.Stat(filepath.Join(checkout, match[1])); err != nil {
				t.Errorf("%s names a path that does not exist: %v", page, err)
			}
		}
	}
}

// security.md names a test for each promise.
func TestPromisesHaveTests(t *testing.T) {
	t.Parallel()
	rows := regexp.MustCompile(`(?m)^\| .* \|$`).FindAllString(read(t, "security.md"), -1)
	promises := slices.DeleteFunc(rows, func(row string) bool { return strings.HasPrefix(row, "| Promise |") })
	if len(promises) < 25 {
		t.Fatalf("%d promises", len(promises))
	}
	for _, row := range promises {
		if cells := strings.Split(row, " | "); !strings.HasPrefix(cells[len(cells)-1], "`Test") {
			t.Errorf("a promise without a test: %s", row)
		}
	}
}

func TestLinksLeadToFilesAndHeadings(t *testing.T) {
	t.Parallel()
	link := regexp.MustCompile(`\]\(([^)#:\s]*)(?:#([^)]*))?\)`)
	pages := files(t, ".md")
	for path, content := range pages {
		for _, match := range link.FindAllStringSubmatch(content, -1) {
			target := path
			if match[1] != "" {
				target = filepath.Join(filepath.Dir(path), match[1])
			}
			if _, err := os.Stat(target); err != nil {
				t.Errorf("%s links to %s: %v", path, match[1], err)
				continue
			}
			if match[2] != "" && !anchors(pages[target])[match[2]] {
				t.Errorf("%s links to %s, which has no heading #%s", path, target, match[2])
			}
		}
	}
}

// anchors returns the anchor names of a page's headings, in GitHub's form.
func anchors(page string) map[string]bool {
	names := map[string]bool{}
	for _, heading := range regexp.MustCompile(`(?m)^#+ (.*)$`).FindAllStringSubmatch(page, -1) {
		name := regexp.MustCompile(`[^\pL\pN _-]`).ReplaceAllString(strings.ToLower(heading[1]), "")
		names[strings.ReplaceAll(name, " ", "-")] = true
	}
	return names
}

// Each shell block is run by a test, or says why not. A test runs blocks of every page in each
// place.
func TestShellBlocksAreRun(t *testing.T) {
	t.Parallel()
	if _, err := pages.Read(checkout); err != nil {
		t.Error(err)
	}
	for path, content := range files(t, ".md") {
		if _, err := pages.Parse(path, content); err != nil {
			t.Error(err)
		}
	}
	sources := files(t, "_test.go")
	for name, place := range pages.Places {
		if !slices.ContainsFunc(slices.Collect(maps.Values(sources)), func(s string) bool { return strings.Contains(s, "\nfunc "+place.Test+"(") }) {
			t.Errorf("the blocks of %s are run by %s, which does not exist", name, place.Test)
		}
	}
}

// The first sentence of a page names its readers.
func TestPagesNameTheirReaders(t *testing.T) {
	t.Parallel()
	pages, err := filepath.Glob("*.md")
	if err != nil {
		t.Fatal(err)
	}
	for _, page := range append(pages, "adr/README.md") {
		_, text, _ := strings.Cut(read(t, page), "\n\n")
		if !strings.HasPrefix(text, "For ") {
			t.Errorf("%s does not begin with its readers, such as \"For operators\"", page)
		}
	}
}

// The package table of architecture.md names every package, and no other. A name in the first
// column is a path, or a sibling of the row's first package. In the second column it is a package
// below the first one, or beside it.
func TestArchitectureNamesEveryPackage(t *testing.T) {
	t.Parallel()
	packages := map[string]bool{"integration": true} // the packages below it are tests
	for _, suffix := range []string{".go", ".c"} {
		for path := range files(t, suffix) {
			dir, err := filepath.Rel(checkout, filepath.Dir(path))
			if err != nil {
				t.Fatal(err)
			}
			if top, _, _ := strings.Cut(dir, "/"); top != "integration" && top != "contrib" && filepath.Base(dir) != "testdata" {
				packages[dir] = true
			}
		}
	}
	_, table, _ := strings.Cut(read(t, "architecture.md"), "| package | contract |\n")
	rows := regexp.MustCompile("(?m)^\\| (`.*?) \\| (.*) \\|$").FindAllStringSubmatch(table, -1)
	name := regexp.MustCompile("`([a-z][a-z0-9/-]*)`")
	missing := maps.Clone(packages)
	for _, row := range rows {
		first := name.FindStringSubmatch(row[1])[1]
		for _, named := range name.FindAllStringSubmatch(row[1]+row[2], -1) {
			paths := []string{named[1], filepath.Join(first, named[1]), filepath.Join(filepath.Dir(first), named[1])}
			i := slices.IndexFunc(paths, func(path string) bool { return packages[path] })
			if i < 0 {
				t.Errorf("architecture.md names %s in the row of %s, which is no package", named[1], first)
				continue
			}
			delete(missing, paths[i])
		}
	}
	for path := range missing {
		t.Errorf("architecture.md does not name the package %s", path)
	}
}

func TestOverviewsAreShort(t *testing.T) {
	t.Parallel()
	for page, limit := range map[string]int{"../README.md": 135, "architecture.md": 240} {
		if n := strings.Count(read(t, page), "\n"); n > limit {
			t.Errorf("%s has %d lines, want at most %d", page, n, limit)
		}
	}
}

// Pages of results begin with them. How they were obtained follows.
func TestResultsComeFirst(t *testing.T) {
	t.Parallel()
	for _, page := range []string{"performance.md", "reliability.md"} {
		before, _, found := strings.Cut(read(t, page), "\n|")
		if n := strings.Count(before, "\n"); !found || n >= 10 {
			t.Errorf("%s has %d lines before its first table, want less than 10", page, n)
		}
	}
}

// Each decision has one page with the same parts, and a row in the index.
func TestDecisions(t *testing.T) {
	t.Parallel()
	pages, err := filepath.Glob("adr/[0-9]*.md")
	if err != nil || len(pages) == 0 {
		t.Fatalf("no decisions: %v", err)
	}
	index := read(t, "adr/README.md")
	for _, page := range pages {
		content := read(t, page)
		for _, part := range []string{"\nStatus: ", "\n## Context\n", "\n## Decision\n", "\n## Consequences\n"} {
			if !strings.Contains(content, part) {
				t.Errorf("%s lacks %q", page, strings.TrimSpace(part))
			}
		}
		if !strings.Contains(index, "("+filepath.Base(page)+")") {
			t.Errorf("adr/README.md does not list %s", page)
		}
	}
}

// An accepted decision says what it costs and when it can go. One that only sets a rule says so.
func TestDecisionsStateTheirCost(t *testing.T) {
	t.Parallel()
	pages, err := filepath.Glob("adr/[0-9]*.md")
	if err != nil || len(pages) == 0 {
		t.Fatalf("no decisions: %v", err)
	}
	cost := regexp.MustCompile(`^(None: a rule\.|About [\d,]+ lines .*\. Remove .* when .*\.)$`)
	for _, page := range pages {
		content := read(t, page)
		_, section, _ := strings.Cut(content, "\n## Cost\n")
		section, _, _ = strings.Cut(section, "\n## ")
		text := strings.Join(strings.Fields(section), " ")
		if strings.Contains(content, "\nStatus: accepted") && !cost.MatchString(text) {
			t.Errorf("%s has the cost %q; want \"About N lines (packages). Remove it when …\" or \"None: a rule.\"", page, text)
		}
	}
}

func read(t *testing.T, path string) string {
	t.Helper()
	content, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(content)
}

// files returns the content of the checkout's files with a suffix, by path.
func files(t *testing.T, suffix string) map[string]string {
	t.Helper()
	found := map[string]string{}
	err := filepath.WalkDir(checkout, func(path string, e fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if e.IsDir() && path != checkout && (strings.HasPrefix(e.Name(), ".") && e.Name() != ".." || e.Name() == "bin") {
			return filepath.SkipDir
		}
		if e.IsDir() || !strings.HasSuffix(path, suffix) {
			return nil
		}
		content, err := os.ReadFile(path)
		found[path] = string(content)
		return err
	})
	if err != nil {
		t.Fatalf("read the sources: %v", err)
	}
	return found
}

// Prose has at most 100 columns, so that changes of it can be read. Tables, code, links and
// generated values cannot be broken; contrib/bench writes performance.md.
func TestProseIsWrapped(t *testing.T) {
	t.Parallel()
	const most = 100
	for page, content := range files(t, ".md") {
		if filepath.Base(page) == "performance.md" {
			continue
		}
		code := false
		for i, line := range strings.Split(content, "\n") {
			if strings.HasPrefix(strings.TrimSpace(line), "```") {
				code = !code
			}
			indivisible := strings.HasPrefix(line, "|") || strings.HasPrefix(line, "<!--") || strings.Contains(line, "](http") ||
				strings.HasPrefix(strings.TrimSpace(line), "`") || strings.HasPrefix(line, "- default: `")
			if n := utf8.RuneCountInString(line); !code && !indivisible && n > most {
				t.Errorf("%s:%d has %d columns, want at most %d", page, i+1, n, most)
			}
		}
	}
}
