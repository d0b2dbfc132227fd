package check

import (
	"errors"
	"strings"
	"testing"

	"github.com/spf13/cobra"

	"berth/cmd/berth/check/nodecheck"
	"berth/cmd/berth/cli"
	"berth/internal/testutil"
)

var findings = []nodecheck.Finding{
	{Subject: "kernel", Level: nodecheck.OK, Found: "6.18"},
	{Subject: "AppArmor", Level: nodecheck.Warning, Found: "off", Fix: "enable it"},
	{Subject: "cgroups", Level: nodecheck.Failure, Found: "none", Fix: "mount them"},
}

func TestPrintFindings(t *testing.T) {
	t.Parallel()
	const problems = "warning  AppArmor: off\n         → enable it\nfailure  cgroups: none\n         → mount them\n"
	const summary = "3 checks: 1 ok, 1 warnings, 1 failures\n"
	for name, test := range map[string]struct {
		show display
		want string
	}{
		"problems": {display{}, problems + summary},
		"all":      {display{verbose: true}, "ok       kernel: 6.18\n" + problems + summary},
	} {
		t.Run(name, func(t *testing.T) {
			var out strings.Builder
			testutil.Must(t, printFindings(&out, findings, test.show))
			if out.String() != test.want {
				t.Errorf("got\n%s\nwant\n%s", out.String(), test.want)
			}
		})
	}
	for _, arg := range []string{"--json", "--output=json"} {
		var show display
		cmd := new(cobra.Command)
		show.addFlags(cmd)
		testutil.Must(t, cmd.ParseFlags([]string{arg}))
		var out strings.Builder
		testutil.Must(t, printFindings(&out, findings, show))
		if !strings.HasPrefix(out.String(), "[") || !strings.Contains(out.String(), `"fix": "mount them"`) {
			t.Errorf("JSON: %s", out.String())
		}
	}
}

func TestExitCodeFollowsSeverity(t *testing.T) {
	t.Parallel()
	for worst, want := range map[nodecheck.Level]int{nodecheck.OK: 0, nodecheck.Warning: 3, nodecheck.Failure: 1} {
		code := 0
		var status *cli.ExitStatus
		if errors.As(statusOf(worst), &status) {
			code = status.Code
		}
		if code != want {
			t.Errorf("%s: exit code %d, want %d", worst, code, want)
		}
	}
}

func TestOutputFlagRefusesOtherFormats(t *testing.T) {
	t.Parallel()
	cmd := Command()
	cmd.SetArgs([]string{"--output", "yaml"})
	cmd.SetOut(new(strings.Builder))
	cmd.SetErr(new(strings.Builder))
	if err := cmd.Execute(); err == nil || !strings.Contains(err.Error(), "want text or json") {
		t.Errorf("error %v", err)
	}
}
