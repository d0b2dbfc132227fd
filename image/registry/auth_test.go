package registry

import (
	"context"
	"encoding/base64"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/image/registry/registrytest"
	"berth/internal/errdefs"
)

func TestFromCRI(t *testing.T) {
	b64 := base64.StdEncoding.EncodeToString
	for name, c := range map[string]struct {
		in   *runtimeapi.AuthConfig
		want Credentials
	}{
		"none":     {nil, Credentials{}},
		"password": {&runtimeapi.AuthConfig{Username: "u", Password: "p", ServerAddress: "s"}, Credentials{Username: "u", Password: "p", ServerAddress: "s"}},
		"auth":     {&runtimeapi.AuthConfig{Auth: b64([]byte("u:p:q"))}, Credentials{Username: "u", Password: "p:q"}},
		"auth without padding": {&runtimeapi.AuthConfig{Auth: strings.TrimRight(b64([]byte("user:p")), "=")},
			Credentials{Username: "user", Password: "p"}},
		"auth with NULs":           {&runtimeapi.AuthConfig{Auth: b64([]byte("u:p\x00\x00"))}, Credentials{Username: "u", Password: "p"}},
		"user name wins over auth": {&runtimeapi.AuthConfig{Username: "u", Password: "p", Auth: b64([]byte("x:y"))}, Credentials{Username: "u", Password: "p"}},
		"identity token":           {&runtimeapi.AuthConfig{IdentityToken: "t"}, Credentials{IdentityToken: "t"}},
		"identity token in auth":   {&runtimeapi.AuthConfig{Auth: b64([]byte("<token>:t"))}, Credentials{IdentityToken: "t"}},
		"registry token":           {&runtimeapi.AuthConfig{RegistryToken: "t"}, Credentials{RegistryToken: "t"}},
	} {
		got, err := FromCRI(c.in)
		if err != nil || got != c.want {
			t.Errorf("%s: %#v, %v", name, got, err)
		}
	}
	for _, auth := range []string{"!hunter2!", b64([]byte("hunter2"))} {
		_, err := FromCRI(&runtimeapi.AuthConfig{Auth: auth})
		if errdefs.Code(err) != codes.InvalidArgument || strings.Contains(err.Error(), "hunter2") || strings.Contains(err.Error(), auth) {
			t.Errorf("auth %q: %v", auth, err)
		}
	}
	for _, token := range []string{"hunter2\nX: y", "hunter2 ", "hünter2\x00"} {
		_, err := FromCRI(&runtimeapi.AuthConfig{RegistryToken: token})
		if errdefs.Code(err) != codes.InvalidArgument || strings.Contains(err.Error(), "nter2") {
			t.Errorf("registry token %q: %v", token, err)
		}
	}
}

func TestCredentialsBelongTo(t *testing.T) {
	const mirror, registry, hub = "mirror.example.com", "registry.example.com", "registry-1.docker.io"
	for _, c := range []struct {
		server, host string
		home         bool
		domain       string
		want         bool
	}{
		{"", registry, true, registry, true},
		{"", mirror, false, registry, false},
		{"", hub, true, "docker.io", true},
		{registry, registry, true, registry, true},
		{"https://Registry.example.com/v2/", registry, true, registry, true},
		{registry, mirror, false, registry, false},
		{mirror, mirror, false, registry, true},
		{mirror, registry, true, registry, false},
		{"https://index.docker.io/v1/", hub, true, "docker.io", true},
		{"docker.io", hub, true, "docker.io", true},
		{registry, "10.0.0.1:5000", true, registry, true}, // the server of the registry's own hosts.toml
		{registry, registry + ":5000", false, registry + ":5000", false},
		{registry, "evil-" + registry, false, "evil-" + registry, false},
	} {
		cred := Credentials{Username: "u", Password: "p", ServerAddress: c.server}
		if got := cred.belongTo(c.host, c.home, c.domain); got != c.want {
			t.Errorf("%+v: got %v", c, got)
		}
	}
	if (Credentials{}).belongTo(registry, true, registry) {
		t.Error("no credentials belong to nobody")
	}
}

