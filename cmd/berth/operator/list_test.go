package operator

import (
	"os"
	"slices"
	"strings"
	"testing"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/cmd/berth/client/clienttest"
	"berth/image/lazy"
)

func TestListOptions(t *testing.T) {
	c := newConsole(t, &clienttest.Server{Programs: map[string]clienttest.Program{"done": {Exits: []int32{3}}}})
	id := c.detach("containers: [" + app("app") + ", " + app("done") + "]")
	for _, tt := range []struct{ args, want string }{
		{"ps --pods -q --no-trunc", id + "\n"},
		{"ps --pods -q", id[:12] + "\n"},
		{"images -q", "0123456789ab\n"},
	} {
		if got := c.must(strings.Fields(tt.args)...); got != tt.want {
			t.Errorf("%s: %q, want %q", tt.args, got, tt.want)
		}
	}
	for args, want := range map[string]string{
		"ps -o yaml": "want table or json",
		"ps extra":   `unexpected argument "extra": berth ps takes none`,
		"logs web":   "choose one with -c: app, done",
		"rm":         "name a container or pod: berth rm NAME",
	} {
		if stdout, stderr, code := c.do(strings.Fields(args)...); code != 1 || stdout != "" || !strings.Contains(stderr, want) {
			t.Errorf("%s: %q, %q, %d; want %q", args, stdout, stderr, code, want)
		}
	}
}

// The list says how much of an incomplete image is on the node.
func TestIncompleteImage(t *testing.T) {
	c := newConsole(t, &clienttest.Server{})
	c.Registry = map[string]*runtimeapi.Image{"r.test/b:1": {Id: "sha256:" + strings.Repeat("ab", 32), Size: 5,
		RepoTags: []string{"r.test/b:1"}, Spec: &runtimeapi.ImageSpec{Annotations: map[string]string{lazy.FetchedAnnotation: "37 %"}}}}
	c.must("pull", "--quiet", "r.test/b:1")
	if got := c.must("images"); !strings.Contains(got, "5 B (37 % fetched)") {
		t.Errorf("%q", got)
	}
}

// A table of images has a line per tag. Other forms have an object per image.
func TestImagesByTag(t *testing.T) {
	c := newConsole(t, &clienttest.Server{})
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
}

func TestCompletionNamesObjects(t *testing.T) {
	c := newConsole(t, &clienttest.Server{})
	c.detach("containers: [" + app("app") + "]")
	o := &Connection{Socket: c.socket}
	cmd := rmCommand(o)
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
