package commands

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"berth/cmd/config"
	"berth/internal/version"
)

// run executes a berth command line in this process.
func run(t *testing.T, args ...string) (string, error) {
	t.Helper()
	root := Root()
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

// config check refuses what a daemon would refuse at its start.
func TestConfigCheckOpensWhatADaemonOpens(t *testing.T) {
	for text, want := range map[string]string{
		"":                                       "the configuration is valid",
		"image = {pinned = ['*x']}":              `pinned image: image reference "*x"`,
		"image = {pause = 'A B'}":                `pinned image: image reference "A B"`,
		"signature = {policy = '/no/such/file'}": "signature policy: ",
		"registry = {registries_conf = '/no/such/file'}":                  "read registries.conf: ",
		"network = {type = 'berth-net', subnets = ['10.83.0.0/33']}":      "options of the built-in network",
		"log_level = 'info'\nlog_format = 'text'\npause_image = ''":       "line 1: log_level is now log.level",
		"pause_image = ''\nlog_level = 'info'\n[image]\npinned = ['x:y']": "line 2: log_level is now",
	} {
		t.Run(text, func(t *testing.T) {
			file := filepath.Join(t.TempDir(), "config.toml")
			if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
				t.Fatal(err)
			}
			out, err := run(t, "config", "check", "--config", file)
			if err != nil {
				out += err.Error()
			}
			if !strings.Contains(out, want) {
				t.Errorf("%s; want %s", out, want)
			}
			if first, second := strings.Index(out, "line 1: "), strings.Index(out, "line 2: "); second >= 0 && first > second {
				t.Errorf("warnings are not in the order of the file:\n%s", out)
			}
		})
	}
}

// The help sorts every visible command into a group, except for cobra's own.
func TestCommandsHaveGroups(t *testing.T) {
	for _, cmd := range Root().Commands() {
		if !cmd.Hidden && cmd.GroupID == "" {
			t.Errorf("berth %s has no group", cmd.Name())
		}
	}
}

// The names that docker and crictl give to subcommands of berth image work, too.
func TestShortcutsOfImageCommands(t *testing.T) {
	for args, want := range map[string]string{
		"rmi":                               "name an image: berth rmi REF…",
		"tag a":                             "name an image and its new name: berth tag REF NAME",
		"save":                              "name an image: berth save REF…",
		"history":                           "name an image: berth history REF",
		"load -s x":                         `socket "x": want unix:///absolute/path`,
		"image ls --runtime-endpoint x":     `socket "x": want`,
		"image pull --runtime-endpoint x y": `socket "x": want`,
		"image rm --runtime-endpoint x y":   `socket "x": want`,
	} {
		t.Run(args, func(t *testing.T) {
			if _, err := run(t, strings.Fields(args)...); err == nil || !strings.Contains(err.Error(), want) {
				t.Errorf("error %v, want %q", err, want)
			}
		})
	}
}

func TestBadOptionsAreRefused(t *testing.T) {
	for args, want := range map[string]string{
		"config defalt": `unknown command "berth config defalt": did you mean default?`,
		"inages":        `unknown command "berth inages": did you mean image or images?`,
		"nope":          `unknown command "berth nope": see berth --help`,
	} {
		t.Run(args, func(t *testing.T) {
			if _, err := run(t, strings.Fields(args)...); err == nil || !strings.Contains(err.Error(), want) {
				t.Errorf("error %v, want %q", err, want)
			}
		})
	}
}
