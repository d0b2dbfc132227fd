package stats

import (
	"math"
	"os"
	"os/exec"
	"strconv"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"berth/internal/testutil"
)

func TestParseOpenFiles(t *testing.T) {
	t.Parallel()
	const head = "Limit                     Soft Limit           Hard Limit           Units     \n" +
		"Max processes             127394               127394               processes \n"
	for name, c := range map[string]struct {
		limits string
		want   uint64
		ok     bool
	}{
		"number":    {head + "Max open files            1024                 524288               files     \n", 1024, true},
		"unlimited": {head + "Max open files            unlimited            unlimited            files     \n", math.MaxUint64, true},
		"none":      {head, 0, false},
		"cut off":   {head + "Max open files            10", 0, false},
		"no number": {head + "Max open files            x                    y                    files     \n", 0, false},
		"nothing":   {"", 0, false},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := parseOpenFiles(c.limits)
			if got != c.want || (err == nil) != c.ok {
				t.Errorf("%d, %v", got, err)
			}
		})
	}
}

// Reading the limit of another user's process does not need CAP_SYS_RESOURCE.
func TestOpenFilesLimit(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("it starts a process of another user")
	}
	cmd := exec.Command("sleep", "1000")
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
	testutil.Must(t, cmd.Start())
	defer cmd.Wait()
	defer cmd.Process.Kill()
	var own unix.Rlimit
	testutil.Must(t, unix.Prlimit(0, unix.RLIMIT_NOFILE, nil, &own))
	for _, path := range []string{"/proc/self/limits", "/proc/" + strconv.Itoa(cmd.Process.Pid) + "/limits"} {
		if got, err := openFilesLimit(path); err != nil || got == 0 || path == "/proc/self/limits" && got != own.Cur {
			t.Errorf("%s: %d, %v; ours is %d", path, got, err, own.Cur)
		}
	}
}
