package nodecheck

import (
	"os"
	"path/filepath"
	"testing"

	"berth/cmd/config"
	"berth/internal/host"
)

// runtimeProgram writes a runtime that answers as the script says. $1 is the command.
func runtimeProgram(t *testing.T, script string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "runtime")
	if err := os.WriteFile(path, []byte("#!/bin/sh\ncase $1 in\n"+script+"\nesac\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	return path
}

const (
	oldCrun = `--version) echo crun version 1.8.1;; features) exit 1;;`
	newCrun = `--version) echo crun version 1.21;;
features) echo '{"mountOptions":["rro"],"linux":{"namespaces":["user"],"mountExtensions":{"idmap":{"enabled":true}}}}';;`
)

func TestHandlers(t *testing.T) {
	hybrid := map[string]string{"/sys/fs/cgroup/unified/cgroup.controllers": "hugetlb misc\n"}
	for _, tc := range []struct {
		name      string
		path      string
		isDefault bool
		facts     host.Facts
		files     map[string]string
		level     Level
		found     string
	}{
		{"missing", "/no/such/runtime", false, host.Facts{}, nil, Warning, "no such file"},
		{"the default is missing", "/no/such/runtime", true, host.Facts{}, nil, Failure, "no such file"},
		{"no runtime", "/bin/false", false, host.Facts{}, nil, Warning, "--version"},
		{"old", runtimeProgram(t, oldCrun), false, host.Facts{}, nil, Warning, "(crun version 1.8.1) has no recursive read-only mounts, no user namespaces"},
		{"new", runtimeProgram(t, newCrun), false, host.Facts{}, nil, OK, "crun version 1.21"},
		{"crun on cgroups of both versions", runtimeProgram(t, newCrun), false, host.Facts{}, hybrid, Warning, "version 2 has hugetlb misc"},
		{"the default is crun on both", runtimeProgram(t, newCrun), true, host.Facts{}, hybrid, Failure, "version 2 has hugetlb misc"},
		{"both are mounted, version 1 has all", runtimeProgram(t, newCrun), false, host.Facts{},
			map[string]string{"/sys/fs/cgroup/unified/cgroup.controllers": "\n"}, OK, "crun"},
		{"version 2", runtimeProgram(t, newCrun), false, host.Facts{CgroupV2: true}, hybrid, OK, "crun"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			n := machine(t, tc.facts, tc.files)
			n.Config.Handlers = map[string]config.Handler{"test": {Path: tc.path}, "alias": {}}
			if tc.isDefault {
				n.Config.DefaultHandler = "test"
			}
			findings := checkHandlers(t.Context(), n)
			if f := find(t, findings, "handler test", tc.found); f.Level != tc.level {
				t.Errorf("%s is %s, want %s: %s", f.Subject, f.Level, tc.level, f.Found)
			}
			if len(findings) != 1 {
				t.Errorf("an alias of the built-in one needs no finding: %v", findings)
			}
		})
	}
}
