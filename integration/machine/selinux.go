package machine

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"strings"
	"testing"

	"github.com/opencontainers/selinux/go-selinux"
	"golang.org/x/sys/unix"

	"berth/internal/testutil"
)

// NeedSELinux skips the test on a machine that does not enforce SELinux.
func NeedSELinux(t *testing.T) {
	t.Helper()
	if !selinux.GetEnabled() || selinux.EnforceMode() != selinux.Enforcing {
		t.Skip("NOT TESTED: this machine does not enforce SELinux")
	}
}

// RestoreLabels labels files as the policy's file contexts say, which an operator does for
// directories at other places than the default ones. It does nothing without SELinux.
func RestoreLabels(t *testing.T, paths ...string) {
	t.Helper()
	if !selinux.GetEnabled() {
		return
	}
	out, err := exec.CommandContext(context.Background(), "restorecon", append([]string{"-R"}, paths...)...).CombinedOutput()
	if err != nil {
		t.Fatalf("restorecon %q: %v: %s", paths, err, out)
	}
}

// WatchDenials returns a function that returns what SELinux has denied since the call, as lines of
// the kernel's log. Without SELinux there are none.
func WatchDenials(t *testing.T) (denials func() []string) {
	t.Helper()
	if !selinux.GetEnabled() {
		return func() []string { return nil }
	}
	log, err := os.OpenFile("/dev/kmsg", os.O_RDONLY|unix.O_NONBLOCK, 0)
	testutil.Must(t, err)
	t.Cleanup(func() { testutil.Must(t, log.Close()) })
	_, err = log.Seek(0, unix.SEEK_END)
	testutil.Must(t, err)
	return func() (denied []string) {
		for {
			// One read returns one record.
			record := make([]byte, 8192)
			n, err := unix.Read(int(log.Fd()), record)
			switch {
			case errors.Is(err, unix.EAGAIN):
				return denied
			case err != nil: // EPIPE: records were overwritten before they were read
				t.Fatalf("read the kernel's log: %v", err)
			}
			if text := string(record[:n]); strings.Contains(text, "avc:  denied") {
				text, _, _ = strings.Cut(text, "\n")
				_, text, _ = strings.Cut(text, "avc:  ")
				denied = append(denied, text)
			}
		}
	}
}
