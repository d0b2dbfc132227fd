package operator

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
)

// A failed checkpoint leaves no file, and a successful one only its output.
func TestCheckpointFile(t *testing.T) {
	t.Parallel()
	save := func(dir string) error { return os.WriteFile(filepath.Join(dir, partialFile), []byte("new"), 0o600) }
	failed := errors.New("failed")
	for _, test := range []struct {
		name    string
		exists  bool
		force   bool
		write   func(dir string) error
		want    string // content of the output
		wantErr string
	}{
		{name: "new", write: save, want: "new"},
		{name: "exists", exists: true, write: save, want: "old", wantErr: "--force"},
		{name: "replaced", exists: true, force: true, write: save, want: "new"},
		{name: "failed", write: func(dir string) error { return errors.Join(save(dir), failed) }, wantErr: "failed"},
		{name: "failed replacement", exists: true, force: true, write: func(string) error { return failed }, want: "old", wantErr: "failed"},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			dir := t.TempDir()
			file := filepath.Join(dir, "out.tar")
			if test.exists {
				if err := os.WriteFile(file, []byte("old"), 0o600); err != nil {
					t.Fatal(err)
				}
			}
			err := (&checkpointOptions{output: file, force: test.force}).writeFile(os.Stdout, test.write)
			if (err == nil) != (test.wantErr == "") || err != nil && !strings.Contains(err.Error(), test.wantErr) {
				t.Errorf("%v, want %q", err, test.wantErr)
			}
			content, err := os.ReadFile(file)
			if string(content) != test.want || (err == nil) != (test.want != "") {
				t.Errorf("output is %q, %v", content, err)
			}
			entries, err := os.ReadDir(dir)
			if err != nil || len(entries) > 1 || len(entries) == 1 && test.want == "" {
				t.Errorf("left: %v, %v", entries, err)
			}
		})
	}
}

// A file that appears while the checkpoint is written is not replaced.
func TestCheckpointKeepsNewFile(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "out.tar")
	err := (&checkpointOptions{output: file}).writeFile(os.Stdout, func(dir string) error {
		return errors.Join(os.WriteFile(filepath.Join(dir, partialFile), []byte("new"), 0o600), os.WriteFile(file, []byte("other"), 0o600))
	})
	if content, _ := os.ReadFile(file); !errors.Is(err, os.ErrExist) || string(content) != "other" {
		t.Errorf("%v, content %q", err, content)
	}
}

func TestCheckpointOfContainerNeedsFile(t *testing.T) {
	t.Parallel()
	err := (&checkpointOptions{output: t.TempDir()}).checkOutput(nil)
	if err == nil || !strings.Contains(err.Error(), "only a pod") {
		t.Error(err)
	}
}

// A reader that leaves early fails the command before anything is removed, and leaves no copy.
func TestCheckpointToClosedPipe(t *testing.T) {
	dir := t.TempDir()
	t.Setenv("TMPDIR", dir)
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	if err := r.Close(); err != nil {
		t.Fatal(err)
	}
	s := &checkpointOptions{output: "-"}
	err = s.writeFile(w, func(dir string) error {
		return os.WriteFile(filepath.Join(dir, partialFile), []byte("new"), 0o600)
	})
	if !errors.Is(err, syscall.EPIPE) {
		t.Errorf("writeFile: %v", err)
	}
	if left, err := os.ReadDir(dir); err != nil || len(left) > 0 {
		t.Errorf("left: %v, %v", left, err)
	}
}

// Before --rm removes the original, every kind of output is synced; one that is gone is an error.
func TestCheckpointSyncsOutput(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	file := filepath.Join(dir, "out.tar")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	_, pipe, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer pipe.Close()
	for _, output := range []string{file, dir, "-"} {
		if err := (&checkpointOptions{output: output}).syncOutput(pipe); err != nil {
			t.Errorf("%s: %v", output, err)
		}
	}
	if err := (&checkpointOptions{output: file + ".gone"}).syncOutput(pipe); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("a missing file: %v", err)
	}
}
