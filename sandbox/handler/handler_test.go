package handler

import (
	"fmt"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	"google.golang.org/grpc/codes"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/internal/errdefs"
	"berth/internal/host"
	"berth/internal/task"
	"berth/internal/testutil"
	"berth/shim/ociruntime"
)

// capable supports user namespaces and ID-mapped mounts but no recursive read-only mounts. plain
// reports only its version. Both require the configured option.
const (
	capable = `#!/bin/sh
[ "$1" = --debug ] && shift || exit 2
case $1 in
--version) echo capable 1.0 ;;
features) echo '{"ociVersionMin": "1.0.0", "ociVersionMax": "1.2.0", "mountOptions": ["ro"], "linux": {"namespaces": ["user"], "mountExtensions": {"idmap": {"enabled": true}}}}' ;;
*) exit 1 ;;
esac
`
	plain = `#!/bin/sh
[ "$1 $2" = "--debug --version" ] && echo plain 1.0
`
)

func write(t *testing.T, path, content string) {
	t.Helper()
	testutil.Must(t, os.WriteFile(path+".new", []byte(content), 0o755))
	testutil.Must(t, os.Rename(path+".new", path))
}

func open(t *testing.T, programs map[string]Config, facts host.Facts) *Set {
	t.Helper()
	log := slog.New(slog.DiscardHandler)
	set, err := Open(t.Context(), Options{BuiltIn: "berth", Programs: programs, Default: "capable", Host: facts, Tasks: task.NewRunner(log, nil), Log: log})
	testutil.Must(t, err)
	return set
}

func TestList(t *testing.T) {
	dir := t.TempDir()
	write(t, filepath.Join(dir, "capable"), capable)
	programs := map[string]Config{"capable": {Path: filepath.Join(dir, "capable"), Args: []string{"--debug"}}, "missing": {Path: filepath.Join(dir, "missing")}, "alias": {}}
	all := open(t, programs, host.Facts{RecursiveReadOnly: true, UserNamespaces: true}).List()
	var names []string
	for _, info := range all {
		names = append(names, info.Name)
		what := info.Name
		switch what {
		case "", "capable": // "" selects the configured default
			if info.Problem != "" || info.RecursiveReadOnly || !info.UserNamespaces || info.Runtime == nil {
				t.Errorf("%q: %+v", what, info)
			}
		case "berth", "alias":
			if info.Problem != "" || !info.RecursiveReadOnly || !info.UserNamespaces || info.Runtime != nil {
				t.Errorf("%q: %+v", what, info)
			}
		case "missing":
			if info.Problem == "" || info.RecursiveReadOnly || info.UserNamespaces {
				t.Errorf("%q: %+v", what, info)
			}
		}
	}
	if want := []string{"", "alias", "berth", "capable", "missing"}; !slices.Equal(names, want) {
		t.Errorf("handlers are %q, want %q", names, want)
	}
	for _, info := range open(t, programs, host.Facts{}).List() {
		if info.RecursiveReadOnly || info.UserNamespaces {
			t.Errorf("%q has more features than the host: %+v", info.Name, info)
		}
	}
}

// A changed binary is probed again. A missing binary fails only its own pods.
func TestRuntime(t *testing.T) {
	path := filepath.Join(t.TempDir(), "capable")
	set := open(t, map[string]Config{"capable": {Path: path, Args: []string{"--debug"}}}, host.Facts{})
	if _, err := set.Find("unknown"); errdefs.Code(err) != codes.NotFound {
		t.Errorf("unknown handler: %v", err)
	}
	builtIn, err := set.Find("berth")
	testutil.Must(t, err)
	if r, err := builtIn.Runtime(t.Context(), "/state", false, true); r != nil || err != nil {
		t.Errorf("libcontainer: %+v, %v", r, err)
	}
	h, err := set.Find("")
	testutil.Must(t, err)
	if _, err := h.Runtime(t.Context(), "/state", false, false); errdefs.Code(err) != codes.FailedPrecondition {
		t.Errorf("missing binary: %v", err)
	}
	write(t, path, plain)
	if r, err := h.Runtime(t.Context(), "/state", true, false); err != nil || r.Path != path || r.Root != "/state" || !r.SystemdCgroup || r.IDMappedMounts || r.IsSandboxed() {
		t.Errorf("plain binary: %+v, %v", r, err)
	}
	if _, err := h.Runtime(t.Context(), "/state", true, true); errdefs.Code(err) != codes.FailedPrecondition {
		t.Errorf("plain binary with a user namespace: %v", err)
	}
	write(t, path, capable)
	if r, err := h.Runtime(t.Context(), "/state", true, true); err != nil || !r.IDMappedMounts {
		t.Errorf("capable binary with a user namespace: %+v, %v", r, err)
	}
}

