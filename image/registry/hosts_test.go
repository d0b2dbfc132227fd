package registry

import (
	"fmt"
	"net/http"
	"net/netip"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/net/http/httpguts"
	"google.golang.org/grpc/codes"

	"berth/image/registry/registrytest"
	"berth/internal/errdefs"
)

const everyOption = `
server = "https://registry.example.com"
ca = "ca.pem"
unknown_option_of_a_newer_containerd = 1

[header]
  x-team = "infra"

[host."http://z-first:8080"]
  capabilities = ["pull"]

[host."https://mirror.example.com/team"]
  capabilities = ["pull", "Resolve"]
  ca = ["/etc/ca-1.pem", "ca-2.pem"]
  client = [["cert.pem", "/keys/key.pem"], ["both.pem", ""], "single.pem"]
  skip_verify = false
  dial_timeout = "3s"
  [host."https://mirror.example.com/team".header]
    x-one = "1"
    x-many = ["2", "3"]

[host."https://odd.example.com/v2/prefix"]
  override_path = true
  client = "client.pem"

[host."https://root.example.com"]
  override_path = true
  skip_verify = true
  redirect_to = ["127.0.0.0/8", "fe80::1"]

[host."bare.example.com:5000/a/../b/v2/"]

[host."https://header-only.example.com".header]
  x = "y"
`

func TestParseHosts(t *testing.T) {
	yes, no := true, false
	want := []hostConfig{
		{Scheme: "http", Host: "z-first:8080", Path: "/v2", Caps: capPull},
		{Scheme: "https", Host: "mirror.example.com", Path: "/team/v2", Caps: capPull | capResolve,
			caCerts:     []string{"/etc/ca-1.pem", "/dir/ca-2.pem"},
			clientPairs: [][2]string{{"/dir/cert.pem", "/keys/key.pem"}, {"/dir/both.pem", ""}, {"/dir/single.pem", ""}},
			skipVerify:  &no, DialTimeout: 3 * time.Second,
			Header: http.Header{"X-One": {"1"}, "X-Many": {"2", "3"}}},
		{Scheme: "https", Host: "odd.example.com", Path: "/v2/prefix", Caps: allCapabilities, clientPairs: [][2]string{{"/dir/client.pem", ""}}},
		{Scheme: "https", Host: "root.example.com", Path: "", Caps: allCapabilities, skipVerify: &yes,
			RedirectTo: []netip.Prefix{netip.MustParsePrefix("127.0.0.0/8"), netip.MustParsePrefix("fe80::1/128")}},
		{Scheme: "https", Host: "bare.example.com:5000", Path: "/b/v2", Caps: allCapabilities},
		{Scheme: "https", Host: "header-only.example.com", Path: "/v2", Caps: allCapabilities, Header: http.Header{"X": {"y"}}},
		{Scheme: "https", Host: "registry.example.com", Path: "/v2", Caps: allCapabilities,
			caCerts: []string{"/dir/ca.pem"}, Header: http.Header{"X-Team": {"infra"}},
			unknown: []string{`line 4: unknown key "unknown_option_of_a_newer_containerd", did you mean "skip_verify"?`}},
	}
	got, err := parseHosts("/dir", []byte(everyOption))
	if err != nil {
		t.Fatal(err)
	}
	if len(got) != len(want) {
		t.Fatalf("%d hosts, want %d", len(got), len(want))
	}
	for i := range want {
		if !reflect.DeepEqual(got[i], want[i]) {
			t.Errorf("host %d:\n got %+v\nwant %+v", i, got[i], want[i])
		}
	}
}

// TestParseHostsInline: host tables that have no header of their own have no
// order in the file either; they follow the others, sorted.
func TestParseHostsInline(t *testing.T) {
	hosts, err := parseHosts("/dir", []byte("[host]\n\"https://b\".skip_verify = true\n\"https://a\" = { capabilities = [\"pull\"] }\n[host.\"https://z\"]"))
	if err != nil || brief(hosts[:3]) != "https://z/v2, https://a/v2, https://b/v2 unverified" {
		t.Errorf("%q, %v", brief(hosts), err)
	}
}

