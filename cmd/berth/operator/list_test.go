package operator

import (
	"os"
	"slices"
	"strings"
	"testing"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/cmd/berth/client/fakecri"
	"berth/image"
)

func TestListOptions(t *testing.T) {
	c := newConsole(t, &fakecri.Server{Programs: map[string]fakecri.Program{"done": {Exits: []int32{3}}}})
	id := c.detach("containers: [" + app("app") + ", " + app("done") + "]")
	for _, tt := range []struct{ args, want string }{
		{"pods -q --no-trunc", id + "\n"},
		{"pods -q", id[:12] + "\n"},
		{"ps -o go-template={{.name}}", "app\n"},
		{"ps --filter exited=3 -o go-template={{.name}}:{{.exitCode}}", "done:3\n"},
		{"ps -a --filter name=^a --filter namespace=default -o go-template={{.name}}", "app\n"},
		{"ps --filter label=io.kubernetes.pod.name=other -o json", "[]\n"},
		{"pods --filter status=notready -q", ""},
		{"images --filter reference=app -o go-template={{.tags}}", "[" + testImage + "]\n"},
		{"inspect --type pod -f {{.status.metadata.name}} web", "web\n"},
		{"inspect -f {{.status.metadata.name}} default/web/app", "app\n"},
	} {
		if got := c.must(strings.Fields(tt.args)...); got != tt.want {
			t.Errorf("%s: %q, want %q", tt.args, got, tt.want)
		}
	}
	for args, want := range map[string]string{
		"ps --filter frob=1":     "one of the keys exited, id, image",
		"ps --filter name":       "want KEY=VALUE",
		"ps --filter name=(":     "missing closing )",
		"ps -o go-template":      "want table, wide, json, yaml, go-template=TEMPLATE",
		"ps -o go-template={{.x": "unclosed action",
		"ps extra":               `unexpected argument "extra": berth ps takes none`,
		"inspect nothing":        `no container, pod or image "nothing"`,
		"logs web":               "choose one with -c: app, done",
		"rm":                     "name a container or pod: berth rm NAME",
	} {
		if stdout, stderr, code := c.do(strings.Fields(args)...); code != 1 || stdout != "" || !strings.Contains(stderr, want) {
			t.Errorf("%s: %q, %q, %d; want %q", args, stdout, stderr, code, want)
		}
	}
}

// The list says how much of an incomplete image is on the node.
func TestIncompleteImage(t *testing.T) {
	c := newConsole(t, &fakecri.Server{})
	c.Registry = map[string]*runtimeapi.Image{"r.test/b:1": {Id: "sha256:" + strings.Repeat("ab", 32), Size: 5,
		RepoTags: []string{"r.test/b:1"}, Spec: &runtimeapi.ImageSpec{Annotations: map[string]string{image.FetchedAnnotation: "37 %"}}}}
	c.must("pull", "--quiet", "r.test/b:1")
	if got := c.must("images"); !strings.Contains(got, "5 B (37 % fetched)") {
		t.Errorf("%q", got)
	}
}

// A table of images has a line per tag. Other forms have an object per image.
func TestImagesByTag(t *testing.T) {
	c := newConsole(t, &fakecri.Server{})
	c.Registry = map[string]*runtimeapi.Image{"r.test/b:1": {Id: "sha256:" + strings.Repeat("ab", 32),
		RepoTags: []string{"r.test/b:1", "r.test/a:2"}, Size: 5}}
	c.must("pull", "--quiet", "r.test/b:1")
	const lines = "IMAGE        ID             SIZE\nr.test/a:2   abababababab   5 B\nr.test/b:1   abababababab   5 B\n"
	if got := c.must("images"); got != lines {
		t.Errorf("%q", got)
	}
	if got := c.must("images", "-q"); got != "abababababab\n" {
		t.Errorf("%q", got)
	}
	if got := c.must("images", "--filter", "reference=a:2"); strings.Contains(got, "b:1") {
		t.Errorf("%q", got)
	}
	for _, reference := range []string{"a:2$", "^r.test/b"} { // each of the tags, in every format
		if got := c.must("images", "-q", "--filter", "reference="+reference); got != "abababababab\n" {
			t.Errorf("%s: %q", reference, got)
		}
	}
}

