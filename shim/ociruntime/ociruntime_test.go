package ociruntime

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"berth/internal/testutil"
)

// program writes a runtime that is a shell script; $cmd is its command, "$@" all of its
// arguments.
func program(t *testing.T, script string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "runtime")
	text := `#!/bin/sh
for cmd; do case $cmd in create|start|exec|kill|delete|state|features|help|checkpoint|ps|--version) break;; esac; done
` + script
	if err := os.WriteFile(path, []byte(text), 0o755); err != nil {
		t.Fatal(err)
	}
	return path
}

func TestProbe(t *testing.T) {
	for _, tt := range []struct {
		name, script string
		want         Capabilities
	}{
		{"crun 1.8", `case $cmd in
			--version) echo "crun version 1.8.1"; echo spec: 1.0.0;;
			exec) echo "      --cgroup=PATH          sub-cgroup in the container";;
			*) echo "unknown command $cmd" >&2; exit 1;; esac`,
			Capabilities{Version: "crun version 1.8.1", SubCgroups: true}},
		{"runc 1.2", `case $cmd in
			--version) echo "runc version 1.2.0";;
			help) echo "No help topic for 'wait'" >&2; exit 3;;
			exec) echo "   --cgroup value";;
			features) echo '{"ociVersionMin":"1.0.0","mountOptions":["ro","rro"],
				"linux":{"namespaces":["user"],"mountExtensions":{"idmap":{"enabled":true}}}}';; esac`,
			Capabilities{Version: "runc version 1.2.0", SubCgroups: true, Features: true, RecursiveReadOnly: true, UserNamespaces: true}},
		{"runsc", `case $cmd in
			--version) echo "runsc version release-1";;
			help) echo "wait [flags] <container id>";;
			exec) echo "exec [command options]";;
			features) echo '{"mountOptions":["ro"],"linux":{"namespaces":["user"],"mountExtensions":{"idmap":{"enabled":true}}}}';; esac`,
			Capabilities{Version: "runsc version release-1", Sandboxed: true, Features: true}},
		{"a shim", `case $cmd in help) echo "wait - included"; echo "usage - of a container";; features) echo '{}';; esac`,
			Capabilities{Sandboxed: true, Measures: true, Features: true}},
		{"no idmap", `case $cmd in
			features) echo '{"mountOptions":[],"linux":{"namespaces":["user"],"mountExtensions":{"idmap":{}}}}';; esac`,
			Capabilities{Features: true}},
	} {
		got, err := Probe(t.Context(), program(t, tt.script), nil)
		if err != nil || got != tt.want {
			t.Errorf("%s: %+v, %v, want %+v", tt.name, got, err, tt.want)
		}
	}
}

func TestReadBundle(t *testing.T) {
	dir := t.TempDir()
	if _, err := ReadBundle(dir); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("no bundle: %v", err)
	}
	ids := []specs.LinuxIDMapping{{ContainerID: 0, HostID: 65536, Size: 10}}
	data, err := json.Marshal(specs.Spec{Linux: &specs.Linux{CgroupsPath: "/a/b", UIDMappings: ids, GIDMappings: ids}})
	if err == nil {
		err = os.WriteFile(filepath.Join(dir, ConfigFile), data, 0o600)
	}
	if err != nil {
		t.Fatal(err)
	}
	b, err := ReadBundle(dir)
	if err != nil || b.CgroupsPath != "/a/b" || !slices.Equal(b.UIDMappings, ids) || !slices.Equal(b.GIDMappings, ids) {
		t.Errorf("got %+v, %v", b, err)
	}
	if err := os.WriteFile(filepath.Join(dir, ConfigFile), data[:9], 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := ReadBundle(dir); err == nil {
		t.Error("half a spec is no error")
	}
}