func TestParseHostsRefuses(t *testing.T) {
	for text, want := range map[string]string{
		`server = 1`:                                         "Server",
		`server = "ftp://x"`:                                 "http or https",
		`server = "https://"`:                                "with a host",
		`server = "https://user:hunter2@x"`:                  "credentials in the URL",
		`server = "https://user:hunter2@x:port"`:             "not a URL",
		`[host."https://x"]` + "\nca = 1":                    "ca: a string or a list",
		`[host."https://x"]` + "\nca = [1]":                  "ca: a list of strings",
		`[host."https://x"]` + "\nclient = 1":                "client",
		`[host."https://x"]` + "\nclient = [[\"a\"]]":        "a pair is",
		`[host."https://x"]` + "\ncapabilities = [\"fly\"]":  `unknown capability "fly"`,
		`[host."https://x"]` + "\ndial_timeout = \"soon\"":   "dial_timeout",
		`[host."https://x"]` + "\ndial_timeout = \"-1s\"":    "dial_timeout",
		`[host."https://x"]` + "\nredirect_to = \"here\"":    `redirect_to: "here" is neither`,
		`[host."https://x"]` + "\nredirect_to = [1]":         "redirect_to: a list of strings",
		`[host."https://x".header]` + "\nx = 1":              "header x",
		`[host."https://x".header]` + "\n\"a b\" = \"y\"":    `header "a b"`,
		`[host."https://x".header]` + "\nx = \"hunter2\\n\"": "header x",
		`[host.""]`: "without a name",
		`[host`:     "",
	} {
		hosts, err := parseHosts("/dir", []byte(text))
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %+v, %v; want an error with %q", text, hosts, err, want)
		}
		if err != nil && strings.Contains(err.Error(), "hunter2") {
			t.Errorf("%s: the error shows the password: %v", text, err)
		}
	}
}

func pairFiles(pairs [][2]string) (files [][]string) {
	for _, p := range pairs {
		files = append(files, p[:])
	}
	return files
}

// hidden is what errors must not show: a password in a URL, a token in a header.
const hidden = "hunter2-hunter2"

// onlyInValues reports whether all occurrences of a word in a TOML document are in values, that is
// after an equals sign.
func onlyInValues(data []byte, word string) bool {
	for line := range strings.Lines(string(data)) {
		key, _, _ := strings.Cut(line, "=")
		if strings.Contains(key, word) {
			return false
		}
	}
	return true
}

func FuzzParseHosts(f *testing.F) {
	f.Add([]byte(everyOption))
	f.Add([]byte(`host = { "https://inline" = { capabilities = ["pull"] } }`))
	f.Add([]byte(`[host.a]` + "\n" + `[host.b]` + "\n" + `[host.a.header]` + "\nx=\"\""))
	f.Add([]byte("[host]\n\"https://x\".ca=[[]]\n"))
	f.Add([]byte("[host.\"https://x\".header]\n\"a\\nb\" = [\"c\\u0000\"]\n[host.\"http://y/z\"]\nclient = [[\"a\", \"\"]]\nca=[\"b\"]\n"))
	f.Add([]byte("[host.\"https://x\".header]\nauthorization = \"" + hidden + "\"\nauthorization = \"" + hidden + "\"\n"))
	f.Add([]byte("server = \"https://user:" + hidden + "@x:port\"\n[header]\nx = [\"" + hidden + "\\n\"]\n"))
	f.Add([]byte("[host.\"https://x\"]\nca = \"" + hidden + "\nskip_verify = \"" + hidden + "\"\n"))
	f.Fuzz(func(t *testing.T, data []byte) {
		hosts, err := parseHosts("/dir", data)
		if err != nil {
			if len(err.Error()) > 1000 || onlyInValues(data, hidden) && strings.Contains(err.Error(), hidden) {
				t.Fatalf("%d bytes: %v", len(err.Error()), err)
			}
			return
		}
		for i, h := range hosts {
			server := i == len(hosts)-1
			if h.Host == "" && !server || h.Host != "" && h.Scheme != "http" && h.Scheme != "https" {
				t.Fatalf("host %d: %+v", i, h)
			}
			if h.Path != "" && !strings.HasPrefix(h.Path, "/") {
				t.Fatalf("host %d has the path %q", i, h.Path)
			}
			for name, values := range h.Header {
				if !httpguts.ValidHeaderFieldName(name) || slices.ContainsFunc(values, func(v string) bool { return !httpguts.ValidHeaderFieldValue(v) }) {
					t.Fatalf("host %d has the header %q: %q", i, name, values)
				}
			}
			for _, file := range slices.Concat(h.caCerts, slices.Concat(pairFiles(h.clientPairs)...)) {
				if file != "" && !filepath.IsAbs(file) {
					t.Fatalf("host %d has the file %q", i, file)
				}
			}
		}
	})
}

// brief formats the properties of hosts that decide the requests to them.
func brief(hosts []hostConfig) string {
	var s []string
	for _, h := range hosts {
		b := h.Scheme + "://" + h.Host + h.Path
		if h.Home {
			b += " home"
		}
		if h.PlainNext {
			b += " or-http"
		}
		if h.skipVerify != nil && *h.skipVerify {
			b += " unverified"
		}
		s = append(s, b)
	}
	return strings.Join(s, ", ")
}

