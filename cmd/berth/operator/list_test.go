package operator

import (
	"os"
	"slices"
	"strings"
	"testing"

	"berth/cmd/berth/client/fakecri"
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

func TestCompletionNamesObjects(t *testing.T) {
	c := newConsole(t, &fakecri.Server{})
	c.detach("containers: [" + app("app") + "]")
	o := &connection{socket: c.socket}
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
