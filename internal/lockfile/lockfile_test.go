package lockfile

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"

	"berth/internal/errdefs"
	"berth/internal/testutil"
)

// TestMain makes the test binary a second process that locks a file and reports that.
func TestMain(m *testing.M) {
	if path := os.Getenv("LOCKFILE_TEST_HOLD"); path != "" {
		if _, err := Acquire(path); err != nil {
			fmt.Println(err)
			os.Exit(1)
		}
		fmt.Println("locked")
		bufio.NewReader(os.Stdin).ReadString('\n') // until the parent closes the pipe
		os.Exit(0)
	}
	os.Exit(m.Run())
}

func TestSecondProcessIsRefusedByPID(t *testing.T) {
	path := filepath.Join(t.TempDir(), "lock")
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), "LOCKFILE_TEST_HOLD="+path)
	stdin, err := cmd.StdinPipe()
	testutil.Must(t, err)
	stdout, err := cmd.StdoutPipe()
	testutil.Must(t, err)
	testutil.Must(t, cmd.Start())
	line, err := bufio.NewReader(stdout).ReadString('\n')
	if err != nil || line != "locked\n" {
		t.Fatalf("the other process says %q, %v", line, err)
	}

	_, err = Acquire(path)
	if want := fmt.Sprintf("process %d holds it", cmd.Process.Pid); err == nil || !strings.Contains(err.Error(), want) {
		t.Errorf("error %v, want %s", err, want)
	}
	if code := errdefs.Code(err); code != codes.FailedPrecondition {
		t.Errorf("code %s", code)
	}

	// A killed process leaves its pid in the file but no lock.
	testutil.Must(t, cmd.Process.Kill())
	if err := cmd.Wait(); err == nil {
		t.Error("the killed process exited with 0")
	}
	stdin.Close()
	lock, err := Acquire(path)
	testutil.Must(t, err)
	got, err := os.ReadFile(path)
	if want := fmt.Sprintf("%d\n", os.Getpid()); err != nil || string(got) != want {
		t.Errorf("the file holds %q, %v; want %q", got, err, want)
	}
	if err := lock.Release(); err != nil {
		t.Error(err)
	}
}

func TestReleaseAndTakeAgain(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "lock")
	for range 2 {
		lock, err := Acquire(path)
		testutil.Must(t, err)
		if _, err := Acquire(path); err == nil {
			t.Error("locked twice")
		}
		if err := lock.Release(); err != nil {
			t.Error(err)
		}
	}
}

// Shared holders exclude an exclusive one, and the reverse.
func TestSharedAndExclusiveLocksExcludeEachOther(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "lock")
	take := func(ctx context.Context, mode Mode) func() {
		t.Helper()
		unlock, err := Wait(ctx, path, mode)
		testutil.Must(t, err)
		return unlock
	}
	gone, cancel := context.WithCancel(t.Context())
	cancel()
	first, second := take(gone, Shared), take(gone, Shared) // taking a free lock needs no time
	alone := make(chan func(), 1)
	go func() {
		unlock, err := Wait(t.Context(), path, Exclusive)
		if err != nil {
			t.Error(err)
		}
		alone <- unlock
	}()
	first()
	if _, err := Wait(gone, path, Exclusive); !errors.Is(err, context.Canceled) || !strings.Contains(err.Error(), path) {
		t.Errorf("with a shared holder: %v", err)
	}
	second()
	unlock := <-alone
	for _, mode := range []Mode{Shared, Exclusive} {
		if _, err := Wait(gone, path, mode); !errors.Is(err, context.Canceled) {
			t.Errorf("with an exclusive holder: %v", err)
		}
	}
	unlock()
	take(gone, Exclusive)()
}

// After the file's deletion, a waiter must lock the new file.
func TestWaiterLocksRecreatedFile(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "lock")
	first, err := Wait(t.Context(), path, Exclusive)
	testutil.Must(t, err)
	second := make(chan func(), 1)
	go func() {
		unlock, err := Wait(t.Context(), path, Exclusive)
		if err != nil {
			t.Error(err)
		}
		second <- unlock
	}()
	for deadline := time.Now().Add(30 * time.Second); opened(t, path) < 2; time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("no goroutine waits for the lock")
		}
	}
	testutil.Must(t, os.Remove(path))
	first()
	unlock := <-second
	gone, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := Wait(gone, path, Exclusive); !errors.Is(err, context.Canceled) {
		t.Errorf("a third one, with the second one having the lock: %v", err)
	}
	unlock()
}

// opened counts this process's descriptors of a file.
func opened(t *testing.T, path string) (n int) {
	t.Helper()
	all, err := filepath.Glob("/proc/self/fd/*")
	testutil.Must(t, err)
	for _, fd := range all {
		if to, err := os.Readlink(fd); err == nil && to == path {
			n++
		}
	}
	return n
}

func TestCheckReportsLockWithoutCreatingFile(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	path := filepath.Join(dir, "lock")
	if err := Check(path); err != nil {
		t.Errorf("without a file: %v", err)
	}
	if _, err := os.Lstat(path); !os.IsNotExist(err) {
		t.Errorf("Check created the file: %v", err)
	}
	unlock, err := Wait(t.Context(), path, Exclusive)
	testutil.Must(t, err)
	if err := Check(path); err != nil {
		t.Errorf("with a holder: %v", err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
	defer cancel()
	if err := CheckShared(ctx, path); !errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), path) {
		t.Errorf("with an exclusive holder: %v", err)
	}
	unlock()
	if unlock, err = Wait(t.Context(), path, Shared); err != nil {
		t.Fatal(err)
	}
	if err := CheckShared(t.Context(), path); err != nil {
		t.Errorf("with a shared holder: %v", err)
	}
	unlock()
	link := filepath.Join(dir, "link")
	testutil.Must(t, os.Symlink(path, link))
	for _, bad := range []string{dir, link, filepath.Join(dir, "none", "lock")} {
		if Check(bad) == nil || CheckShared(t.Context(), bad) == nil {
			t.Errorf("Check accepts %s", bad)
		}
		if _, err := Wait(t.Context(), bad, Shared); err == nil {
			t.Errorf("Acquire accepts %s", bad)
		}
	}
}

func TestErrorWithoutPIDOfHolder(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "lock")
	lock, err := Acquire(path)
	testutil.Must(t, err)
	defer lock.Release()
	for _, content := range []string{"", "garbage", "-4"} {
		testutil.Must(t, os.WriteFile(path, []byte(content), 0o600))
		if _, err := Acquire(path); err == nil || !strings.Contains(err.Error(), "another process holds it") {
			t.Errorf("with %q in the file: %v", content, err)
		}
	}
}

func TestSymlinkIsNotFollowed(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	testutil.Must(t, os.Symlink(filepath.Join(dir, "victim"), filepath.Join(dir, "lock")))
	if _, err := Acquire(filepath.Join(dir, "lock")); err == nil {
		t.Error("followed")
	}
	if _, err := Wait(t.Context(), filepath.Join(dir, "lock"), Exclusive); err == nil {
		t.Error("Wait followed the symlink")
	}
	if _, err := os.Lstat(filepath.Join(dir, "victim")); !os.IsNotExist(err) {
		t.Error("the target was created")
	}
}