func TestLoadHosts(t *testing.T) {
	first, second := t.TempDir(), t.TempDir()
	registrytest.WriteFile(t, filepath.Join(first, "docker.io/hosts.toml"), `[host."https://mirror"]`)
	registrytest.WriteFile(t, filepath.Join(first, "named.example.com/hosts.toml"), "server = \"https://other.example.com\"\n[host.\"https://named.example.com\"]")
	registrytest.WriteFile(t, filepath.Join(first, "port.example.com_5000_/hosts.toml"), `server = "http://underscore"`)
	registrytest.WriteFile(t, filepath.Join(first, "port.example.com:5000/hosts.toml"), `server = "http://colon"`)
	registrytest.WriteFile(t, filepath.Join(first, "colon.example.com:5000/hosts.toml"), `server = "http://colon"`)
	registrytest.WriteFile(t, filepath.Join(first, "empty.example.com/hosts.toml"), "")
	registrytest.WriteFile(t, filepath.Join(first, "both.example.com/hosts.toml"), "server = \"http://both.example.com\"\nskip_verify = true")
	registrytest.WriteFile(t, filepath.Join(first, "eighty.example.com/hosts.toml"), "server = \"http://eighty.example.com:80\"\nskip_verify = true")
	registrytest.WriteFile(t, filepath.Join(second, "docker.io/hosts.toml"), `server = "https://never"`)
	registrytest.WriteFile(t, filepath.Join(second, "second.example.com/hosts.toml"), `server = "https://second"`)
	registrytest.WriteFile(t, filepath.Join(second, "_default/hosts.toml"), "server = \"https://everything\"\n[host.\"http://127.0.0.1:5000\"]")

	for domain, want := range map[string]string{
		"docker.io":              "https://mirror/v2, https://registry-1.docker.io/v2 home",
		"named.example.com":      "https://named.example.com/v2 home, https://other.example.com/v2 home",
		"port.example.com:5000":  "http://underscore/v2 home",
		"colon.example.com:5000": "http://colon/v2 home",
		"empty.example.com":      "https://empty.example.com/v2 home",
		"both.example.com":       "https://both.example.com/v2 home or-http unverified",
		"eighty.example.com":     "http://eighty.example.com:80/v2 home unverified",
		"second.example.com":     "https://second/v2 home",
		"else.example.com":       "http://127.0.0.1:5000/v2, https://everything/v2",
		"everything":             "http://127.0.0.1:5000/v2, https://everything/v2 home",
	} {
		got, err := loadHosts([]string{first, filepath.Join(first, "missing"), second}, domain)
		if err != nil || brief(got) != want {
			t.Errorf("%s: %q, %v; want %q", domain, brief(got), err, want)
		}
	}
	for domain, want := range map[string]string{
		"docker.io":        "https://registry-1.docker.io/v2 home",
		"example.com:5000": "https://example.com:5000/v2 home",
		"localhost":        "https://localhost/v2 home unverified",
		"localhost:443":    "https://localhost:443/v2 home unverified",
		"localhost:80":     "http://localhost:80/v2 home",
		"localhost:5000":   "https://localhost:5000/v2 home or-http unverified",
		"127.0.0.9:5000":   "https://127.0.0.9:5000/v2 home or-http unverified",
		"[::1]:5000":       "https://[::1]:5000/v2 home or-http unverified",
		"[::1]":            "https://[::1]/v2 home unverified",
	} {
		got, err := loadHosts(nil, domain)
		if err != nil || brief(got) != want {
			t.Errorf("%s without configuration: %q, %v; want %q", domain, brief(got), err, want)
		}
	}
}

// The name of Docker Hub is a web site's, not its registry's.
func TestDockerHubAsServer(t *testing.T) {
	dir := t.TempDir()
	registrytest.WriteFile(t, filepath.Join(dir, "docker.io/hosts.toml"), "server = \"https://docker.io\"\n[host.\"https://mirror\"]")
	got, err := loadHosts([]string{dir}, "docker.io")
	if want := "https://mirror/v2, https://registry-1.docker.io/v2 home"; err != nil || brief(got) != want {
		t.Errorf("%q, %v; want %q", brief(got), err, want)
	}
}

