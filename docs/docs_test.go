// Package docs holds the documents; its tests hold them to the source.
package docs

import (
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// checkout is the root of the sources.
const checkout = ".."

// security.md names the test that shows each promise. A test that was renamed or removed leaves a
// promise without one.
func TestSecurityPageNamesTestsThatExist(t *testing.T) {
	t.Parallel()
	tests := map[string]bool{}
	for _, content := range files(t, "_test.go") {
		for _, match := range regexp.MustCompile(`(?m)^func (Test\w+)\(`).FindAllStringSubmatch(content, -1) {
			tests[match[1]] = true
		}
	}
	page, err := os.ReadFile("security.md")
	if err != nil {
		t.Fatal(err)
	}
	names := regexp.MustCompile("`(Test\\w+)`").FindAllStringSubmatch(string(page), -1)
	if len(names) < 30 {
		t.Fatalf("the page names %d tests; each promise has one at least", len(names))
	}
	for _, name := range names {
		if !tests[name[1]] {
			t.Errorf("the page names %s, which does not exist", name[1])
		}
	}
}

// Links between documents lead to files that exist.
func TestLinksLeadToFiles(t *testing.T) {
	t.Parallel()
	link := regexp.MustCompile(`\]\(([^)#:\s]+)(#[^)]*)?\)`)
	for path, content := range files(t, ".md") {
		for _, match := range link.FindAllStringSubmatch(content, -1) {
			if _, err := os.Stat(filepath.Join(filepath.Dir(path), match[1])); err != nil {
				t.Errorf("%s links to %s: %v", path, match[1], err)
			}
		}
	}
}

// files returns the content of the checkout's files whose names end so, by path.
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
