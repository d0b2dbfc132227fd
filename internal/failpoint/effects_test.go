package failpoint

import (
	"cmp"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"berth/internal/testutil"
)

// effects are calls that change something outside the process: functions with their package,
// methods with the last name of their receiver. Opening a file for writing counts as one.
var effects = regexp.MustCompile(`^(` + strings.Join([]string{
	`os\.(Mkdir(All|Temp)?|Create(Temp)?|Rename|Remove(All)?|WriteFile|Symlink|Link|L?[Cc]h(own|mod|times)|Truncate|StartProcess)`,
	`unix\.(Mount|Unmount|MoveMount|MountSetattr|Rename(at2?)?|Unlink(at)?|Mkdir(at)?|Rmdir|Mknod(at)?|Link(at)?|Symlink(at)?)`,
	`unix\.([FL]?[Ss]etxattr|F?[Cc]hmod(at)?|F?[Cc]hown(at)?|Kill|PidfdSendSignal|Bind|F?[Tt]runcate|Fallocate)`,
	`syscall\.(Exec|Kill)`,
	`netlink\.(Conntrack(Delete|Update|Create)|Link|Addr|Route|Neigh|Rule|Qdisc|Filter)(Set|Add|Del|Replace|Mod)\w*`,
	`(pidfd|process|Process)\.(Signal|Kill)`,
	`cmd\.(Run|Start|Output|CombinedOutput)`,
	`jail\.(Run|Start)`,
	`proto\.(Write|Reserve)File`,
	`(mgr|manager)\.(Set|Apply|Destroy|Freeze)`,
	`lib\.(Add|Del|GC)NetworkList`,
	`(host|pod)\.do`, // batches of package links
	`conn\.Flush`,
	`flows\.Execute`, // conntrack
	`\w+\.(Mkdir|Mknod|Symlink|Link|Chown|Chmod|Setxattr|Removexattr|Utimes|RemoveAll(Until)?|Rename)`, // safefs.Dir's
}, `|`) + `)$`)

// packages are the trees of packages in which the daemon has effects.
var packages = []string{"checkpoint", "cni", "cmd", "image", "internal", "sandbox", "server", "shim"}

// leftOut are packages without checks, with the reason.
var leftOut = map[string]string{
	"cmd/berth/check/nodecheck":   "berth check",
	"cmd/berth/copytree":          "berth cp",
	"cmd/berth/debug":             "berth debug",
	"cmd/berth/podrun":            "berth run",
	"image/peers/peerstest":       "tests",
	"image/registry/registrytest": "tests",
	"internal/jail":               "berth-unpack and berth-verify, which only answer, and their start",
	"image/unpack/worker":         "berth-unpack",
	"cmd/berth/client/clienttest": "tests",
	"internal/failpoint":          "these failpoints",
	"internal/safefs":             "the functions are effects of their callers",
	"internal/testutil":           "tests",
	"shim/launcher":               "the launcher: see TestEffectsOfShimsAreMarked",
	"shim/monitor":                "the monitor, in C: see TestEffectsOfShimsAreMarked",
}

const (
	byCaller  = "its callers have failpoints before and after it"
	operator  = "part of berth reset, which the operator repeats after an error"
	ofCommand = "a file of the command's caller, which appears whole under its name or not at all"
	again     = "part of each start, and idempotent"
	lock      = "creates a lock file, which stays"
	detached  = "a detached mount, which ends with its descriptor"
	launcher  = "the launcher's"
	worker    = "in berth-unpack, or its callers have failpoints"
	perCall   = "the temporary directory of a command, which the next command or the pod's removal removes"
	probe     = "a probe at start, in a mount namespace of its own"
	signal    = "a signal, which the next cleanup repeats"
	unpinned  = "in a network namespace that is not pinned yet"
	position  = "the position of a client, without which the client begins anew"
	unnamed   = "in a directory without a name yet; failpoints surround the whole"
	undo      = "undoes after an error, as the next start does after a crash"
)