// berth-task learns whether the node sees the processes of a shim's containers. gVisor's shim says
// neither.
func TestArgumentsOfTask(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "task")
	for help, want := range map[string]string{
		"exit 1":               "--visible",
		"echo wait - included": "",
		"echo wait - included; echo usage - of a container": "--watch",
	} {
		write(t, path, "#!/bin/sh\nshift 2\ncase $1 in help) "+help+" ;; features) echo '{}' ;; esac\n")
		h, err := open(t, map[string]Config{"capable": {Path: path, Task: path}}, host.Facts{}).Find("")
		testutil.Must(t, err)
		r, err := h.Runtime(t.Context(), "/state", false, false)
		testutil.Must(t, err)
		if got := strings.TrimSpace(strings.Join(r.Args, " ")); got != strings.TrimSpace("--shim "+path+" "+want) {
			t.Errorf("%s: arguments %q, want %q", help, got, want)
		}
	}
}

// libcontainer gets no annotations. A binary gets only the two of its pod, and the name of a
// container if it has sandboxes.
func TestAnnotate(t *testing.T) {
	t.Parallel()
	users := map[string]string{"io.kubernetes.cri.sandbox-id": "another's", "run.oci.handler": "krun"}
	spec := &specs.Spec{Annotations: users}
	(*Runtime)(nil).Annotate(spec, "p", nil, app(nil))
	if len(spec.Annotations) != len(users) {
		t.Errorf("for libcontainer: %v", spec.Annotations)
	}
	for _, systemd := range []bool{false, true} {
		t.Run(fmt.Sprintf("systemd %t", systemd), func(t *testing.T) {
			r := &Runtime{Runtime: ociruntime.Runtime{SystemdCgroup: systemd}}
			r.Annotate(spec, "p", nil, nil)
			_, subgroup := spec.Annotations["run.oci.systemd.subgroup"]
			if spec.Annotations["io.kubernetes.cri.sandbox-id"] != "p" || spec.Annotations["io.kubernetes.cri.container-type"] != "sandbox" ||
				spec.Annotations["run.oci.handler"] != "" || subgroup != systemd {
				t.Errorf("annotations %v", spec.Annotations)
			}
		})
	}
}

// app is a container with annotations.
func app(annotations map[string]string) *runtimeapi.ContainerConfig {
	return &runtimeapi.ContainerConfig{Metadata: &runtimeapi.ContainerMetadata{Name: "app"}, Annotations: annotations}
}

// Annotations of a request reach a binary if its configuration lists them. None of them replaces
// berth's own.
func TestAnnotateRequested(t *testing.T) {
	t.Parallel()
	lists := []string{"a.example/x", "io.kubernetes.*", "*/mid*dle", "run.oci.*", "io.containerd.*"}
	pod := &runtimeapi.PodSandboxConfig{Annotations: map[string]string{
		"a.example/x": "pod", "a.example/xy": "1", "io.kubernetes.cri.sandbox-id": "other",
		"io.kubernetes.cri.container-name": "other", "run.oci.systemd.subgroup": "x", "io.kubernetes.pod": "p",
		"io.containerd.runc.v2.group": "other"}}
	container := app(map[string]string{"a.example/x": "container", "b/mid-and-dle": "2", "mid-dle": "3", "b/middle-": "4"})
	for _, test := range []struct {
		name      string
		lists     Annotations
		container *runtimeapi.ContainerConfig
		want      map[string]string // besides berth's own
	}{
		{"both lists", Annotations{lists, lists}, container,
			map[string]string{"a.example/x": "container", "io.kubernetes.pod": "p", "b/mid-and-dle": "2"}},
		{"pod's", Annotations{OfPods: lists}, container, map[string]string{"a.example/x": "pod", "io.kubernetes.pod": "p"}},
		{"container's", Annotations{OfContainers: lists}, container, map[string]string{"a.example/x": "container", "b/mid-and-dle": "2"}},
		{"sandbox", Annotations{lists, lists}, nil, map[string]string{"a.example/x": "pod", "io.kubernetes.pod": "p"}},
		{"no list", Annotations{}, container, map[string]string{}},
	} {
		t.Run(test.name, func(t *testing.T) {
			test.want["io.kubernetes.cri.sandbox-id"] = "p"
			test.want["io.kubernetes.cri.container-type"] = "container"
			if test.container == nil {
				test.want["io.kubernetes.cri.container-type"] = "sandbox"
			}
			spec := &specs.Spec{}
			(&Runtime{Annotations: test.lists}).Annotate(spec, "p", pod, test.container)
			if !maps.Equal(spec.Annotations, test.want) {
				t.Errorf("annotations %v, want %v", spec.Annotations, test.want)
			}
		})
	}
}

