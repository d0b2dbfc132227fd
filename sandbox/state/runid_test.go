package state

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"berth/internal/testutil"
)

// An ID lasts as long as the directory. A directory with subdirectories and without an ID comes
// from an earlier version, and is not new.
func TestOpenRun(t *testing.T) {
	for name, c := range map[string]struct {
		made  func(d Dirs) error
		id    string // "": any new one
		isNew bool
	}{
		"an empty directory":                     {func(Dirs) error { return nil }, "", true},
		"a directory of an earlier version":      {func(d Dirs) error { return os.MkdirAll(d.Shim(""), 0o700) }, "", false},
		"a directory with an ID":                 {func(d Dirs) error { return os.WriteFile(d.RunID(), []byte("this\n"), 0o600) }, "this", false},
		"a temporary ID file of a killed writer": {func(d Dirs) error { return os.WriteFile(d.RunID()+".tmp", nil, 0o600) }, "", true},
		"an empty ID file":                       {func(d Dirs) error { return os.WriteFile(d.RunID(), nil, 0o600) }, "", true},
	} {
		t.Run(name, func(t *testing.T) {
			d := Dirs{State: t.TempDir()}
			testutil.Must(t, c.made(d))
			run, err := d.OpenRun()
			if err != nil || run.ID == "" || run.New != c.isNew || c.id != "" && run.ID != c.id {
				t.Fatalf("got %+v, %v", run, err)
			}
			if again, err := d.OpenRun(); err != nil || again != (Run{ID: run.ID, Adopted: run.Adopted}) {
				t.Errorf("second call: %+v, %v", again, err)
			}
			testutil.Must(t, os.RemoveAll(d.State))
			testutil.Must(t, os.Mkdir(d.State, 0o700))
			if next, err := d.OpenRun(); err != nil || !next.New || next.ID == run.ID {
				t.Errorf("after the directory was emptied: %+v, %v", next, err)
			}
		})
	}
}

// Records of earlier versions have no ID. They belong only to a directory of such a version, even
// if the adopting daemon was killed while it marked records.
func TestRunOfRecordsWithoutID(t *testing.T) {
	for name, c := range map[string]struct {
		made func(d Dirs) error
		want bool
	}{
		"an empty directory":                {func(Dirs) error { return nil }, false},
		"a directory of an earlier version": {func(d Dirs) error { return os.MkdirAll(d.Shim(""), 0o700) }, true},
	} {
		t.Run(name, func(t *testing.T) {
			d := Dirs{State: t.TempDir()}
			testutil.Must(t, c.made(d))
			for daemon := range 3 {
				run, err := d.OpenRun()
				if err != nil || run.Has("") != c.want || !run.Has(run.ID) || run.Has("another") {
					t.Errorf("daemon %d: %+v, %v", daemon, run, err)
				}
				testutil.Must(t, os.MkdirAll(d.Shim(""), 0o700)) // a daemon that is killed after it prepared the directory
			}
		})
	}
}

// A malformed ID file is an error, so that no container is killed by mistake.
func TestOpenRunRefusesMalformedFile(t *testing.T) {
	for name, made := range map[string]func(path string) error{
		"a long file":               func(path string) error { return os.WriteFile(path, []byte(strings.Repeat("a", 1<<20)), 0o600) },
		"a directory":               func(path string) error { return os.Mkdir(path, 0o700) },
		"a FIFO, which would block": func(path string) error { return unix.Mkfifo(path, 0o600) },
	} {
		t.Run(name, func(t *testing.T) {
			d := Dirs{State: filepath.Join(t.TempDir())}
			testutil.Must(t, made(d.RunID()))
			if run, err := d.OpenRun(); err == nil {
				t.Errorf("got %+v", run)
			}
		})
	}
}
