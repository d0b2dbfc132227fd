package debug

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"berth/cmd/berth/config"
)

func TestRedactRemovesSecrets(t *testing.T) {
	t.Parallel()
	const secret = "s3cr3t-value"
	for _, text := range []string{
		`Authorization: Basic ` + secret,
		`authorization = ["Bearer ` + secret + `"]`,
		`{"password":"` + secret + `","x":1}`,
		`{"registryToken": "` + secret + `"}`,
		`{"nested":"{\"identity_token\":\"` + secret + `\"}"}`,
		`DB_PASSWORD=` + secret,
		`api-key: '` + secret + `'`,
		`auths = ["` + secret + `"]`,
		`level=WARN msg="pull" url=https://user:` + secret + `@registry.example/v2/`,
		`curl -H "X-Registry-Auth: ` + secret + `"`,
		`Cookie: session=` + secret + `; other=` + secret,
		`got Bearer ` + secret + ` from`,
		`client_secret="quoted \" ` + secret + `"`,
	} {
		t.Run(text, func(t *testing.T) {
			t.Parallel()
			if got := string(redact([]byte(text))); strings.Contains(got, secret) || !strings.Contains(got, removed) {
				t.Errorf("%s", got)
			}
		})
	}
}

func TestRedactKeepsOtherText(t *testing.T) {
	t.Parallel()
	for _, text := range []string{
		"goroutine 7 [running]:\nberth/server.(*Server).unary(0xc000, {0x1, 0x2})",
		`level=INFO msg="pod ready" pod=0123 podName=web seconds=0.02`,
		`{"docker_config": "/root/.docker/config.json", "image": "docker.io/library/nginx:1"}`,
		"36 35 98:0 /mnt1 /mnt2 rw,noatime master:1 - ext3 /dev/root rw,errors=continue",
	} {
		if got := string(redact([]byte(text))); got != text {
			t.Errorf("%s became %s", text, got)
		}
	}
}

func TestConfigurationsAreMasked(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	cfg := config.Default()
	cfg.RegistryDirs, cfg.CNIConfDir, cfg.CNIBinDirs = []string{dir}, dir, nil
	n := &node{cfg: cfg}
	writeFile(t, filepath.Join(dir, "r.example", "hosts.toml"),
		"server = 'https://r.example'\n[host.'https://m.example'.header]\nx-anything = ['hidden']\n")
	writeFile(t, filepath.Join(dir, "10-x.conflist"), `{"name":"x","plugins":[{"type":"p","apiToken":"hidden","mtu":1400}]}`)
	for name, c := range map[string]struct {
		collect func(context.Context) ([]byte, error)
		want    []string
	}{
		"registries": {n.registries, []string{"https://m.example", "x-anything", removed}},
		"networks":   {n.networks, []string{`"mtu": 1400`, "apiToken", removed}},
	} {
		got, err := c.collect(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if strings.Contains(string(got), "hidden") {
			t.Errorf("%s has a secret: %s", name, got)
		}
		for _, want := range c.want {
			if !strings.Contains(string(got), want) {
				t.Errorf("%s lacks %s: %s", name, want, got)
			}
		}
	}
}

func writeFile(t *testing.T, path, content string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
}

func TestHangingPartIsLeftBehind(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		hang := make(chan struct{})
		parts := []part{
			{name: "hangs", collect: func(context.Context) ([]byte, error) { <-hang; return []byte("late"), nil }},
			{name: "partial", collect: func(ctx context.Context) ([]byte, error) {
				<-ctx.Done()
				return []byte("some"), ctx.Err()
			}},
			{name: "fails", collect: func(context.Context) ([]byte, error) { return nil, errors.New("password=x1y2") }},
			{name: "works", collect: func(context.Context) ([]byte, error) { return []byte("content"), nil }},
			{name: "large", collect: func(context.Context) ([]byte, error) { return make([]byte, maxPart+1), nil }, binary: true},
		}
		began := time.Now()
		results := collect(t.Context(), parts, 5*time.Second)
		if took := time.Since(began); took > 7*time.Second {
			t.Errorf("the bundle took %v", took)
		}
		close(hang)
		var file bytes.Buffer
		if err := write(&file, "bundle", results); err != nil {
			t.Fatal(err)
		}
		got := unpack(t, &file)
		if got["bundle/partial"] != "some" || got["bundle/works"] != "content" || len(got["bundle/large"]) != maxPart {
			t.Errorf("files: %.200q", got)
		}
		summary := got["bundle/SUMMARY.txt"]
		for _, want := range []string{"not finished within 5s", "deadline exceeded", "password=" + removed, "ok", "cut after"} {
			if !strings.Contains(summary, want) {
				t.Errorf("the summary lacks %q: %s", want, summary)
			}
		}
	})
}

// unpack returns the contents of a bundle by name.
func unpack(t *testing.T, r io.Reader) map[string]string {
	t.Helper()
	compressed, err := gzip.NewReader(r)
	if err != nil {
		t.Fatal(err)
	}
	all := map[string]string{}
	for archive := tar.NewReader(compressed); ; {
		header, err := archive.Next()
		if err == io.EOF {
			return all
		}
		if err != nil {
			t.Fatal(err)
		}
		content, err := io.ReadAll(archive)
		if err != nil {
			t.Fatal(err)
		}
		all[header.Name] = string(content)
	}
}

func TestOutputIsNotOverwritten(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "bundle")
	writeFile(t, path, "precious")
	if _, _, err := create(path, "name", io.Discard); !errors.Is(err, os.ErrExist) {
		t.Errorf("error %v", err)
	}
	_, done, err := create(path+".2", "name", io.Discard)
	if err != nil {
		t.Fatal(err)
	}
	if err := done(errors.New("disk full")); err == nil || !strings.Contains(err.Error(), "disk full") {
		t.Errorf("error %v", err)
	}
	if _, err := os.Stat(path + ".2"); !os.IsNotExist(err) {
		t.Errorf("a failed bundle remains: %v", err)
	}
}