func TestLoadHostsCertificateFiles(t *testing.T) {
	dir := t.TempDir()
	host := filepath.Join(dir, "example.com")
	for _, name := range []string{"a.crt", "b.crt", "client.cert", "client.key", "lone.cert", "other.txt", "sub/c.crt"} {
		registrytest.WriteFile(t, filepath.Join(host, name), "x")
	}
	hosts, err := loadHosts([]string{dir}, "example.com")
	if err != nil || len(hosts) != 1 {
		t.Fatalf("%+v, %v", hosts, err)
	}
	wantCA := []string{host + "/a.crt", host + "/b.crt"}
	wantPairs := [][2]string{{host + "/client.cert", host + "/client.key"}, {host + "/lone.cert", ""}}
	if h := hosts[0]; !reflect.DeepEqual(h.caCerts, wantCA) || !reflect.DeepEqual(h.clientPairs, wantPairs) || h.Host != "example.com" {
		t.Errorf("got %+v", h)
	}
}

func TestBrokenHostsFileFailsByName(t *testing.T) {
	dir := t.TempDir()
	file := registrytest.WriteFile(t, filepath.Join(dir, "example.com/hosts.toml"), "server = [")
	_, err := loadHosts([]string{dir}, "example.com")
	if errdefs.Code(err) != codes.FailedPrecondition || !strings.Contains(err.Error(), file) {
		t.Errorf("got %v", err)
	}
}

func TestUnknownHostKeys(t *testing.T) {
	t.Parallel()
	got := unknownKeys([]byte("sever = \"https://a\"\n[host.\"https://user:hunter2@b\"]\n  skip-verify = true\n  capabilityes = [\"pull\"]\n" +
		"[host.\"https://b\".header]\n  anything = \"x\"\n[hosts.\"https://c\"]\n"))
	want := []string{`line 1: unknown key "sever", did you mean "server"?`, `line 3: unknown key "skip-verify", did you mean "skip_verify"?`,
		`line 4: unknown key "capabilityes", did you mean "capabilities"?`, `line 7: unknown key "hosts", did you mean "host"?`}
	if !slices.Equal(got, want) {
		t.Errorf("got %q", got)
	}
}

// A mirror with a path below the API's root knows an image by another repository. Its token server
// and the credential files have that name.
func TestRepositoryOfPrefixedMirror(t *testing.T) {
	for path, want := range map[string]string{
		"":                                  "lib/app",
		"/v2":                               "lib/app",
		"/v2/":                              "lib/app",
		"/v2/proj/hub":                      "proj/hub/lib/app",
		"/v2/proj/hub/":                     "proj/hub/lib/app",
		"/v2/v2":                            "v2/lib/app",
		"/artifactory/api/docker/remote/v2": "lib/app",
		"/artifactory/api/docker/remote":    "lib/app",
		"/registry/v2/proj":                 "proj/lib/app",
		"/v20/proj":                         "lib/app",
	} {
		if got := (&hostConfig{Path: path}).repository("lib/app"); got != want {
			t.Errorf("%q: got %q, want %q", path, got, want)
		}
	}
	for override, want := range map[bool]string{true: "proj/hub/app", false: "proj/hub/v2/app"} {
		mirror := registrytest.New(t)
		var scopes, users []string
		mirror.Before = func(w http.ResponseWriter, r *http.Request) bool {
			if r.URL.Path == "/token" {
				user, _, _ := r.BasicAuth()
				scopes, users = append(scopes, r.URL.Query().Get("scope")), append(users, user)
				giveToken(w, r)
				return true
			}
			if r.Header.Get("Authorization") != "Bearer T" {
				w.Header().Set("WWW-Authenticate", fmt.Sprintf("Bearer realm=%q,service=x", mirror.URL+"/token"))
				w.WriteHeader(http.StatusUnauthorized)
				return true
			}
			r.URL.Path = strings.Replace(r.URL.Path, "/v2/"+want, "/v2/app", 1)
			return false
		}
		putImage(mirror, "app", "v1", []byte("x"))
		docker := registrytest.WriteFile(t, filepath.Join(t.TempDir(), "config.json"),
			fmt.Sprintf(`{"auths":{"%[1]s/proj":{"username":"proj","password":"p"},"%[1]s/app":{"username":"app","password":"p"}}}`, mirror.Host()))
		tree := hostsDir(t, "example.com", fmt.Sprintf("[host.%q]\noverride_path = %v", mirror.URL+"/v2/proj/hub", override))
		_, err := resolve(t, Config{Sources: Sources{Dirs: []string{tree}, DockerConfig: docker}}, "example.com/app:v1", Credentials{})
		if err != nil || !slices.Equal(scopes, []string{"repository:" + want + ":pull"}) || !slices.Equal(users, []string{"proj"}) {
			t.Errorf("override_path = %v: scopes %q, users %q, %v", override, scopes, users, err)
		}
	}
}