// unmarked are functions with effects that are not each between two failpoints, with these effects
// and the reason.
var unmarked = map[string]string{
	"checkpoint/record.OpenDir: os.MkdirAll":               again,
	"checkpoint/record.removeIfExists: os.Remove":          byCaller,
	"checkpoint/record.replace: os.Rename .removeIfExists": "the second only after an error of the first",

	"cni.Add: lib.AddNetworkList":              "each plugin is between points, and so is the result",
	"cni.delStale: lib.DelNetworkList":         "each plugin is between points",
	"cni.execInto: unix.Kill":                  byCaller,
	"cni.start: cmd.Start":                     byCaller,
	"cmd/node/hostlocal.lock: os.OpenFile":     lock,
	"cni/berthnet/addresses.Open: os.MkdirAll": again,
	"cni/berthnet/links.open: unix.Bind":       "the daemon's own socket",
	"cni/berthnet/rules.Try: conn.Flush":       unpinned,
	"cni.endAll: os.MkdirAll":                  again,
	"cni.newRuns: os.MkdirAll":                 again,

	"cmd/berth/commands.execDaemon: syscall.Exec": "berth serve, which becomes the daemon",

	"cmd/berthd/daemon.privateDir: os.MkdirAll os.Chmod": again,

	"cmd/berth/images.writeWhole: os.OpenFile os.CreateTemp os.Remove os.Rename": ofCommand,

	"cmd/berth/operator.packDir: os.OpenFile":                                ofCommand,
	"cmd/berth/operator.run: os.Remove":                                      ofCommand,
	"cmd/berth/operator.savePod: os.Mkdir":                                   ofCommand,
	"cmd/berth/operator.spoolStdin: os.CreateTemp os.Remove":                 ofCommand,
	"cmd/berth/operator.writeFile: os.MkdirTemp os.RemoveAll unix.Renameat2": ofCommand,
	"cmd/berth/reset.stopDaemon: pidfd.Signal":                               signal,
	"cmd/berth/reset.systemctl: cmd.Output":                                  operator,
	"cmd/berth/reset.removeMounts: unix.Unmount":                             operator,
	"cmd/berth/reset.removeProfile: os.WriteFile":                            operator,
	"cmd/berth/reset.removeDirs: safefs.RemoveAll safefs.RemoveAll":          operator,
	"cni/berthnet/links.DeleteBridgesOf: netlink.LinkDel":                    operator,
	"cni/berthnet/rules.DeleteTable: conn.Flush":                             operator,

	"image/layer.Remove: parent.RemoveAllUntil":                           byCaller,
	"image/layer.Remove: os.RemoveAll":                                    byCaller,
	"image/erofs.unnamed: unix.Open":                                      "a file without a name, which goes with the process",
	"image/lazy/fill.unnamed: unix.Open":                                  "a file without a name, which goes with the process",
	"image/lazy/fill.load: os.OpenFile os.OpenFile":                       "it creates nothing",
	"image/layer.makeTree: os.Mkdir unix.Chmod":                           unnamed,
	"image/layer.writeRecord: os.WriteFile":                               byCaller,
	"image/layer.open: os.MkdirAll":                                       again,
	"image/layer.show: unix.Renameat2":                                    "layer.synced is before it",
	"image.loadFinished: os.RemoveAll":                                    again,
	"image/blobindex.Open: os.MkdirAll":                                   again,
	"image/partial.Open: os.MkdirAll":                                     again,
	"image/registry.runHelper: cmd.Run":                                   "a credential helper, which only tells something",
	"image/trust.runPlugin: unix.Kill cmd.Start":                          "a verifier plugin, which only answers",
	"image/trust.writeAt: unix.Mkdirat unix.Openat":                       detached,
	"image/trust.run: jail.Run":                                           "berth-verify, which only answers",
	"image/unpack/process.start: jail.Start":                              byCaller,
	"image/unpack.fileAttributes: unix.Fchown unix.Fsetxattr unix.Fchmod": worker,
	"image/unpack.directoryAttributes: dir.Chown dir.Setxattr dir.Chmod":  worker,
	"image/unpack.nodeAttributes: dir.Chown dir.Setxattr":                 worker,
	"image/unpack.setTimesOf: dir.Utimes":                                 worker,
	"image/unpack.directory: dir.Mkdir":                                   worker,
	"image/unpack.directoryAgain: dir.Mkdir":                              worker,
	"image/unpack.link: dir.Link":                                         worker,
	"image/unpack.special: dir.Mknod dir.Symlink":                         worker,
	"image/unpack.clear: dir.RemoveAll":                                   worker,
	"image/unpack.setTime: dir.Utimes":                                    worker,
	"image/unpack.makeWhiteout: dir.Mknod":                                worker,

	"internal/cgroup.Move: os.WriteFile":                                          "it changes nothing",
	"internal/cgroup.Start: cmd.Start":                                            byCaller,
	"internal/cgroup.discard: Process.Kill":                                       signal,
	"internal/cgroup.startByThread: .writeFile cmd.Start .writeFile":              byCaller,
	"internal/cgroup.killRound: .writeFile .writeFile":                            signal,
	"internal/cgroup.signalDir: unix.Kill":                                        signal,
	"internal/cgroup.freezeDir: .writeFile":                                       signal,
	"internal/cgroup.RemoveIfEmpty: unix.Rmdir":                                   "the last step of a daemon that ends in good order",
	"internal/cgroup.Signal: .writeFile":                                          signal,
	"internal/cgroup.destroyOnce: mgr.Destroy":                                    byCaller,
	"internal/cgroup.freeze: .writeFile":                                          signal,
	"internal/cgroup.thaw: .writeFile":                                            signal,
	"internal/cgroup.restore: .writeFile":                                         undo,
	"internal/cgroup.tryMemory: .writeFile":                                       "the limit that is set anyway, right afterwards",
	"internal/cgroup.restoreUnit: mgr.Set":                                        undo,
	"internal/cgroup.writeFile: os.OpenFile":                                      byCaller,
	"internal/host.mountFeatures: unix.MountSetattr":                              detached,
	"internal/lockfile.Acquire: os.OpenFile":                                      lock,
	"internal/lockfile.Wait: os.OpenFile":                                         lock,
	"internal/lockfile.check: os.OpenFile":                                        "makes nothing",
	"internal/netns.createMountpoint: os.OpenFile":                                byCaller,
	"internal/netns.refuseRouters: os.WriteFile":                                  unpinned,
	"internal/netns.setUp: netlink.LinkSetUp":                                     unpinned,
	"internal/nri.awaitProgram: pidfd.Signal":                                     signal,
	"internal/pidfd.KillTree: .Signal unix.Kill":                                  signal,
	"internal/pidfd.Signal: unix.PidfdSendSignal":                                 byCaller,
	"internal/rootfs.Attach: unix.MoveMount":                                      launcher,
	"internal/rootfs.probeIDMap: os.MkdirTemp os.RemoveAll os.Mkdir os.WriteFile": probe,
	"internal/rootfs.bindReadOnly: unix.Mount unix.Mount":                         launcher,
	"internal/rootfs.clearVolatile: os.RemoveAll":                                 launcher,
	"internal/rootfs.cloneMapped: unix.MountSetattr":                              detached,
	"internal/rootfs.cloneReadOnly: unix.MountSetattr":                            detached,
	"internal/rootfs.MakeDir: os.Remove os.Chown":                                 undo, // what happens between them is undone
	"internal/rootfs.mountInFDs: unix.Mount":                                      launcher,
	"internal/rootfs.mountOld: unix.Mount":                                        launcher,
	"internal/rootfs.overlayMapped: unix.Unmount":                                 launcher,
	"internal/rootfs.probeOverlay: unix.Mount":                                    probe,
	"internal/rootfs.probeTmpfs: unix.MountSetattr":                               probe,

	"server/journal.OpenCursors: os.MkdirAll": again,
	"server/journal.Take: os.OpenFile":        position,
	"server/journal.remove: os.Remove":        position,

	"sandbox/lsm.installProfile: cmd.CombinedOutput": "the profile of all containers, which each launch loads if it is missing",
	"sandbox/lsm.set: unix.Setxattr":                 "the label of a file, which the next creation of the container sets again",
	"sandbox/podenv.makeDir: os.Mkdir os.Chmod":      byCaller,
	"sandbox/podenv.giveToRoot: os.Chown":            byCaller,
	"sandbox/runtime.openMonitor: pidfd.Signal":      signal,
	"sandbox/runtime.EndShim: .signal":               byCaller,
	"sandbox/runtime.signal: .signal":                byCaller,
	"sandbox/runtime.signal: pidfd.Signal":           byCaller,

	"server/sessions.Open: os.MkdirAll":                  again,
	"server/sessions.spawn: os.OpenFile os.StartProcess": byCaller,

	"shim/running.Kill: pidfd.Signal":        signal,
	"shim/running.finish: pidfd.Signal":      signal,
	"shim/running.removeGroup: unix.Rmdir":   byCaller,
	"shim/running.endLauncher: pidfd.Signal": signal,

	"cmd/berth/check.checkBy: Process.Signal": signal,

	"server/sessions/process.becomeKillable: os.WriteFile": "about its own process",

	"shim.set: os.WriteFile":           "about a process of its own",
	"shim.awaitLauncher: pidfd.Signal": signal,
	"shim.killUpTo: pidfd.Signal":      signal,
	"shim.retireStopped: pidfd.Signal": signal,
	"shim.remove: os.Remove":           byCaller,
	"shim.removeLaunch: .remove os.RemoveAll .remove .remove .remove .remove .remove": undo,
	"shim/ociruntime.runWith: cmd.Run":                                                launcher,
	"shim/ociruntime.cleanBundle: os.Remove":                                          launcher,
	"shim/ociruntime.useBundle: os.Mkdir":                                             launcher,
	"shim/ociruntime.useRoot: os.Mkdir os.MkdirTemp os.Remove":                        perCall,
	"shim/ociruntime.removeTempDir: unix.Unmount os.RemoveAll":                        perCall,
	"shim/ociruntime.RemoveRoot: os.RemoveAll":                                        byCaller,
	"shim/taskapi.info: cmd.Output":                                                   "a shim, which only tells something",
	"shim/taskapi.openShimLog: os.OpenFile":                                           "it creates nothing",
	"shim/taskapi.Main: os.WriteFile":                                                 ofCommand,
	"shim/taskapi.createTask: os.WriteFile":                                           ofCommand,
	"shim/taskapi.startProcess: os.WriteFile os.WriteFile":                            ofCommand,
	"shim/taskapi.isHung: os.WriteFile":                                               "a mark, which the next command sets again",
	"shim/taskapi.answered: os.Remove":                                                "a mark, which the next command removes again",
	"shim/taskapi.discard: os.OpenFile":                                               "it creates nothing",
	"shim/taskapi.lock: os.OpenFile":                                                  lock,
	"shim/taskapi.endProcess: pidfd.Signal":                                           signal,
	"shim/taskapi.makeTerminal: os.OpenFile":                                          "it creates nothing",
	"shim/payload.installTree: os.RemoveAll":                                          undo,
	"shim/payload.lock: os.MkdirAll":                                                  lock,
	"shim/payload.fill: os.Mkdir os.Chmod os.Chmod":                                   unnamed,
	"shim/payload.write: os.WriteFile":                                                unnamed,
	"shim/proto.UnreserveFile: os.Remove":                                             launcher,
	"shim/proto.ReserveFile: .writeFile":                                              launcher,
	"shim/proto.WriteFile: .writeFile os.Rename":                                      byCaller,
	"shim/proto.writeFile: os.OpenFile":                                               byCaller,
}

