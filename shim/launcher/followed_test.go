package launcher

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// go.mod names the versions that docs/runc.md lists as read, and the listed functions still exist.
func TestFollowedVersions(t *testing.T) {
	page, err := os.ReadFile("../../docs/runc.md")
	if err != nil {
		t.Fatal(err)
	}
	goMod, err := os.ReadFile("../../go.mod")
	if err != nil {
		t.Fatal(err)
	}
	dirs := map[string]string{} // by the last element of the module's name
	for _, row := range regexp.MustCompile("(?m)^\\| `(github\\.com/[^`]+)` \\| (v\\S+) \\|$").FindAllStringSubmatch(string(page), -1) {
		module, read := row[1], row[2]
		used := regexp.MustCompile(`(?m)^\s*` + regexp.QuoteMeta(module) + ` (v\S+)`).FindStringSubmatch(string(goMod))
		if used == nil || used[1] != read {
			t.Errorf("go.mod names %v, docs/runc.md says that %s %s was read: follow that page", used, module, read)
		}
		dirs[filepath.Base(module)] = moduleDir(t, module)
	}
	if len(dirs) < 3 {
		t.Fatalf("docs/runc.md names the modules %v", dirs)
	}
	rows := regexp.MustCompile("(?m)^\\| ([a-z-]+) \\| `([^`]+)` \\| `([^`]+)` \\|").FindAllStringSubmatch(string(page), -1)
	if len(rows) < 15 {
		t.Errorf("docs/runc.md has %d rows of what to read", len(rows))
	}
	for _, row := range rows {
		dir, known := dirs[row[1]]
		if !known {
			t.Errorf("%s is none of the modules", row[1])
			continue
		}
		source, err := os.ReadFile(filepath.Join(dir, row[2]))
		if err != nil {
			t.Error(err)
		} else if !strings.Contains(string(source), row[3]) {
			t.Errorf("%s of %s has no %q any more: read what has become of it", row[2], row[1], row[3])
		}
	}
}

// moduleDir returns where the module's source is.
func moduleDir(t *testing.T, module string) string {
	t.Helper()
	out, err := exec.Command("go", "list", "-m", "-f", "{{.Dir}}", module).Output()
	if err != nil || len(strings.TrimSpace(string(out))) == 0 {
		t.Skipf("the source of %s is not here: %v", module, err)
	}
	return strings.TrimSpace(string(out))
}