func TestDockerConfig(t *testing.T) {
	bin := t.TempDir()
	for name, script := range map[string]string{
		"good":  `read -r server; printf '{"ServerURL":"%s","Username":"helped","Secret":"for-%s"}' "$server" "$server"`,
		"token": `echo '{"Username":"<token>","Secret":"t"}'`,
		"none":  `echo "credentials not found in native keychain"; exit 1`,
		"bad":   `echo hunter2; exit 1`,
		"weird": `echo hunter2`,
	} {
		path := registrytest.WriteFile(t, filepath.Join(bin, "docker-credential-"+name), "#!/bin/sh\n"+script+"\n")
		if err := os.Chmod(path, 0o700); err != nil {
			t.Fatal(err)
		}
	}
	t.Setenv("PATH", bin+":/usr/bin:/bin")
	auth := base64.StdEncoding.EncodeToString([]byte("u:p"))
	file := registrytest.WriteFile(t, filepath.Join(t.TempDir(), "config.json"), fmt.Sprintf(`{
		"auths": {
			"https://index.docker.io/v1/": {"auth": %q},
			"https://index.docker.io/v1/access-token": {"auth": "bm90OnRoaXM="},
			"https://registry.example.com/v2/": {"username": "a", "password": "b"},
			"part.example.com/project": {"username": "a", "password": "b"},
			"refresh.example.com": {"auth": "MDAwMDo=", "identitytoken": "t"},
			"bearer.example.com": {"registrytoken": "t"},
			"helped.example.com": {},
			"broken.example.com": {"auth": "!hunter2"}
		},
		"credHelpers": {"helped.example.com": "good", "token.example.com": "token", "unknown.example.com": "none",
			"bad.example.com": "bad", "weird.example.com": "weird", "path.example.com": "../good", "absent.example.com": "absent"},
		"unrelated": [1, 2]
	}`, auth))
	cfg, err := loadDockerConfig(file)
	if err != nil {
		t.Fatal(err)
	}
	for host, want := range map[string]Credentials{
		"registry-1.docker.io":     {Username: "u", Password: "p"},
		"registry.example.com":     {Username: "a", Password: "b"},
		"registry.example.com:443": {Username: "a", Password: "b"},
		"part.example.com":         {},
		"refresh.example.com":      {Username: "0000", IdentityToken: "t"},
		"bearer.example.com":       {RegistryToken: "t"},
		"helped.example.com":       {Username: "helped", Password: "for-helped.example.com"},
		"token.example.com":        {IdentityToken: "t"},
		"unknown.example.com":      {},
		"else.example.com":         {},
	} {
		got, err := cfg.lookup(context.Background(), host, "")
		if err != nil || got != want {
			t.Errorf("%s: %#v, %v", host, got, err)
		}
	}
	for _, host := range []string{"broken.example.com", "bad.example.com", "weird.example.com", "path.example.com", "absent.example.com"} {
		got, err := cfg.lookup(context.Background(), host, "")
		if err == nil || strings.Contains(err.Error(), "hunter2") {
			t.Errorf("%s: %#v, %v", host, got, err)
		}
	}
	for repository, want := range map[string]string{"project": "a", "project/app/web": "a", "projector": "", "": ""} {
		got, err := cfg.lookup(context.Background(), "part.example.com", repository)
		if err != nil || got.Username != want {
			t.Errorf("part.example.com/%s: %#v, %v", repository, got, err)
		}
	}
	cfg.CredsStore = "good"
	if got, err := cfg.lookup(context.Background(), "else.example.com", ""); err != nil || got.Username != "helped" {
		t.Errorf("store: %#v, %v", got, err)
	}
}

func TestDockerConfigFile(t *testing.T) {
	dir := t.TempDir()
	if cfg, err := loadDockerConfig(filepath.Join(dir, "missing")); err != nil || len(cfg.Auths) > 0 {
		t.Errorf("missing file: %+v, %v", cfg, err)
	}
	broken := registrytest.WriteFile(t, filepath.Join(dir, "config.json"), `{"auths": {"x": {"auth": "hunter2"`)
	_, err := loadDockerConfig(broken)
	if errdefs.Code(err) != codes.FailedPrecondition || !strings.Contains(err.Error(), broken) || strings.Contains(err.Error(), "hunter2") {
		t.Errorf("broken file: %v", err)
	}
}

func TestDockerConfigFaultsNameTheField(t *testing.T) {
	for content, want := range map[string]string{
		`{"auths": {"x": {"auth": 4711}}}`:     `field "auths.x.auth" is not valid: string expected, not number`,
		`{"auths": ["hunter2"]}`:               `field "auths" is not valid: object expected, not array`,
		`{"credHelpers": {"x": {"a":"4711"}}}`: "is not valid: string expected, not object",
		`"hunter2"`:                            "the document is not valid: object expected, not string",
	} {
		file := registrytest.WriteFile(t, filepath.Join(t.TempDir(), "config.json"), content)
		_, err := loadDockerConfig(file)
		wantCode(t, err, codes.FailedPrecondition, file, want)
		if err != nil && (strings.Contains(err.Error(), "4711") || strings.Contains(err.Error(), "hunter2")) {
			t.Errorf("the error shows a secret: %v", err)
		}
	}
}

func TestMostSpecificCredentialsWin(t *testing.T) {
	dir := t.TempDir()
	first := registrytest.WriteFile(t, filepath.Join(dir, "auth.json"),
		`{"auths": {"r.example": {"username": "all", "password": "p"}, "r.example/team": {"username": "team", "password": "p"},
		"r.example/team/app": {"username": "app", "password": "p"}}}`)
	second := registrytest.WriteFile(t, filepath.Join(dir, "config.json"), `{"auths": {"r.example": {"username": "second", "password": "p"},
		"s.example": {"username": "other", "password": "p"}}}`)
	files := Sources{AuthFiles: []string{filepath.Join(dir, "missing"), first}, DockerConfig: second}
	for name, want := range map[string]string{
		"r.example/team/app": "app", "r.example/team/app/part": "app", "r.example/team/web": "team", "r.example/teams": "all", "s.example/x": "other", "t.example/x": "",
	} {
		t.Run(name, func(t *testing.T) {
			host, repository, _ := strings.Cut(name, "/")
			if got, err := files.credentials(t.Context(), host, repository); err != nil || got.Username != want {
				t.Errorf("got %#v, %v; want user %q", got, err, want)
			}
		})
	}
}

func TestStandardAuthFiles(t *testing.T) {
	t.Setenv("HOME", "/root")
	t.Setenv("XDG_RUNTIME_DIR", "/run/user/0")
	for _, unset := range []string{"XDG_CONFIG_HOME", "DOCKER_CONFIG"} {
		t.Setenv(unset, "")
	}
	want := []string{"/run/user/0/containers/auth.json", "/run/containers/0/auth.json", "/root/.config/containers/auth.json",
		"/root/.docker/config.json", "/var/lib/kubelet/config.json", ""}
	if got := (Sources{AuthFiles: []string{StandardAuthFiles}}).files(); !slices.Equal(got, want) {
		t.Errorf("got %q", got)
	}
}
