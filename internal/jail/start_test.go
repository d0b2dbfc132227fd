package jail

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"berth/internal/testutil"
)

const (
	program = "berth-test" // argument 0 of this program as a worker
	version = "test-1"
)

func TestMain(m *testing.M) {
	if os.Args[0] == program {
		os.Exit(Main(program, version, answer))
	}
	testutil.MainNeedsRoot()
	os.Exit(m.Run())
}

// answer is what the worker does: its argument says what.
func answer(args []string, tree *os.File) error {
	switch args[0] {
	case "files": // names of the tree, and whether the worker's own file is still open
		if err := unix.Fchdir(int(tree.Fd())); err != nil {
			return err
		}
		entries, err := os.ReadDir(".")
		_, own := unix.FcntlInt(exeFD, unix.F_GETFD, 0)
		fmt.Print(entries, own == nil, len(os.Environ()))
		return err
	case "long":
		fmt.Print(strings.Repeat("x", 1000))
	case "fail":
		return errors.New("no\x1b[31m\nmore")
	case "sleep":
		time.Sleep(time.Hour)
	}
	return nil
}

func command(t *testing.T, args ...string) Command {
	t.Helper()
	exe, err := os.Open("/proc/self/exe")
	testutil.Must(t, err)
	dir := t.TempDir()
	testutil.Must(t, os.WriteFile(dir+"/file", nil, 0o600))
	tree, err := os.Open(dir)
	testutil.Must(t, err)
	t.Cleanup(func() { exe.Close(); tree.Close() })
	return Command{Name: program, Exe: exe, Version: version, Args: args, Tree: tree}
}

func TestRun(t *testing.T) {
	other := command(t, "files")
	other.Version = "test-2"
	for name, tc := range map[string]struct {
		c          Command
		want, fail string
	}{
		"answer":          {c: command(t, "files"), want: "[- file] false 0"},
		"too long":        {c: command(t, "long"), fail: "answer of more than 100 bytes"},
		"failure":         {c: command(t, "fail"), fail: `exit status 1: "no[31m"`},
		"another version": {c: other, fail: "must be started by a berth of the same version"},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := Run(t.Context(), tc.c, 100)
			if (err != nil) != (tc.fail != "") || err != nil && !strings.Contains(err.Error(), tc.fail) || string(got) != tc.want {
				t.Errorf("%q, %v; want %q, %q", got, err, tc.want, tc.fail)
			}
		})
	}
}

// A program that does not answer ends with its context.
func TestRunEndsWithContext(t *testing.T) {
	late := errors.New("late")
	ctx, cancel := context.WithCancelCause(t.Context())
	ended, c := make(chan error), command(t, "sleep")
	go func() {
		_, err := Run(ctx, c, 100)
		ended <- err
	}()
	cancel(late)
	if err := <-ended; !errors.Is(err, late) {
		t.Error(err)
	}
}
