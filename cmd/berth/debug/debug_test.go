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
)

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
			{"hangs", func(context.Context) (clean, error) { <-hang; return clean("late"), nil }},
			{"partial", func(ctx context.Context) (clean, error) {
				<-ctx.Done()
				return clean("some"), ctx.Err()
			}},
			{"fails", func(context.Context) (clean, error) { return nil, errors.New("password=x1y2") }},
			{"works", func(context.Context) (clean, error) { return clean("content"), nil }},
			{"large", func(context.Context) (clean, error) { return make(clean, maxPart+1), nil }},
		}
		began := time.Now()
		results := collect(t.Context(), parts, 5*time.Second)
		if took := time.Since(began); took > 7*time.Second {
			t.Errorf("the bundle took %v", took)
		}
		close(hang)
		var file bytes.Buffer
		if err := knowing(t).write(&file, "bundle", results); err != nil {
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
