package payload

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"testing/fstest"
)

var programs = fstest.MapFS{
	"bin/pause":   {Data: []byte("the pause program")},
	"bin/monitor": {Data: []byte("the monitor program")},
}

func TestInstall(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "bin")
	paths, err := install(programs, dir)
	if err != nil {
		t.Fatal(err)
	}
	check(t, dir, paths)

	before, err := os.Stat(paths.Monitor)
	if err != nil {
		t.Fatal(err)
	}
	if again, err := install(programs, dir); again != paths || err != nil {
		t.Fatalf("second install = %+v, %v", again, err)
	}
	if after, err := os.Stat(paths.Monitor); err != nil || !os.SameFile(before, after) {
		t.Errorf("the second install replaced what was good: %v", err)
	}
}

func TestInstallRepairs(t *testing.T) {
	for name, damage := range map[string]func(Paths) error{
		"content": func(p Paths) error { return os.WriteFile(p.Monitor, []byte("another program"), 0o755) },
		"mode":    func(p Paths) error { return os.Chmod(p.Monitor, 0o777) },
		"missing": func(p Paths) error { return os.Remove(filepath.Join(p.Pause, "proc")) },
		"extra":   func(p Paths) error { return os.WriteFile(filepath.Join(p.Pause, "extra"), nil, 0o644) },
		"symlink": func(p Paths) error {
			return errors.Join(os.Remove(p.Monitor), os.Symlink("/bin/true", p.Monitor))
		},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			paths, err := install(programs, dir)
			if err != nil {
				t.Fatal(err)
			}
			if err := damage(paths); err != nil {
				t.Fatal(err)
			}
			if _, err := install(programs, dir); err != nil {
				t.Fatal(err)
			}
			check(t, dir, paths)
		})
	}
}

// Install removes the remains of an interrupted installation and the programs of other versions.
func TestInstallRemovesLeftovers(t *testing.T) {
	dir := t.TempDir()
	for _, name := range []string{unfinished + "1234", "pause-0123456789abcdef"} { // the latter of another version
		left := filepath.Join(dir, name)
		if err := errors.Join(os.Mkdir(left, 0o700), os.WriteFile(filepath.Join(left, "pause"), nil, 0o600)); err != nil {
			t.Fatal(err)
		}
	}
	paths, err := install(programs, dir)
	if err != nil {
		t.Fatal(err)
	}
	check(t, dir, paths)
	if entries, err := os.ReadDir(dir); len(entries) != 2 || err != nil {
		t.Errorf("after an installation: %v (%v)", entries, err)
	}
}

func TestInstallConcurrently(t *testing.T) {
	dir := t.TempDir()
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			if _, err := install(programs, dir); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	paths, err := install(programs, dir)
	if err != nil {
		t.Fatal(err)
	}
	check(t, dir, paths)
}

func TestInstallWithoutPrograms(t *testing.T) {
	_, err := install(fstest.MapFS{"bin/README": {}}, t.TempDir())
	if err == nil || !strings.Contains(err.Error(), "contrib/build") {
		t.Errorf("install = %v, want an error that names contrib/build", err)
	}
}

func check(t *testing.T, dir string, p Paths) {
	t.Helper()
	for path, want := range map[string]string{
		p.Monitor:                            "the monitor program",
		filepath.Join(p.Pause, PauseProgram): "the pause program",
	} {
		info, err := os.Lstat(path)
		if err != nil {
			t.Fatal(err)
		}
		if got, err := os.ReadFile(path); string(got) != want || info.Mode() != 0o755 || err != nil {
			t.Errorf("%s: %q, mode %v, %v", path, got, info.Mode(), err)
		}
	}
	for _, d := range pauseMountPoints {
		if entries, err := os.ReadDir(filepath.Join(p.Pause, d)); len(entries) != 0 || err != nil {
			t.Errorf("%s: %v, %v", d, entries, err)
		}
	}
	if entries, err := os.ReadDir(dir); len(entries) != 2 || err != nil {
		t.Errorf("in %s: %v, %v", dir, entries, err)
	}
}

// An installed program can be executed at once, although this process starts others meanwhile.
func TestInstalledProgramIsNotBusy(t *testing.T) {
	content, err := os.ReadFile("/bin/true")
	if err != nil {
		t.Fatal(err)
	}
	programs := fstest.MapFS{"bin/pause": {Data: content}, "bin/monitor": {Data: content}}
	ctx, cancel := context.WithCancel(t.Context())
	var others sync.WaitGroup
	for range 4 {
		others.Go(func() {
			for ctx.Err() == nil {
				if err := exec.Command("/bin/true").Run(); err != nil {
					t.Error(err)
				}
			}
		})
	}
	defer others.Wait()
	defer cancel()
	for range 50 {
		paths, err := install(programs, t.TempDir())
		if err != nil {
			t.Fatal(err)
		}
		if err := exec.Command(paths.Monitor).Run(); err != nil {
			t.Fatal(err)
		}
	}
}
