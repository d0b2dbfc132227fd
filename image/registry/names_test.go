package registry

import (
	"bytes"
	"log/slog"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"

	"berth/image/registry/registrytest"
	"berth/internal/errdefs"
)

// registriesConf writes a registries.conf and returns its path.
func registriesConf(t *testing.T, content string) string {
	t.Helper()
	return registrytest.WriteFile(t, filepath.Join(t.TempDir(), "registries.conf"), content)
}

func TestShortNames(t *testing.T) {
	t.Parallel()
	const aliases = "[aliases]\n\"tool\" = \"quay.io/team/tool\"\n\"a/b\" = \"r.example:5000/c\"\n"
	for _, tc := range []struct {
		name, conf, image string
		want              []string
	}{
		{"no file", "", "busybox", []string{"docker.io/library/busybox:latest"}},
		{"empty file", "# empty", "busybox:1", []string{"docker.io/library/busybox:1"}},
		{"alias", aliases, "tool", []string{"quay.io/team/tool:latest"}},
		{"alias with tag", aliases, "tool:v1", []string{"quay.io/team/tool:v1"}},
		{"alias with path", aliases, "a/b:v2", []string{"r.example:5000/c:v2"}},
		{"no alias", aliases, "other", []string{"docker.io/library/other:latest"}},
		{"with registry", aliases, "localhost/tool", []string{"localhost/tool:latest"}},
		{"search", `unqualified-search-registries = ["r.example", "docker.io"]`, "web:v1", []string{"r.example/web:v1", "docker.io/library/web:v1"}},
		{"enforcing, one registry", "unqualified-search-registries = [\"r.example\"]\nshort-name-mode = \"enforcing\"", "web", []string{"r.example/web:latest"}},
		{"enforcing, two registries", "unqualified-search-registries = [\"r.example\", \"s.example\"]\nshort-name-mode = \"enforcing\"", "web", nil},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			var sources Sources
			if tc.conf != "" {
				sources.RegistriesConf = registriesConf(t, tc.conf)
			}
			refs, err := newClient(t, Config{Sources: sources}).Candidates(tc.image)
			var got []string
			for _, ref := range refs {
				got = append(got, ref.String())
			}
			if !reflect.DeepEqual(got, tc.want) {
				t.Errorf("got %q, %v; want %q", got, err, tc.want)
			}
			if tc.want == nil && errdefs.Code(err) != codes.FailedPrecondition {
				t.Errorf("error is %v", err)
			}
		})
	}
}

func TestRegistriesConfSources(t *testing.T) {
	t.Parallel()
	path := registriesConf(t, `
[[registry]]
prefix = "r.example/team"
location = "store.example/t"
[[registry.mirror]]
location = "m.example/cache"
insecure = true
[[registry.mirror]]
location = "r.example/copy"
pull-from-mirror = "digest-only"
[[registry]]
prefix = "*.bad.example"
blocked = true
`)
	if err := os.Mkdir(path+".d", 0o755); err != nil {
		t.Fatal(err)
	}
	registrytest.WriteFile(t, path+".d/10.conf", "[[registry]]\nlocation = \"blocked.example\"\nblocked = true\n")
	n, err := loadNames(path)
	if err != nil {
		t.Fatal(err)
	}
	const d = "@" + sha256Of0
	for name, want := range map[string][]source{
		"r.example/team/app:v1": {
			{Reference: Reference{Domain: "m.example", Repository: "cache/app", Tag: "v1"}, insecure: true},
			{Reference: Reference{Domain: "store.example", Repository: "t/app", Tag: "v1"}, home: true}},
		"r.example/team/app" + d: {
			{Reference: Reference{Domain: "m.example", Repository: "cache/app", Digest: sha256Of0}, insecure: true},
			{Reference: Reference{Domain: "r.example", Repository: "copy/app", Digest: sha256Of0}, home: true},
			{Reference: Reference{Domain: "store.example", Repository: "t/app", Digest: sha256Of0}, home: true}},
		"r.example/other:v1":     {{Reference: Reference{Domain: "r.example", Repository: "other", Tag: "v1"}, home: true}},
		"blocked.example/x:v1":   nil,
		"deep.a.bad.example/x:1": nil,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			ref, err := ParseReference(name)
			if err != nil {
				t.Fatal(err)
			}
			got, err := n.sources(ref)
			if !reflect.DeepEqual(got, want) || (err != nil) != (want == nil) {
				t.Errorf("got %+v, %v", got, err)
			}
			if want == nil {
				wantCode(t, err, codes.FailedPrecondition, "blocked by registries.conf")
			}
		})
	}
}

