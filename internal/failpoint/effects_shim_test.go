package failpoint

import (
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"berth/internal/testutil"
)

// shimEffects are additional effects of launchers and monitors, through libcontainer and the
// programs of runtimes.
var shimEffects = regexp.MustCompile(`^(libcontainer\.Create|container\.(Start|Run|Destroy)|Runtime\.(Create|Start|Restore|Exec|Delete|Kill)|openLogFile|cgroup\.KillDir|pidfd\.KillTree)$`)

// unmarkedOfShims are functions of launchers and monitors with effects but without failpoints, and
// the reason.
var unmarkedOfShims = map[string]string{
	"shim/launcher.clampOOMScore":     "affects only the launcher",
	"shim/launcher.endChildren":       signal,
	"shim/launcher.chown":             "affects only its own pipes",
	"shim/launcher.nameProcess":       "affects only the launcher",
	"shim/launcher.openOOM":           "a registration that ends with the process",
	"shim/launcher.runInPIDNamespace": "its callers have them",
	"shim/launcher.removeEmptyExecs":  "unused cgroups, which the next cleanup removes",
	"shim/monitor.each_pid":           signal,
	"shim/monitor.write_file":         byCaller,
}

// A function of a launcher or monitor that has effects must have a failpoint. Several effects may
// lie between two failpoints, because integration/crash also kills launchers after each system
// call.
func TestEffectsOfShimsAreMarked(t *testing.T) {
	found := map[string]bool{}
	for _, path := range sources(t, "shim/launcher/*.go") {
		if !strings.HasSuffix(path, "_test.go") {
			checkLauncher(t, path, "shim/launcher", found)
		}
	}
	for _, path := range sources(t, "shim/monitor/*.c") {
		checkMonitor(t, path, "shim/monitor", found)
	}
	for name := range unmarkedOfShims {
		if !found[name] {
			t.Errorf("%s no longer has an effect without a failpoint, remove it from the list", name)
		}
	}
}

func sources(t *testing.T, pattern string) []string {
	t.Helper()
	paths, err := filepath.Glob(filepath.Join("../..", pattern))
	if err != nil || len(paths) == 0 {
		t.Fatalf("%s: %d files, %v", pattern, len(paths), err)
	}
	return paths
}

// effectsInC are calls of the monitor that change something outside the process.
var effectsInC = regexp.MustCompile(`\b(sys_(pwrite|ftruncate|unlinkat|rename|kill)|sys_write\(m->log|write_file|logfile_open|kill_tree)\b`)

// functionInC matches a function's name and body, which begin and end in the first column.
var functionInC = regexp.MustCompile(`(?m)^[a-z][^;{}=]*?(\w+)\([^;{}]*\)\n\{\n((?s:.*?))^\}`)

// checkMonitor reports functions of a C file that have effects but no failpoint.
func checkMonitor(t *testing.T, path, pkg string, found map[string]bool) {
	t.Helper()
	if strings.HasSuffix(path, "/failpoint.c") {
		return // the failpoints themselves
	}
	source, err := os.ReadFile(path)
	testutil.Must(t, err)
	for _, f := range functionInC.FindAllStringSubmatch(string(source), -1) {
		name, body := pkg+"."+f[1], f[2]
		effect := effectsInC.FindString(body)
		if effect == "" || strings.Contains(body, "REACH(") {
			continue
		}
		found[name] = true
		if unmarkedOfShims[name] == "" {
			t.Errorf("%s: %s calls %s and has no failpoint", path, f[1], effect)
		}
	}
}

// checkLauncher reports functions of a Go file that have effects but no failpoint.
func checkLauncher(t *testing.T, path, pkg string, found map[string]bool) {
	t.Helper()
	files := token.NewFileSet()
	file, err := parser.ParseFile(files, path, nil, parser.SkipObjectResolution)
	testutil.Must(t, err)
	for _, decl := range file.Decls {
		f, ok := decl.(*ast.FuncDecl)
		if !ok || f.Body == nil {
			continue
		}
		effect, marked := "", false
		ast.Inspect(f.Body, func(n ast.Node) bool {
			if call, ok := n.(*ast.CallExpr); ok {
				switch name := calledName(call); {
				case name == reach:
					marked = true
				case effects.MatchString(name), shimEffects.MatchString(name), opensToWrite(name, call):
					effect = name
				}
			}
			return true
		})
		name := pkg + "." + f.Name.Name
		if effect == "" || marked {
			continue
		}
		found[name] = true
		if unmarkedOfShims[name] == "" {
			t.Errorf("%s: %s calls %s and has no failpoint", files.Position(f.Pos()), name, effect)
		}
	}
}
