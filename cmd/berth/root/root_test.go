package root

import (
	"bytes"
	"strings"
	"testing"

	"berth/cmd/berth/config"
	"berth/internal/version"
)

// run executes a berth command line in this process.
func run(t *testing.T, args ...string) (string, error) {
	t.Helper()
	root := Command()
	var out bytes.Buffer
	root.SetOut(&out)
	root.SetErr(&out)
	root.SetArgs(args)
	err := root.ExecuteContext(t.Context())
	return out.String(), err
}

func TestVersionFlag(t *testing.T) {
	if out, err := run(t, "--version"); err != nil || out != "berth version "+version.Full()+"\n" {
		t.Errorf("%q, %v", out, err)
	}
}

func TestConfigDefaultCommand(t *testing.T) {
	if out, err := run(t, "config", "default"); err != nil || out != config.DefaultTOML() {
		t.Errorf("%v\n%s", err, out)
	}
}

func TestBadOptionsAreRefused(t *testing.T) {
	for args, want := range map[string]string{
		"serve --root=relative":               `--root: "relative" is not an absolute path`,
		"serve --config=/does/not/exist.toml": "read configuration: open /does/not/exist.toml",
		"serve --no-such-flag":                "unknown flag: --no-such-flag",
		"serve argument":                      `unexpected argument "argument": berth serve takes none`,
		"config defalt":                       `unknown command "berth config defalt": did you mean default?`,
	} {
		t.Run(args, func(t *testing.T) {
			if _, err := run(t, strings.Fields(args)...); err == nil || !strings.Contains(err.Error(), want) {
				t.Errorf("error %v, want %q", err, want)
			}
		})
	}
}