// TestMirrorOfRegistriesConf checks that a mirror serves the image, that the registry serves it if
// the mirror does not, and that the mirror gets no credentials of the registry.
func TestMirrorOfRegistriesConf(t *testing.T) {
	t.Parallel()
	home, mirror := registrytest.New(t), registrytest.New(t)
	putImage(home, "real/app", "v1", []byte("layer"))
	putImage(mirror, "cache/app", "v1", []byte("layer"))
	conf := registriesConf(t, "[[registry]]\nprefix = \"r.example/team\"\nlocation = \""+home.Host()+"/real\"\ninsecure = true\n"+
		"[[registry.mirror]]\nlocation = \""+mirror.Host()+"/cache\"\n")
	cfg := Config{Sources: Sources{RegistriesConf: conf}}
	cred := Credentials{Username: "u", Password: "p"}
	if _, err := resolve(t, cfg, "r.example/team/app:v1", cred); err != nil || home.Count("") != 0 || mirror.Count("cache/app") == 0 {
		t.Fatalf("%v; registry: %q; mirror: %q", err, home.Requests(), mirror.Requests())
	}
	mirror.Close()
	if _, err := resolve(t, cfg, "r.example/team/app:v1", cred); err != nil || home.Count("real/app") == 0 {
		t.Fatalf("%v; registry: %q", err, home.Requests())
	}
	if got := strings.Join(mirror.Headers("Authorization"), ""); got != "" {
		t.Errorf("the mirror got credentials")
	}
}

func TestNewSourcesReplaceOldOnesOrNone(t *testing.T) {
	t.Parallel()
	conf := registriesConf(t, "[aliases]\n\"x\" = \"one.example/x\"\n")
	c := newClient(t, Config{Sources: Sources{RegistriesConf: conf}})
	wantFirst := func(want string) {
		t.Helper()
		if refs, err := c.Candidates("x"); err != nil || refs[0].Domain != want {
			t.Errorf("got %v, %v; want %s", refs, err, want)
		}
	}
	registrytest.WriteFile(t, conf, "[aliases]\n\"x\" = \"two.example/x\"\n")
	apply, err := c.Prepare(Sources{RegistriesConf: conf})
	if err != nil {
		t.Fatal(err)
	}
	wantFirst("one.example")
	apply()
	wantFirst("two.example")
	registrytest.WriteFile(t, conf, "[[registry]]\n")
	for _, bad := range []Sources{{RegistriesConf: conf}, {RegistriesConf: conf + ".missing"}, {AuthFiles: []string{"relative"}}} {
		if _, err := c.Prepare(bad); errdefs.Code(err) != codes.FailedPrecondition {
			t.Errorf("%+v: %v", bad, err)
		}
	}
	wantFirst("two.example")
}

func TestUnknownHostKeysAreLoggedOnce(t *testing.T) {
	t.Parallel()
	var log bytes.Buffer
	dir := hostsDir(t, "r.example", "capabilityes = [\"pull\"]\n")
	c := newClient(t, Config{Sources: Sources{Dirs: []string{dir}}, Log: slog.New(slog.NewTextHandler(&log, nil))})
	for range 2 {
		r, err := c.Open(Reference{Domain: "r.example", Repository: "x", Tag: "v1"}, Credentials{})
		if err != nil {
			t.Fatal(err)
		}
		r.Close()
	}
	if n := strings.Count(log.String(), `line 1: unknown key \"capabilityes\", did you mean \"capabilities\"?`); n != 1 {
		t.Errorf("logged %d times: %s", n, log.String())
	}
}