// Each effect of the daemon must have a failpoint right before it and right after it, with no other
// effect between the two.
func TestEffectsAreMarked(t *testing.T) {
	found := map[string]bool{}
	for _, dir := range packages {
		err := filepath.WalkDir(filepath.Join("../..", dir), func(path string, entry fs.DirEntry, err error) error {
			if err != nil {
				return err
			}
			below, err := filepath.Rel("../..", path)
			if err != nil {
				return err
			}
			if leftOut[below] != "" {
				return fs.SkipDir
			}
			if entry.IsDir() || !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") {
				return nil
			}
			return check(t, path, filepath.Dir(below), found)
		})
		testutil.Must(t, err)
	}
	for name := range unmarked {
		if !found[name] {
			t.Errorf("%s: the code no longer has this effect, remove the entry from the list", name)
		}
	}
}

// check reports functions of a file with effects that are not between failpoints.
func check(t *testing.T, path, pkg string, found map[string]bool) error {
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
		bare := notBetween(stepsOf(f.Body, callersEffects(pkg)))
		if len(bare) == 0 {
			continue
		}
		name := pkg + "." + f.Name.Name + ": " + strings.Join(bare, " ")
		found[name] = true
		if unmarked[name] == "" {
			t.Errorf("%s: %q: not between two failpoints", files.Position(f.Pos()), name)
		}
	}
	return nil
}

