package launcher

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

func TestOpenLogFileAppends(t *testing.T) {
	path := filepath.Join(t.TempDir(), "0.log")
	for _, text := range []string{"one\n", "two\n"} {
		fd, err := openLogFile("", path)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := unix.Write(fd, []byte(text)); err != nil {
			t.Error(err)
		}
		unix.Close(fd)
	}
	if got, err := os.ReadFile(path); string(got) != "one\ntwo\n" || err != nil {
		t.Errorf("the log is %q, %v", got, err)
	}
	if info, err := os.Stat(path); err != nil || info.Mode() != 0o640 {
		t.Errorf("its mode is %v, %v", info.Mode(), err)
	}
}

func TestOpenLogFileRefusesOtherFiles(t *testing.T) {
	dir := t.TempDir()
	for name, make := range map[string]func(path string) error{
		"missing/0.log": func(string) error { return nil },
		"directory":     func(p string) error { return os.Mkdir(p, 0o700) },
		"fifo":          func(p string) error { return unix.Mkfifo(p, 0o600) },
		"link":          func(p string) error { return os.Symlink(filepath.Join(dir, "target"), p) },
		"device":        func(p string) error { return os.Symlink("/dev/null", p) },
	} {
		path := filepath.Join(dir, name)
		if err := make(path); err != nil {
			t.Fatal(err)
		}
		if fd, err := openLogFile("", path); err == nil || !strings.Contains(err.Error(), path) {
			unix.Close(fd)
			t.Errorf("openLogFile of %s = %v, want an error that names it", name, err)
		}
	}
	if _, err := os.Lstat(filepath.Join(dir, "target")); err == nil {
		t.Error("a file was made through a symbolic link")
	}
}

func TestOpenLogFileStaysBelowItsDirectory(t *testing.T) {
	dir, outside := t.TempDir(), t.TempDir()
	if err := os.Symlink(outside, filepath.Join(dir, "link")); err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(filepath.Join(dir, "app"), 0o700); err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{dir + "/link/0.log", dir + "/../" + filepath.Base(outside) + "/0.log", outside + "/0.log", dir} {
		if fd, err := openLogFile(dir, path); err == nil {
			unix.Close(fd)
			t.Errorf("openLogFile(%s, %s) succeeded", dir, path)
		}
	}
	if made, err := os.ReadDir(outside); len(made) != 0 || err != nil {
		t.Errorf("made outside: %v, %v", made, err)
	}
	// The administrator's own links, above, are followed.
	alias := filepath.Join(t.TempDir(), "logs")
	if err := os.Symlink(dir, alias); err != nil {
		t.Fatal(err)
	}
	fd, err := openLogFile(alias+"/", alias+"//app/0.log")
	if err != nil {
		t.Fatal(err)
	}
	unix.Close(fd)
}
