package failpoint

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// effects are the calls that change something outside of the process.
var effects = []string{
	"os.Mkdir", "os.MkdirAll", "os.MkdirTemp", "os.Rename", "os.Remove", "os.RemoveAll", "os.WriteFile", "os.Symlink", "os.Link", "os.Chown", "os.StartProcess",
	"unix.Mount", "unix.Unmount", "unix.MoveMount", "unix.Rename", "unix.Renameat2", "unix.Unlink", "unix.Unlinkat", "unix.Mkdir", "unix.Rmdir", "unix.Kill",
	"pidfd.Signal", "cmd.Run", "cmd.Start", "cmd.Output", "cmd.CombinedOutput",
}

// daemonPackages are where the daemon has its effects.
var daemonPackages = []string{
	"checkpoint", "cni", "image", "sandbox", "shim", "internal/cgroup", "internal/killtree", "internal/nri", "internal/rootfs", "internal/userns",
}

// otherPrograms are below these, and are not the daemon.
var otherPrograms = []string{"shim/launcher", "shim/monitor", "shim/logfile", "image/unpack/worker", "image/unpack/confine"}

const (
	byCaller = "its callers have them before and after"
	atStart  = "part of the daemon's start, which does it again"
	launcher = "the launcher's"
	probe    = "a probe at start, in a mount namespace that ends with it"
	signal   = "a signal, to what is looked for and killed again by whoever comes next"
)

// unmarked are the functions with effects that have no failpoint, each with the reason.
var unmarked = map[string]string{
	"checkpoint.OpenDir":                    atStart,
	"checkpoint.removeIfExists":             byCaller,
	"cni.endAll":                            atStart,
	"cni.killIf":                            signal,
	"cni.refuseRouters":                     "in a namespace that nothing pins yet",
	"image/layer.Open":                      atStart,
	"image/layer.makeTree":                  byCaller,
	"image/layer.writeRecord":               byCaller,
	"image/registry.runHelper":              "a credential helper, which only tells something",
	"image/unpack/process.run":              byCaller,
	"internal/cgroup.RemoveIfEmpty":         "the last step of a daemon that ends in good order",
	"internal/cgroup.Signal":                signal,
	"internal/killtree.signal":              signal,
	"internal/nri.awaitProgram":             signal,
	"internal/rootfs.Attach":                launcher,
	"internal/rootfs.ProbeIDMap":            probe,
	"internal/rootfs.bindReadOnly":          launcher,
	"internal/rootfs.clearVolatile":         launcher,
	"internal/rootfs.mountInFDs":            launcher,
	"internal/rootfs.mountOld":              launcher,
	"internal/rootfs.overlayMapped":         launcher,
	"internal/rootfs.overlayOnStack":        launcher,
	"internal/rootfs.probeOverlay":          probe,
	"internal/rootfs/mounttest.Main":        "part of tests",
	"image/registry/registrytest.WriteFile": "part of tests",
	"sandbox/process.openShim":              signal,
	"sandbox/process.KillShim":              byCaller,
	"sandbox/process.RemoveByID":            byCaller,
	"sandbox/process.signal":                byCaller,
	"sandbox/layout.prepareRootPlace":       atStart,
	"shim.Kill":                             signal,
	"shim.awaitLauncher":                    signal,
	"shim.finish":                           signal,
	"shim.kill":                             signal,
	"shim.moveToOwnCgroup":                  "about the daemon's own thread",
	"shim.remove":                           byCaller,
	"shim/ociruntime.cleanBundle":           launcher,
	"shim/ociruntime.runWith":               launcher,
	"shim/payload.fill":                     byCaller,
	"shim/payload.lock":                     atStart,
	"shim/payload.removeOthers":             atStart,
	"shim/record.Unreserve":                 launcher,
	"shim/record.Write":                     byCaller,
}

// Every step of the daemon that has an effect is between failpoints.
func TestEffectsAreMarked(t *testing.T) {
	found := map[string]bool{}
	for _, dir := range daemonPackages {
		err := filepath.WalkDir(filepath.Join("../..", dir), func(path string, entry fs.DirEntry, err error) error {
			below, _ := filepath.Rel("../..", path)
			if err != nil || slices.Contains(otherPrograms, below) {
				return errSkip(err)
			}
			if entry.IsDir() || !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") {
				return nil
			}
			return check(t, path, below, found)
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	for name := range unmarked {
		if !found[name] {
			t.Errorf("%s has no effect without a failpoint (any more): take it off the list", name)
		}
	}
}

func errSkip(err error) error {
	if err != nil {
		return err
	}
	return fs.SkipDir
}

// check reports the functions of a file that have effects and no failpoint.
func check(t *testing.T, path, below string, found map[string]bool) error {
	files := token.NewFileSet()
	file, err := parser.ParseFile(files, path, nil, parser.SkipObjectResolution)
	if err != nil {
		return err
	}
	for _, decl := range file.Decls {
		f, ok := decl.(*ast.FuncDecl)
		if !ok || f.Body == nil {
			continue
		}
		effect, marked := look(f.Body)
		if effect == "" || marked {
			continue
		}
		name := filepath.Dir(below) + "." + f.Name.Name
		found[name] = true
		if unmarked[name] == "" {
			t.Errorf("%s: %s calls %s and has no failpoint", files.Position(f.Pos()), name, effect)
		}
	}
	return nil
}

func look(body ast.Node) (effect string, marked bool) {
	ast.Inspect(body, func(n ast.Node) bool {
		call, ok := n.(*ast.CallExpr)
		if !ok {
			return true
		}
		s, ok := call.Fun.(*ast.SelectorExpr)
		if !ok {
			return true
		}
		x, ok := s.X.(*ast.Ident)
		if !ok {
			return true
		}
		switch name := x.Name + "." + s.Sel.Name; {
		case name == "failpoint.Reach":
			marked = true
		case slices.Contains(effects, name):
			effect = name
		}
		return true
	})
	return effect, marked
}