// reach is the call of a failpoint.
const reach = "failpoint.Reach"

// step is a relevant call in a function.
type step struct {
	name string
	at   token.Pos
}

// notBetween returns the effects that share the space between two failpoints, or lack one of these.
func notBetween(steps []step) (bare []string) {
	isPoint := func(i int) bool { return i >= 0 && i < len(steps) && steps[i].name == reach }
	for i, s := range steps {
		if !isPoint(i) && !(isPoint(i-1) && isPoint(i+1)) {
			bare = append(bare, s.name)
		}
	}
	return bare
}

// callersEffects are functions of a package whose callers have failpoints around them. In their
// callers they count as effects.
func callersEffects(pkg string) (names []string) {
	for name, reason := range unmarked {
		if function, ok := strings.CutPrefix(name, pkg+"."); ok && reason == byCaller {
			function, _, _ = strings.Cut(function, ":")
			names = append(names, function)
		}
	}
	return names
}

// stepsOf returns the effects and failpoints of a function in source order. further names functions
// of its own package that count as effects.
func stepsOf(body ast.Node, further []string) (steps []step) {
	ast.Inspect(body, func(n ast.Node) bool {
		call, ok := n.(*ast.CallExpr)
		if !ok {
			return true
		}
		name := calledName(call)
		if name == reach || effects.MatchString(name) || opensToWrite(name, call) || slices.Contains(further, strings.TrimPrefix(name, ".")) {
			steps = append(steps, step{name, call.Pos()})
		}
		return true
	})
	slices.SortFunc(steps, func(a, b step) int { return cmp.Compare(a.at, b.at) })
	return steps
}

