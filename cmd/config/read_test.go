package config

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"berth/internal/testutil"
)

// Every old key must be read with a warning that has the new key.
func TestOldKeysAreReadWithWarning(t *testing.T) {
	t.Parallel()
	c := Default()
	for _, o := range options() {
		if o.Old == "" {
			continue
		}
		t.Run(o.Old, func(t *testing.T) {
			line := assignment(o.Old, o.value(fields(c)))
			l := loading{config: Default()}
			testutil.Must(t, l.add("f.toml", []byte("\n"+line)))
			want := "f.toml: line 2: " + o.Old + " is now " + o.Key
			if len(l.warnings) != 1 || l.warnings[0] != want {
				t.Errorf("warnings %q, want %q", l.warnings, want)
			}
		})
	}
}

func TestFragmentsOverrideFileInOrder(t *testing.T) {
	t.Parallel()
	path := writeFile(t, "root = '/file'\nlog_level = 'warn'\n[handlers.a]\npath = '/a'\n")
	dir := FragmentDir(path)
	testutil.Must(t, os.Mkdir(dir, 0o700))
	for name, content := range map[string]string{
		"10-a.toml": "[log]\nlevel = 'debug'\n[pull]\nstall_timeout = '5s'\n",
		"20-b.toml": "[log]\nlevel = 'error'\n[handlers.b]\npath = '/b'\n",
		"30-c.conf": "not TOML",
	} {
		testutil.Must(t, os.WriteFile(filepath.Join(dir, name), []byte(content), 0o600))
	}
	c, err := load(t, "--config", path)
	testutil.Must(t, err)
	if c.Root != "/file" || c.LogLevel != "error" || c.StallTimeout.String() != "5s" || len(c.Handlers) != 2 {
		t.Errorf("got %+v", c)
	}
	testutil.Must(t, os.WriteFile(filepath.Join(dir, "40-d.toml"), []byte("\n[log]\nlevel = 'loud'\n"), 0o600))
	_, err = load(t, "--config", path)
	if want := filepath.Join(dir, "40-d.toml") + `: line 3: log.level: "loud" is not one of`; err == nil || !strings.Contains(err.Error(), want) {
		t.Errorf("error %v, want %s", err, want)
	}
}

func TestChangesTellReloadFromRestart(t *testing.T) {
	t.Parallel()
	running := Default()
	next, err := Parse("f", []byte("root = '/x'\n[log]\nlevel = 'debug'\n[handlers.x]\npath = '/x'\n"))
	testutil.Must(t, err)
	reload, restart := Changes(running, next)
	if got := strings.Join(reload, " ") + "|" + strings.Join(restart, " "); got != "log.level handlers|root" {
		t.Errorf("changes %s", got)
	}
	merged := Reloaded(running, next)
	if merged.Root != running.Root || merged.LogLevel != "debug" || len(merged.Handlers) != 1 || running.LogLevel != "info" {
		t.Errorf("merged %+v", merged)
	}
}