func TestAnnotateName(t *testing.T) {
	t.Parallel()
	for _, sandboxed := range []bool{false, true} {
		spec := &specs.Spec{}
		(&Runtime{Runtime: ociruntime.Runtime{Sandboxed: sandboxed}}).Annotate(spec, "p", nil, app(nil))
		want := map[bool]string{true: "app"}[sandboxed]
		if got := spec.Annotations["io.kubernetes.cri.container-name"]; got != want {
			t.Errorf("sandboxed %t: name %q, want %q", sandboxed, got, want)
		}
	}
}

func TestNoRuntimeIsLibcontainer(t *testing.T) {
	t.Parallel()
	var none *Runtime
	if none.Program() != nil || none.IsSandboxed() {
		t.Errorf("%v, %t", none.Program(), none.IsSandboxed())
	}
	if r := (&Runtime{Runtime: ociruntime.Runtime{Path: "/crun", Sandboxed: true}}); r.Program().Path != "/crun" || !r.IsSandboxed() {
		t.Errorf("%+v", r)
	}
}

// Replace adds and removes handlers, and changes the default. It does not probe an unchanged
// program again.
func TestReplace(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "capable")
	write(t, path, capable)
	programs := map[string]Config{"capable": {Path: path, Args: []string{"--debug"}}, "alias": {}}
	set := open(t, programs, host.Facts{UserNamespaces: true})
	before, err := set.Find("")
	testutil.Must(t, err)
	testutil.Must(t, set.Replace(t.Context(), map[string]Config{"capable": programs["capable"], "new": {}}, "new"))
	if same, err := set.Find("capable"); err != nil || same != before {
		t.Errorf("the unchanged handler is another one: %v", err)
	}
	if _, err := set.Find("alias"); errdefs.Code(err) != codes.NotFound {
		t.Errorf("the removed handler: %v", err)
	}
	if h, err := set.Find(""); err != nil || h.name != "new" {
		t.Errorf("the default handler is %v, %v", h, err)
	}
	write(t, path, plain)
	testutil.Must(t, set.Replace(t.Context(), map[string]Config{"capable": {Path: path, Args: []string{"--debug", "x"}}}, ""))
	if h, err := set.Find(""); err != nil || h.name != "berth" {
		t.Errorf("the default handler is %v, %v", h, err)
	}
	if info := set.info("capable"); info.UserNamespaces {
		t.Errorf("the changed program was not probed: %+v", info)
	}
}

// A shim learns the size of the pod. Others get no such annotations.
func TestAnnotateSize(t *testing.T) {
	t.Parallel()
	resources := &runtimeapi.LinuxContainerResources{CpuPeriod: 1, CpuQuota: 2, CpuShares: 3, MemoryLimitInBytes: 4}
	want := map[string]string{"io.kubernetes.cri.sandbox-cpu-period": "1", "io.kubernetes.cri.sandbox-cpu-quota": "2",
		"io.kubernetes.cri.sandbox-cpu-shares": "3", "io.kubernetes.cri.sandbox-memory": "4"}
	for _, shim := range []bool{false, true} {
		spec := &specs.Spec{Annotations: map[string]string{}}
		r := &Runtime{Runtime: ociruntime.Runtime{TaskAPI: shim}}
		r.AnnotateSize(spec, nil)
		if r.AnnotateSize(spec, resources); shim && !maps.Equal(spec.Annotations, want) || !shim && len(spec.Annotations) > 0 {
			t.Errorf("shim %t: annotations %v", shim, spec.Annotations)
		}
	}
	(*Runtime)(nil).AnnotateSize(&specs.Spec{}, resources)
}
