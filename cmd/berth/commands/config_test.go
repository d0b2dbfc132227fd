package commands

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"berth/internal/testutil"
)

// writeConfig writes a configuration file and returns its path.
func writeConfig(t *testing.T, content string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "config.toml")
	testutil.Must(t, os.WriteFile(path, []byte(content), 0o600))
	return path
}

func TestShowAndCheckCommands(t *testing.T) {
	t.Parallel()
	path := writeConfig(t, "max_execs = 7\n[log]\nlevel = 'warn'\n")
	wrong := configCommand()
	wrong.SetArgs([]string{"check", "--config", path, "--log-format=xml"})
	wrong.SetOut(new(bytes.Buffer))
	wrong.SetErr(new(bytes.Buffer))
	if err := wrong.Execute(); err == nil {
		t.Error("a wrong flag is accepted")
	}
	for _, tc := range []struct{ args, want string }{
		{"show", "[log]\nlevel = 'warn'\n\n[exec]\nmax = 7\n"},
		{"check", "the configuration is valid\n"},
	} {
		var out, errs bytes.Buffer
		cmd := configCommand()
		cmd.SetArgs([]string{tc.args, "--config", path})
		cmd.SetOut(&out)
		cmd.SetErr(&errs)
		testutil.Must(t, cmd.Execute())
		if out.String() != tc.want {
			t.Errorf("%s prints %q, want %q", tc.args, out.String(), tc.want)
		}
		if tc.args == "check" && !strings.Contains(errs.String(), "max_execs is now exec.max") {
			t.Errorf("warnings %q", errs.String())
		}
	}
}
