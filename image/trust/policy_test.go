package trust

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"testing"

	"berth/image/registry"
)

const scopes = `{"default": [{"type": "reject"}], "transports": {
	"docker": {
		"r.example": [{"type": "a"}], "r.example/team": [{"type": "b"}], "r.example/team/app:v1": [{"type": "c"}],
		"*.wild.example": [{"type": "d"}], "docker.io/library": [{"type": "e"}]},
	"docker-daemon": {"": [{"type": "insecureAcceptAnything"}]}}}`

func TestMostSpecificScopeDecides(t *testing.T) {
	t.Parallel()
	p, err := parsePolicy([]byte(scopes))
	if err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]string{
		"r.example/x": "a", "r.example/team/x": "b", "r.example/teams": "a", "r.example/team/app:v1": "c", "r.example/team/app:v2": "b",
		"a.wild.example/x": "d", "a.b.wild.example:5000/x": "d", "wild.example/x": rejectAll, "busybox": "e", "other.example/x": rejectAll,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			ref, err := registry.ParseReference(name)
			if err != nil {
				t.Fatal(err)
			}
			if got, err := p.requirements(ref); err != nil || !all(got, want) {
				t.Errorf("got %v, %v; want %s", got, err, want)
			}
		})
	}
}

func TestFaultyPolicyRejects(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	file := filepath.Join(dir, "policy.json")
	ref := registry.Reference{Domain: "r.example", Repository: "app", Tag: "v1"}
	v := New(slog.New(slog.DiscardHandler))
	for name, text := range map[string]string{
		"missing": "", "no JSON": "{", "no default": "{}", "empty default": `{"default": []}`, "text after it": `{"default": [{"type": "insecureAcceptAnything"}]} {}`,
		"misspelled":  `{"default": [{"type": "insecureAcceptAnything"}], "transport": {}}`,
		"empty scope": `{"default": [{"type": "insecureAcceptAnything"}], "transports": {"docker": {"r.example": []}}}`,
		"missing key": `{"default": [{"type": "signedBy", "keyType": "GPGKeys", "keyPath": "/missing"}]}`,
	} {
		t.Run(name, func(t *testing.T) {
			if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
				t.Fatal(err)
			}
			var rejected *RejectedError
			if err := v.Use(context.Background(), Config{Policy: file}, "", ref, new(Evidence)); !errors.As(err, &rejected) {
				t.Errorf("got %v", err)
			}
		})
	}
}

func TestNamespacePolicyReplacesPolicy(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	for name, text := range map[string]string{"policy.json": `{"default": [{"type": "reject"}]}`, "free.json": `{"default": [{"type": "insecureAcceptAnything"}]}`} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	c := Config{Policy: filepath.Join(dir, "policy.json"), PolicyDir: dir}
	v := New(slog.New(slog.DiscardHandler))
	ref := registry.Reference{Domain: "r.example", Repository: "app", Tag: "v1"}
	for namespace, accepted := range map[string]bool{"": false, "other": false, "free": true, "../free": false, ".": false} {
		if err := v.Use(context.Background(), c, namespace, ref, nil); (err == nil) != accepted {
			t.Errorf("namespace %q: %v", namespace, err)
		}
	}
}