func TestProbeRefuses(t *testing.T) {
	if _, err := Probe(t.Context(), "/no/such/runtime", nil); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("a missing program: %v", err)
	}
	for name, script := range map[string]string{
		"fails":        "echo no reason >&2; exit 1",
		"no document":  `[ "$cmd" != features ] || echo '<html>'`,
		"wrong values": `[ "$cmd" != features ] || echo '{"mountOptions": 5}'`,
	} {
		if got, err := Probe(t.Context(), program(t, script), nil); err == nil {
			t.Errorf("%s: %+v", name, got)
		}
	}
}

// FuzzFeatures checks that any output of a runtime is accepted or refused.
func FuzzFeatures(f *testing.F) {
	f.Add([]byte(`{"mountOptions":["rro"],"linux":{"namespaces":["user"],"mountExtensions":{"idmap":{"enabled":true}}}}`))
	f.Add([]byte(`{"linux":null}`))
	f.Fuzz(func(t *testing.T, document []byte) {
		var c Capabilities
		if err := c.parse(document); err != nil && (c.Features || c.RecursiveReadOnly || c.UserNamespaces) {
			t.Errorf("refused, and yet %+v", c)
		}
	})
}

func TestCommandLine(t *testing.T) {
	out := filepath.Join(t.TempDir(), "args")
	r := &Runtime{Path: program(t, `echo "$@" >>`+out), Args: []string{"--debug"}, Root: "/root", SystemdCgroup: true}
	ctx := t.Context()
	for _, err := range []error{r.Start(ctx, "id", t.TempDir(), IO{}), r.Kill(ctx, "id", unix.SIGTERM), r.Delete(ctx, "id")} {
		if err != nil {
			t.Fatal(err)
		}
	}
	got, err := os.ReadFile(out)
	const global = "--debug --root /root --systemd-cgroup "
	if want := global + "start id\n" + global + "kill id 15\n" + global + "delete --force id\n"; string(got) != want || err != nil {
		t.Errorf("calls are\n%s, want\n%s", got, want)
	}
}

