package machine

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"testing"

	"berth/internal/testutil"
)

// NeedAppArmor skips the test on a machine without AppArmor.
func NeedAppArmor(t *testing.T) {
	t.Helper()
	if enabled := ReadLines("/sys/module/apparmor/parameters/enabled"); len(enabled) == 0 || enabled[0] != "Y" {
		t.Skip("this machine's kernel has no AppArmor")
	}
	if _, err := os.Stat("/sys/kernel/security/apparmor/profiles"); err != nil {
		t.Skip("this machine has no securityfs")
	}
	if _, err := exec.LookPath("apparmor_parser"); err != nil {
		t.Skip("apparmor_parser is not installed")
	}
}

// LoadProfile loads an AppArmor profile that denies only writes to /denied. It is unloaded when the
// test ends.
func LoadProfile(t *testing.T) (name string) {
	t.Helper()
	name = fmt.Sprintf("berth-test-%d", os.Getpid())
	text := fmt.Sprintf("profile %s flags=(attach_disconnected,mediate_deleted) {\n"+
		"  file,\n  capability,\n  network,\n  signal,\n  ptrace,\n  unix,\n  mount,\n  umount,\n  deny /denied w,\n}\n", name)
	parse := func(action string) error {
		cmd := exec.CommandContext(context.Background(), "apparmor_parser", "--skip-cache", action)
		cmd.Stdin = strings.NewReader(text)
		if out, err := cmd.CombinedOutput(); err != nil {
			return fmt.Errorf("apparmor_parser %s: %w: %s", action, err, out)
		}
		return nil
	}
	testutil.Must(t, parse("--replace"))
	t.Cleanup(func() { testutil.Must(t, parse("--remove")) })
	return name
}

// Confinement returns the kernel's AppArmor label of a process.
func Confinement(t *testing.T, pid int) string {
	t.Helper()
	label, err := os.ReadFile(fmt.Sprintf("/proc/%d/attr/current", pid))
	testutil.Must(t, err)
	return strings.TrimRight(string(label), "\n\x00")
}
