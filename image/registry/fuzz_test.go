package registry

import (
	"bytes"
	"context"
	"encoding/base64"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"unicode"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// FuzzDockerConfig: credentials come from a key that stands for the host, and errors quote nothing.
func FuzzDockerConfig(f *testing.F) {
	f.Add([]byte(`{"auths":{"https://index.docker.io/v1/":{"auth":"dTpw"}}}`), "registry-1.docker.io")
	f.Add([]byte(`{"auths":{"a.b/c":{"username":"u","password":"p"},"A.b:443":{"registrytoken":"t\n"}},"credHelpers":{"a.b":""}}`), "a.b")
	f.Add([]byte(`{"auths":null,"credsStore":"../x","credHelpers":{"h":"a/b"}}`), "h")
	f.Fuzz(func(t *testing.T, data []byte, host string) {
		t.Setenv("PATH", "") // no helper is there
		path := filepath.Join(t.TempDir(), "config.json")
		if err := os.WriteFile(path, data, 0o600); err != nil {
			t.Fatal(err)
		}
		c, err := loadDockerConfig(path)
		if err != nil {
			return
		}
		got, err := c.lookup(context.Background(), host, "")
		if err != nil {
			for key, auth := range c.Auths {
				for _, secret := range []string{auth.Password, auth.Auth, auth.IdentityToken, auth.RegistryToken} {
					if len(secret) > 8 && strings.Contains(err.Error(), secret) && !strings.Contains(key, secret) && !strings.Contains(path, secret) {
						t.Fatalf("the error shows %q: %v", secret, err)
					}
				}
			}
			return
		}
		if !got.RegistryToken.sendable() {
			t.Fatalf("the token %q", got.RegistryToken.Reveal())
		}
		if got.isAnonymous() {
			return
		}
		for key := range c.Auths {
			if canonicalHost(key) == canonicalHost(host) && scopeOf(key) == "" {
				return
			}
		}
		t.Fatalf("credentials for %q out of nothing in %s", host, data)
	})
}

// FuzzFromCRI: user and password survive their encoding, and what cannot be read is not shown.
func FuzzFromCRI(f *testing.F) {
	f.Add("u", "p:q", "dTpw")
	f.Add("", "", "!hunter2!")
	f.Add("<token>", "t\x00\x00", "dTpw====")
	f.Fuzz(func(t *testing.T, user, password, odd string) {
		pair := base64.StdEncoding.EncodeToString([]byte(user + ":" + password))
		got, err := FromCRI(&runtimeapi.AuthConfig{Auth: pair})
		if err != nil {
			t.Fatal(err)
		}
		wantUser, wantPassword, _ := strings.Cut(user+":"+password, ":")
		want := Credentials{Username: wantUser, Password: Secret(strings.Trim(wantPassword, "\x00"))}.normalize()
		if got != want {
			t.Fatalf("%q:%q became %q:%q", user, password, got.Username, got.Password.Reveal())
		}
		_, err = FromCRI(&runtimeapi.AuthConfig{Auth: odd, RegistryToken: odd})
		if err != nil && len(odd) > 8 && strings.Contains(err.Error(), odd) {
			t.Fatalf("the error shows it: %v", err)
		}
	})
}

// FuzzContentRange: a partial answer is taken only for the rest of the blob.
func FuzzContentRange(f *testing.F) {
	f.Add("bytes 5-9/10", int64(5), int64(10))
	f.Add("bytes 5-9/*", int64(5), int64(10))
	f.Add("bytes +5-9/10x", int64(5), int64(10))
	f.Fuzz(func(t *testing.T, value string, offset, size int64) {
		if offset < 0 || size <= offset {
			t.Skip("no rest")
		}
		said, err := rangeOf(&http.Response{Header: http.Header{"Content-Range": {value}}}, offset, size)
		if err != nil {
			if len(err.Error()) > 1000 || strings.ContainsFunc(err.Error(), func(r rune) bool { return !unicode.IsPrint(r) }) {
				t.Fatalf("%q", err)
			}
			return
		}
		last := strings.TrimPrefix(value, fmt.Sprintf("bytes %d-", offset))
		number, total, _ := strings.Cut(last, "/")
		var end int64
		if _, err := fmt.Sscan(number, &end); err != nil || end < offset || end >= size || end != said || fmt.Sprint(end) != number || total != "*" && total != fmt.Sprint(size) {
			t.Fatalf("%q is taken for the rest of %d bytes from %d on", value, size, offset)
		}
	})
}

// FuzzRegistryMessage: errors quote a registry's message shortened and printable.
func FuzzRegistryMessage(f *testing.F) {
	f.Add([]byte(`{"errors":[{"code":"DENIED","message":"no\nway"}]}`))
	f.Add([]byte(`{"errors":[{"message":"\u202e\u0000` + strings.Repeat("é", 500) + `"}]}`))
	f.Fuzz(func(t *testing.T, body []byte) {
		text := registryMessage(&http.Response{Body: io.NopCloser(bytes.NewReader(body))})
		if len(text) > 500 || strings.ContainsFunc(text, func(r rune) bool { return !unicode.IsPrint(r) }) {
			t.Fatalf("%q", text)
		}
	})
}