func TestCreate(t *testing.T) {
	bundle := t.TempDir()
	r := &Runtime{Path: program(t, `
		while [ $# -gt 0 ]; do case $1 in --pid-file) pid=$2;; --log) log=$2;; esac; shift; done
		echo "into the container's log"
		if [ -e `+bundle+`/fail ]; then
			echo '{"level":"warning","msg":"odd"}' >>$log; echo '{"level":"error","msg":"it is broken"}' >>$log; exit 1
		fi
		echo 4711 >$pid`)}
	if pid, err := r.Create(t.Context(), "id", bundle, IO{}); pid != 4711 || err != nil {
		t.Errorf("Create = %d, %v", pid, err)
	}
	if err := os.WriteFile(filepath.Join(bundle, "fail"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	_, err := r.Create(t.Context(), "id", bundle, IO{})
	var said *Error
	if !errors.As(err, &said) || said.Message != "it is broken" || !strings.Contains(err.Error(), "runtime create") {
		t.Errorf("Create = %v", err)
	}
	if left, err := os.ReadDir(bundle); len(left) != 1 || err != nil {
		t.Errorf("left: %v, %v", left, err)
	}
}

// A stack trace that is longer than a message does not hide the error.
func TestStackTraceIsCut(t *testing.T) {
	trace := strings.Repeat("x", 2*maxMessage)
	r := &Runtime{Path: program(t, `
		while [ $# -gt 0 ]; do case $1 in --log) log=$2;; esac; shift; done
		[ "$cmd" != create ] || { printf %s '{"level":"error","msg":"no descriptor:\ngoroutine 1\n`+trace+`"}' >$log; exit 1; }
		printf 'no descriptor:\ngoroutine 1\n`+trace+`' >&2; exit 1`)}
	_, createErr := r.Create(t.Context(), "id", t.TempDir(), IO{})
	for command, err := range map[string]error{"create": createErr, "delete": r.Delete(t.Context(), "id")} {
		if want := "runtime " + command + ": no descriptor:"; err == nil || err.Error() != want {
			t.Errorf("%.300v, want %s", err, want)
		}
	}
}

// crun bind mounts its program in its temporary directory for a moment.
func TestKilledCommandLeavesNoMount(t *testing.T) {
	testutil.NeedRoot(t)
	bundle := t.TempDir()
	r := &Runtime{Path: program(t, `
		at=$_LIBCONTAINER_STATEDIR/crun.XYZ
		touch $at && mount --bind "$0" $at && kill -9 $$`)}
	_, createErr := r.Create(t.Context(), "id", bundle, IO{})
	for command, err := range map[string]error{"create": createErr, "start": r.Start(t.Context(), "id", bundle, IO{})} {
		if err == nil || !strings.Contains(err.Error(), "killed") {
			t.Errorf("%s = %v, want killed", command, err)
		}
	}
	if left, err := os.ReadDir(bundle); len(left) != 0 || err != nil {
		t.Errorf("left: %v, %v", left, err)
	}
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil || strings.Contains(string(mounts), bundle) {
		t.Errorf("left mounted: %s, %v", mounts, err)
	}
}

// The daemon's commands leave nothing either, in and beside the runtime's state. The next one also
// removes what a killed daemon left.
func TestKilledCommandOfDaemonLeavesNoMount(t *testing.T) {
	testutil.NeedRoot(t)
	root := filepath.Join(t.TempDir(), "root")
	r := &Runtime{Root: root, Path: program(t, `
		at=$_LIBCONTAINER_STATEDIR/crun.XYZ
		touch $at && mount --bind "$0" $at && kill -9 $$`)}
	unmounted := func(dir string) {
		t.Helper()
		mounts, err := os.ReadFile("/proc/self/mountinfo")
		if err != nil || strings.Contains(string(mounts), dir) || strings.Contains(string(mounts), callPrefix) {
			t.Errorf("left mounted: %s, %v", mounts, err)
		}
	}
	for _, exists := range []bool{false, true} {
		if exists {
			stale := filepath.Join(root, callPrefix+"4194305-2")
			testutil.Must(t, os.MkdirAll(stale, 0o700))
			file := filepath.Join(stale, "crun.ABC")
			testutil.Must(t, os.WriteFile(file, nil, 0o600))
			testutil.Must(t, unix.Mount(r.Path, file, "", unix.MS_BIND, ""))
		}
		_, probeErr := Probe(t.Context(), r.Path, nil)
		for command, err := range map[string]error{"delete": r.Delete(t.Context(), "id"),
			"kill": r.Kill(t.Context(), "id", unix.SIGKILL), "version": probeErr} {
			if err == nil || !strings.Contains(err.Error(), "killed") {
				t.Errorf("%s = %v, want killed", command, err)
			}
		}
		unmounted(root)
		if left, err := os.ReadDir(root); len(left) != 0 || exists != (err == nil) {
			t.Errorf("left: %v, %v", left, err)
		}
	}
	// The daemon was killed, and no command follows.
	file := filepath.Join(root, callPrefix+"1-3", "crun.ABC")
	testutil.Must(t, os.Mkdir(filepath.Dir(file), 0o700))
	testutil.Must(t, os.WriteFile(file, nil, 0o600))
	testutil.Must(t, unix.Mount(r.Path, file, "", unix.MS_BIND, ""))
	testutil.Must(t, RemoveRoot(root))
	unmounted(root)
	testutil.Must(t, RemoveRoot(root))
}

// A signal to a process that has ended is no error. Any other failure is.
func TestKill(t *testing.T) {
	for status, wantErr := range map[string]bool{"stopped": false, "running": true, "": true} {
		r := &Runtime{Path: program(t, `[ "$cmd" = state ] || { echo "no such process" >&2; exit 1; }; echo '{"status": "`+status+`"}'`)}
		if err := r.Kill(t.Context(), "id", unix.SIGKILL); (err != nil) != wantErr {
			t.Errorf("%q: %v", status, err)
		}
	}
}

// berth-task is found beside the running program after it has moved.
func TestMovedProgram(t *testing.T) {
	self, err := os.Executable()
	testutil.Must(t, err)
	for _, tc := range []struct {
		r    Runtime
		want string
	}{
		{Runtime{Path: "/no/such/crun"}, "/no/such/crun"},
		{Runtime{Path: "/bin/sh", TaskAPI: true}, "/bin/sh"},
		{Runtime{Path: "/no/such/berth-task", TaskAPI: true}, filepath.Join(filepath.Dir(self), "berth-task")},
	} {
		if got := tc.r.program(); got != tc.want {
			t.Errorf("%+v is called at %s, want %s", tc.r, got, tc.want)
		}
	}
}

// A program that hangs is killed when its context ends.
func TestHangingRuntimeIsKilled(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	path := filepath.Join(t.TempDir(), "up")
	done := make(chan error)
	r := &Runtime{Path: program(t, "echo up >"+path+"; exec sleep 1000")}
	go func() { done <- r.Delete(ctx, "id") }()
	for _, err := os.Stat(path); err != nil; _, err = os.Stat(path) {
		if t.Context().Err() != nil {
			t.Fatal("it does not start")
		}
	}
	cancel()
	if err := <-done; err == nil {
		t.Error("no error")
	}
}

// The sandbox is saved below a directory that the command gets as a descriptor. A failed command is
// followed by a signal, which waits for the sandbox.
func TestCheckpoint(t *testing.T) {
	out := filepath.Join(t.TempDir(), "args")
	dir, err := os.Open(t.TempDir())
	testutil.Must(t, err)
	defer dir.Close()
	r := &Runtime{Root: t.TempDir(), Path: program(t, `echo "$@" >>`+out+`
		case "$*" in *checkpoint*) mkdir /proc/self/fd/3/images && test ! -e /fail;; esac`)}
	testutil.Must(t, r.Checkpoint(t.Context(), "pod", dir, "images"))
	if _, err := os.Stat(filepath.Join(dir.Name(), "images")); err != nil {
		t.Error(err)
	}
	err = r.Checkpoint(t.Context(), "pod", dir, "images") // the directory exists
	var said *Error
	if !errors.As(err, &said) {
		t.Errorf("Checkpoint = %v", err)
	}
	got, err := os.ReadFile(out)
	global := "--root " + r.Root
	save := global + " checkpoint --leave-running --compression none --image-path /proc/self/fd/3/images pod\n"
	if want := save + save + global + " kill pod 28\n"; string(got) != want || err != nil {
		t.Errorf("calls are\n%s, want\n%s", got, want)
	}
}

func TestHasProcesses(t *testing.T) {
	for document, want := range map[string]string{"[1, 7]": "true", "[]": "false", "PID": "error", "": "error"} {
		got, err := (&Runtime{Path: program(t, "echo '"+document+"'")}).HasProcesses(t.Context(), "pod")
		text := fmt.Sprint(got)
		if err != nil {
			text = "error"
		}
		if text != want {
			t.Errorf("%q: %v, %v", document, got, err)
		}
	}
}

func TestContainers(t *testing.T) {
	r := &Runtime{Root: t.TempDir()}
	for _, name := range []string{"pod_sandbox:pod.state", "pod_sandbox:pod.lock", "app_sandbox:pod.state", "berth-call-1-2"} {
		testutil.Must(t, os.WriteFile(filepath.Join(r.Root, name), nil, 0o600))
	}
	if got, err := r.Containers(); err != nil || !slices.Equal(got, []string{"app", "pod"}) {
		t.Errorf("%q, %v", got, err)
	}
}

func TestHas(t *testing.T) {
	r := &Runtime{Root: t.TempDir()}
	for _, name := range []string{"abc", "def_sandbox:abc.state"} {
		if err := os.Mkdir(filepath.Join(r.Root, name), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	for id, want := range map[string]bool{"abc": true, "def": true, "ab": false, "de": false} {
		if r.Has(id) != want {
			t.Errorf("Has(%s) is %v", id, !want)
		}
	}
}
