package registry

import (
	"encoding/json"
	"fmt"
	"log/slog"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"

	"berth/internal/errdefs"
)

const (
	sha256Of0 = "sha256:5feceb66ffc86f38d952786c6d696c79c2dbc239dd4e91b46729d73a27fb57e9" // of "0"
	sha256Of1 = "sha256:6b86b273ff34fce19d6b804eff5a3f5747ada4eaa22f1d49c01e52ddb7875b4b" // of "1"
)

func TestParseReference(t *testing.T) {
	for in, want := range map[string]string{
		"busybox":                                  "docker.io/library/busybox:latest",
		"busybox:1.36":                             "docker.io/library/busybox:1.36",
		"user/app":                                 "docker.io/user/app:latest",
		"index.docker.io/library/busybox":          "docker.io/library/busybox:latest",
		"localhost/app":                            "localhost/app:latest",
		"localhost:5000/app":                       "localhost:5000/app:latest",
		"[::1]:5000/app:v1":                        "[::1]:5000/app:v1",
		"registry.k8s.io/pause:3.10":               "registry.k8s.io/pause:3.10",
		"quay.io/a/b/c/d@" + sha256Of0:             "quay.io/a/b/c/d@" + sha256Of0,
		"busybox:1.36@" + sha256Of0:                "docker.io/library/busybox@" + sha256Of0,
		"gcr.io/p/app:v1@sha512:" + hex(128):       "gcr.io/p/app@sha512:" + hex(128),
		"Registry.Example.com/app":                 "Registry.Example.com/app:latest",
		"registry.example.com:443/app:V1.2-x_y.Zz": "registry.example.com:443/app:V1.2-x_y.Zz",
	} {
		got, err := ParseReference(in)
		if err != nil || got.String() != want {
			t.Errorf("ParseReference(%q) = %q, %v; want %q", in, got, err, want)
		}
	}
	for _, in := range []string{
		"", " ", "a/UPPER", "app:", "app@", "app@sha256:123", "app@sha1:" + hex(40), "app@sha384:" + hex(96),
		"../app", "a/../b", "a//b", "/a", "app:tag:tag", "http://registry/app", hex(64), "app:" + strings.Repeat("t", 129),
		"app\n", "app@sha256:" + strings.ToUpper(hex(64)),
	} {
		if got, err := ParseReference(in); errdefs.Code(err) != codes.InvalidArgument {
			t.Errorf("ParseReference(%q) = %q, %v; want InvalidArgument", in, got, err)
		}
	}
}

func TestInvalidRegistryNames(t *testing.T) {
	for in, want := range map[string]string{
		"my_registry:5000/app":                `registry name "my_registry:5000": host names have no underscore`,
		"my_registry.example.com/team/app:v1": `registry name "my_registry.example.com": host names have no underscore`,
		"registry.example.com:https/app":      `registry name "registry.example.com:https" is not valid`,
		"-registry.example.com/app":           `registry name "-registry.example.com" is not valid`,
		"registry..example.com/app":           `registry name "registry..example.com" is not valid`,
		"::1/app":                             `registry name "::1" is not valid`,
		"https://registry.example.com/app":    "it is a URL, not a name",
		"registry.example.com/App":            "must be lowercase",
		"registry.example.com/my__app_:v1":    "invalid reference format",
	} {
		_, err := ParseReference(in)
		wantCode(t, err, codes.InvalidArgument, want)
	}
	if r, err := ParseReference("my_registry/app"); err != nil || r.Domain != "docker.io" { // a user of Docker Hub
		t.Errorf("%v, %v", r, err)
	}
}

func hex(n int) string { return strings.Repeat("deadbeef", n/8) }

func FuzzParseReference(f *testing.F) {
	for _, s := range []string{"busybox", "a.b:5/c/d:e@" + sha256Of0, "localhost", "../x", "[::1]:5000/a", "a@sha256:", "\x00"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		r, err := ParseReference(s)
		if err != nil {
			return
		}
		if (r.Tag == "") == (r.Digest == "") {
			t.Fatalf("%q: tag %q, digest %q", s, r.Tag, r.Digest)
		}
		for _, part := range strings.Split(r.Repository+"/"+r.identifier(), "/") {
			if part == "" || part == "." || part == ".." {
				t.Fatalf("%q has the path component %q", s, part)
			}
		}
		again, err := ParseReference(r.String())
		if err != nil || again != r {
			t.Fatalf("%q: %v does not parse to itself: %v, %v", s, r, again, err)
		}
	})
}

func TestSecretIsNeverShown(t *testing.T) {
	const value = "hunter2"
	c := Credentials{Username: "joe", Password: value, IdentityToken: value, RegistryToken: value}
	var shown strings.Builder
	for _, verb := range []string{"%v", "%+v", "%#v", "%s", "%q", "%x", "%X"} {
		fmt.Fprintf(&shown, verb, c.Password)
		fmt.Fprintf(&shown, verb, c)
		fmt.Fprintf(&shown, verb, &c)
	}
	data, err := json.Marshal(c)
	if err != nil {
		t.Fatal(err)
	}
	shown.Write(data)
	slog.New(slog.NewJSONHandler(&shown, nil)).Info("pull", "credentials", c, "password", c.Password)
	slog.New(slog.NewTextHandler(&shown, nil)).Info("pull", "credentials", c, "password", c.Password)
	if strings.Contains(shown.String(), value) || strings.Contains(shown.String(), fmt.Sprintf("%x", value)) {
		t.Errorf("the secret is shown: %s", shown.String())
	}
	if c.Password.Reveal() != value {
		t.Error("Reveal does not return the secret")
	}
}