// calledName returns the last name of a call's receiver or package, a dot, and the function's name.
func calledName(call *ast.CallExpr) string {
	switch f := call.Fun.(type) {
	case *ast.Ident:
		return "." + f.Name
	case *ast.SelectorExpr:
		return lastName(f.X) + "." + f.Sel.Name
	}
	return ""
}

// lastName returns the name of a package, variable or field, or of the last call.
func lastName(x ast.Expr) string {
	switch x := x.(type) {
	case *ast.Ident:
		return x.Name
	case *ast.SelectorExpr:
		return x.Sel.Name
	}
	return ""
}

var (
	openers    = []string{"os.OpenFile", "unix.Open", "unix.Openat"}
	writeFlags = []string{"O_CREATE", "O_CREAT", "O_WRONLY", "O_RDWR", "O_TRUNC"}
)

// opensToWrite reports whether a call opens a file for writing or creates one.
func opensToWrite(name string, call *ast.CallExpr) (writes bool) {
	if !slices.Contains(openers, name) {
		return false
	}
	for _, arg := range call.Args {
		ast.Inspect(arg, func(n ast.Node) bool {
			s, ok := n.(*ast.SelectorExpr)
			writes = writes || ok && slices.Contains(writeFlags, s.Sel.Name)
			return true
		})
	}
	return writes
}

func TestNotBetweenFindsUnmarkedEffects(t *testing.T) {
	for _, c := range []struct{ body, want string }{
		{`failpoint.Reach("a"); os.Mkdir(x, 0); failpoint.Reach("b")`, ""},
		{`failpoint.Reach("a"); os.Mkdir(x, 0)`, "os.Mkdir"},
		{`os.Mkdir(x, 0); failpoint.Reach("b")`, "os.Mkdir"},
		{`failpoint.Reach("a"); os.Mkdir(x, 0); os.Remove(x); failpoint.Reach("b")`, "os.Mkdir os.Remove"},
		{`failpoint.Reach("a"); if err := d.dir.Setxattr(n, v); err != nil { return }; failpoint.Reach("b"); p.cmd.Start()`, "cmd.Start"},
		{`os.OpenFile(x, os.O_RDONLY, 0)`, ""},
		{`os.OpenFile(x, os.O_CREATE|os.O_EXCL, 0)`, "os.OpenFile"},
		{`n.lib.AddNetworkList(ctx)`, "lib.AddNetworkList"},
		{`removeIfExists(x)`, ".removeIfExists"},
	} {
		body, err := parser.ParseExpr("func() {" + c.body + "}")
		testutil.Must(t, err)
		if got := strings.Join(notBetween(stepsOf(body, []string{"removeIfExists"})), " "); got != c.want {
			t.Errorf("%s: not between two failpoints is %q, want %q", c.body, got, c.want)
		}
	}
}