func TestTimesOfStatusAreReadable(t *testing.T) {
	t.Parallel()
	for in, want := range map[string]string{
		`{}`: `{}`,
		`{"id":"a", "createdAt":"1795546222829869305","finishedAt":"0", "annotations":{"createdAt":"12"}}`: `{"id":"a","createdAt":"2026-11-24T18:50:22.829869305Z","finishedAt":"0001-01-01T00:00:00Z","annotations":{"createdAt":"12"}}`,
		`{"createdAt":"soon"}`: `{"createdAt":"soon"}`,
	} {
		if got, err := readableTimes([]byte(in)); err != nil || string(got) != want {
			t.Errorf("%s, %v", got, err)
		}
	}
}

// The event of a deletion has no names. Those of earlier events, and of the list at the start,
// complete it.
func TestDeletedObjectsKeepTheirNames(t *testing.T) {
	t.Parallel()
	known := objects{"old": {Namespace: "ns", Pod: "p", Container: "c0"}}
	created := &runtimeapi.ContainerEventResponse{ContainerId: "new", ContainerEventType: runtimeapi.ContainerEventType_CONTAINER_CREATED_EVENT,
		PodSandboxStatus:   &runtimeapi.PodSandboxStatus{Metadata: &runtimeapi.PodSandboxMetadata{Name: "p", Namespace: "ns"}},
		ContainersStatuses: []*runtimeapi.ContainerStatus{{Id: "new", Metadata: &runtimeapi.ContainerMetadata{Name: "c1"}}}}
	known.complete(newEvent(created), created)
	for id, want := range map[string]string{"old": "ns/p/c0", "new": "ns/p/c1", "other": "//"} {
		deleted := &runtimeapi.ContainerEventResponse{ContainerId: id, ContainerEventType: runtimeapi.ContainerEventType_CONTAINER_DELETED_EVENT}
		e := known.complete(newEvent(deleted), deleted)
		if got := e.Namespace + "/" + e.Pod + "/" + e.Container; got != want {
			t.Errorf("%s: %s, want %s", id, got, want)
		}
	}
	if len(known) != 0 {
		t.Errorf("kept %v", known)
	}
}

func TestCompletionNamesObjects(t *testing.T) {
	c := newConsole(t, &fakecri.Server{})
	c.detach("containers: [" + app("app") + "]")
	o := &Connection{Socket: c.socket}
	cmd := topCommand(o)
	cmd.SetContext(t.Context())
	names, _ := o.completeNames(containerNames, podNames)(cmd, []string{"web"}, "we")
	if !slices.Equal(names, []string{"web/app\tcontainer, running"}) {
		t.Errorf("%q", names)
	}
}

func TestSocketFromEnvironment(t *testing.T) {
	t.Setenv("BERTH_SOCKET", "")
	t.Setenv("CONTAINER_RUNTIME_ENDPOINT", "unix:///run/x.sock")
	if got := defaultSocket(); got != "unix:///run/x.sock" {
		t.Error(got)
	}
	t.Setenv("BERTH_SOCKET", "/run/y.sock")
	if got := defaultSocket(); got != "/run/y.sock" {
		t.Error(got)
	}
	if stdout, stderr, code := (&console{t: t, socket: "/none"}).do("ps", "--runtime-endpoint", "unix:///run/none.sock"); code != 1 ||
		!strings.Contains(stderr, "no runtime listens on /run/none.sock") {
		t.Errorf("%q, %q, %d", stdout, stderr, code)
	}
}

func TestIDMap(t *testing.T) {
	t.Parallel()
	path := t.TempDir() + "/map"
	if err := os.WriteFile(path, []byte("         0 1879048192      65536\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	m, err := readIDMap(path)
	if err != nil {
		t.Fatal(err)
	}
	if m.outside(0) != 1879048192 || m.outside(70000) != 1879048192+unmapped || m.inside(1879048193) != 1 || m.inside(0) != unmapped {
		t.Errorf("%+v", m)
	}
}

func TestParseSignal(t *testing.T) {
	t.Parallel()
	for _, name := range []string{"HUP", "SIGHUP", "hup", "1"} {
		if got, err := parseSignal(name); got != 1 || err != nil {
			t.Errorf("%s: %v, %v", name, got, err)
		}
	}
	for _, name := range []string{"", "0", "65", "FROB"} {
		if got, err := parseSignal(name); err == nil {
			t.Errorf("%s: %v", name, got)
		}
	}
}
