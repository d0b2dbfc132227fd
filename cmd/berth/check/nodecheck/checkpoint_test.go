package nodecheck

import (
	"compress/gzip"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// fakeCRIU writes a program that answers --version and check as CRIU does.
func fakeCRIU(t *testing.T, version, check string, code int) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "criu")
	script := fmt.Sprintf("#!/bin/sh\ncase $1 in --version) echo 'Version: %s' ;; check) echo '%s'; exit %d ;; esac\n", version, check, code)
	if err := os.WriteFile(path, []byte(script), 0o700); err != nil {
		t.Fatal(err)
	}
	return path
}

func TestCheckpointFindings(t *testing.T) {
	complete := map[string]string{
		"/proc/sys/kernel/ns_last_pid": "1\n", "/sys/fs/cgroup/freezer/tasks": "",
		"/proc/self/status": "Name:\tx\nCapEff:\t000001ffffffffff\nCapBnd:\t0\n",
	}
	without := func(name string) map[string]string {
		files := map[string]string{}
		for path, content := range complete {
			if path != name {
				files[path] = content
			}
		}
		return files
	}
	for _, tc := range []struct {
		name   string
		criu   string
		minor  int // of Linux 6
		files  map[string]string
		level  Level
		found  string
		absent bool // CRIU is not configured
	}{
		{"complete", fakeCRIU(t, "4.2.1", "Looks good.", 0), 18, complete, OK, "CRIU 4.2.1", false},
		{"missing", "/no/such/criu", 18, complete, Warning, "CRIU is not installed", false},
		{"too old", fakeCRIU(t, "4.1", "Looks good.", 0), 12, complete, Warning, "4.1.1 or later", false},
		{"too old for this kernel", fakeCRIU(t, "4.1.1", "Looks good.", 0), 18, complete, Warning, "4.1.1 is too old for Linux", false},
		{"old enough for an older kernel", fakeCRIU(t, "4.1.1", "Looks good.", 0), 12, complete, OK, "CRIU 4.1.1", false},
		{"no version", fakeCRIU(t, "x", "", 0), 12, complete, Warning, "parse the version", false},
		{"failing check", fakeCRIU(t, "4.2.1", "Error (x): no PTRACE", 1), 12, complete, Warning, "no PTRACE", false},
		{"kernel option", fakeCRIU(t, "4.2.1", "", 0), 12, without("/proc/sys/kernel/ns_last_pid"), Warning, "CONFIG_CHECKPOINT_RESTORE", false},
		{"no freezer", fakeCRIU(t, "4.2.1", "", 0), 12, without("/sys/fs/cgroup/freezer/tasks"), Warning, "freezer", false},
		{"no capability", fakeCRIU(t, "4.2.1", "", 0), 12, map[string]string{
			"/proc/sys/kernel/ns_last_pid": "", "/sys/fs/cgroup/freezer/tasks": "", "/proc/self/status": "CapEff:\t00000000feffffff\n",
		}, Warning, "CAP_SYS_RESOURCE", false},
		{"not installed", "", 18, nil, OK, "not installed", true},
	} {
		t.Run(tc.name, func(t *testing.T) {
			if tc.absent {
				t.Setenv("PATH", t.TempDir())
			}
			n := machine(t, kernel(6, tc.minor), tc.files)
			n.Config.CheckpointCRIU = tc.criu
			if f := find(t, checkCheckpoints(t.Context(), n), checkpoints, tc.found); f.Level != tc.level {
				t.Errorf("%+v, want %s", f, tc.level)
			}
		})
	}
}

func TestRestoresWithSELinux(t *testing.T) {
	for mode, want := range map[string]Level{"off": OK, "userns": Warning, "trusted": Warning} {
		n := machine(t, kernel(6, 12), nil)
		n.Facts.SELinux = true
		n.Config.CheckpointCRIU, n.Config.CheckpointRestore = fakeCRIU(t, "4.2.1", "", 0), mode
		f := slices.IndexFunc(checkCheckpoints(t.Context(), n), func(f Finding) bool { return strings.Contains(f.Found, "has SELinux") })
		if (f >= 0) != (want == Warning) {
			t.Errorf("checkpoint.restore is %s: found %v, want %v", mode, f >= 0, want)
		}
	}
}

// The answers agree with the configuration of this kernel.
func TestKernelOptions(t *testing.T) {
	file, err := os.Open("/proc/config.gz")
	if err != nil {
		t.Skipf("NOT TESTED: this kernel does not show its configuration: %v", err)
	}
	defer file.Close()
	unpacked, err := gzip.NewReader(file)
	if err != nil {
		t.Fatal(err)
	}
	config, err := io.ReadAll(unpacked)
	if err != nil {
		t.Fatal(err)
	}
	for _, option := range append(kernelOptions,
		kernelOption{"CONFIG_INET_RAW_DIAG", "", hasDiag(unix.AF_INET, unix.IPPROTO_RAW)},
		kernelOption{"CONFIG_VSOCKETS_DIAG", "", hasDiag(unix.AF_VSOCK, 0)},
		kernelOption{"CONFIG_XDP_SOCKETS_DIAG", "", hasDiag(unix.AF_XDP, 0)},
	) {
		set := regexp.MustCompile(`(?m)^` + option.name + `=[ym]$`).Match(config)
		if has := option.has(&Node{root: "/"}); has != set {
			t.Errorf("%s: found %v, configured %v", option.name, has, set)
		}
	}
}
