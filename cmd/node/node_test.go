package node

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestSystemdCgroup(t *testing.T) {
	t.Parallel()
	here, gone := t.TempDir(), filepath.Join(t.TempDir(), "none")
	for _, tc := range []struct {
		driver, marker string
		v2, want, fail bool
	}{
		{"auto", here, true, true, false},
		{"auto", here, false, false, false},
		{"auto", gone, true, false, false},
		{"cgroupfs", here, true, false, false},
		{"systemd", here, true, true, false},
		{"systemd", here, false, true, false},
		{"systemd", gone, true, false, true},
	} {
		got, err := systemdCgroup(tc.driver, tc.marker, tc.v2)
		if got != tc.want || (err != nil) != tc.fail {
			t.Errorf("%+v: %t, %v", tc, got, err)
		}
	}
}

func TestFindShim(t *testing.T) {
	if got, err := FindShim("/opt/shim"); got != "/opt/shim" || err != nil {
		t.Errorf("configured: %s, %v", got, err)
	}
	dir := t.TempDir()
	t.Setenv("PATH", dir)
	if _, err := FindShim(""); err == nil || !strings.Contains(err.Error(), "shim_path") {
		t.Errorf("without one: %v", err)
	}
	shim := filepath.Join(dir, "berth-shim")
	if err := os.WriteFile(shim, []byte("#!/bin/sh\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	if got, err := FindShim(""); got != shim || err != nil {
		t.Errorf("in PATH: %s, %v", got, err)
	}
}
