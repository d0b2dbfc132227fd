package daemon

import (
	"bytes"
	"strings"
	"testing"

	"berth/internal/version"
)

// program runs berthd with arguments that end before it serves.
func program(t *testing.T, args ...string) (code int, stdout, stderr string) {
	t.Helper()
	var out, errs bytes.Buffer
	code = Main(t.Context(), args, &out, &errs)
	return code, out.String(), errs.String()
}

func TestVersionAndHelp(t *testing.T) {
	if code, out, _ := program(t, "--version"); code != 0 || out != "berthd version "+version.Full()+"\n" {
		t.Errorf("%d, %q", code, out)
	}
	// The help of a flag is one sentence. The complete text is in config default and
	// docs/config.md.
	code, out, _ := program(t, "-h")
	if code != 0 || strings.Contains(out, "cloud's metadata") ||
		!strings.Contains(out, "--cgroup-driver auto|cgroupfs|systemd   Driver that creates cgroups (") {
		t.Errorf("%d, %s", code, out)
	}
}

func TestBadArgumentsAreRefused(t *testing.T) {
	for args, want := range map[string]string{
		"--root=relative":               `berthd: --root: "relative" is not an absolute path`,
		"--config=/does/not/exist.toml": "berthd: read configuration: open /does/not/exist.toml",
		"--no-such-flag":                "berthd: unknown flag: --no-such-flag: see berthd --help\n",
		"argument":                      `berthd: unexpected argument "argument": berthd takes none`,
	} {
		t.Run(args, func(t *testing.T) {
			if code, out, errs := program(t, args); code != 1 || out != "" || !strings.HasPrefix(errs, want) {
				t.Errorf("%d, %q, %q", code, out, errs)
			}
		})
	}
}
