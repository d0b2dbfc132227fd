package nri

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"berth/internal/testutil"
)

// installProgram installs a shell script as a plugin. The script records its PID, which pid
// returns.
func installProgram(t *testing.T, cfg Config, name, script string) (pid func() int) {
	t.Helper()
	file := filepath.Join(t.TempDir(), "pid")
	program := fmt.Sprintf("#!/bin/sh\necho $$ >%s\n%s\n", file, script)
	testutil.Must(t, errors.Join(os.MkdirAll(cfg.PluginDir, 0o755), os.WriteFile(filepath.Join(cfg.PluginDir, name), []byte(program), 0o755)))
	return func() int {
		t.Helper()
		noted, err := os.ReadFile(file)
		testutil.Must(t, err)
		pid, err := strconv.Atoi(strings.TrimSpace(string(noted)))
		testutil.Must(t, err)
		return pid
	}
}

// gone waits until no process has that PID, not even a zombie.
func gone(t *testing.T, what string, pid int) {
	t.Helper()
	deadline := time.Now().Add(time.Minute)
	for !errors.Is(syscall.Kill(pid, 0), syscall.ESRCH) {
		if time.Now().After(deadline) {
			t.Fatalf("%s is still there, pid %d", what, pid)
		}
		time.Sleep(time.Millisecond)
	}
}

// programs are installed plugins that never register.
type programs struct {
	ends, stays func() int // PIDs: one exits at once, the other closes its connection and stays
	other       *exec.Cmd  // a process that is not a plugin
}

func installPrograms(t *testing.T, cfg Config) programs {
	t.Helper()
	other := exec.Command("true")
	testutil.Must(t, other.Start())
	return programs{
		ends:  installProgram(t, cfg, "10-ends", "exit 3"),
		stays: installProgram(t, cfg, "20-stays", "exec 3>&- </dev/null >/dev/null 2>&1; exec sleep 1000"),
		other: other,
	}
}

// Programs are reaped when they exit, and Close kills them. Other child processes are not affected.
func testUnregisteredPrograms(t *testing.T, p *Plugins, programs programs) {
	gone(t, "the plugin that ended", programs.ends())
	if err := syscall.Kill(programs.stays(), 0); err != nil {
		t.Fatalf("the plugin that closed its connection: %v", err)
	}
	p.Close()
	gone(t, "the plugin that closed its connection", programs.stays())
	if err := programs.other.Wait(); err != nil {
		t.Errorf("child of another goroutine: %v", err)
	}
}
