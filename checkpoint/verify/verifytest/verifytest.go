// Package verifytest has the images of a container for tests. CRIU made them on Linux with cgroups of
// version 1. The container ran a program with two processes, a second thread and open files of many
// kinds. Its pages are zeroed.
package verifytest

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"embed"
	"encoding/json"
	"errors"
	"io"
	"os"
	"path/filepath"
	"testing"

	"github.com/opencontainers/runtime-spec/specs-go"

	"berth/checkpoint/verify"
	"berth/internal/testutil"
)

//go:embed testdata
var testdata embed.FS

// Versions are the versions of CRIU with images.
var Versions = []string{"criu-4.2.1"}

func read(t testing.TB, name string) []byte {
	t.Helper()
	data, err := testdata.ReadFile("testdata/" + name)
	testutil.Must(t, err)
	return data
}

// Images writes the images of a version of CRIU into a new directory and returns its path.
func Images(t testing.TB, version string) string {
	t.Helper()
	unzipped, err := gzip.NewReader(bytes.NewReader(read(t, version+".tar.gz")))
	testutil.Must(t, err)
	dir := t.TempDir()
	for r := tar.NewReader(unzipped); ; {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			return dir
		}
		testutil.Must(t, err)
		data, err := io.ReadAll(r)
		testutil.Must(t, err)
		testutil.Must(t, os.WriteFile(filepath.Join(dir, h.Name), data, 0o600))
	}
}

// Expected returns what the container may have.
func Expected(t testing.TB) verify.Expected {
	t.Helper()
	e := verify.Expected{Spec: new(specs.Spec), Seccomp: read(t, "seccomp.bpf"), Memory: 1 << 30,
		AbsentPaths: []string{"/proc/kcore"}, // the kernel that made the images has none
		Cgroups: []string{"", "blkio", "cpu", "cpuacct", "cpuset", "devices",
			"freezer", "memory", "name=systemd", "pids"},
		UnprivilegedPort: 1024,
	}
	testutil.Must(t, json.Unmarshal(read(t, "spec.json"), e.Spec))
	const infinity = 1<<64 - 1
	for _, name := range []string{"CPU", "FSIZE", "DATA", "STACK", "CORE", "RSS", "NPROC", "NOFILE", "MEMLOCK", "AS",
		"LOCKS", "SIGPENDING", "MSGQUEUE", "NICE", "RTPRIO", "RTTIME"} {
		e.Rlimits = append(e.Rlimits, specs.POSIXRlimit{Type: "RLIMIT_" + name, Hard: infinity})
	}
	return e
}

// Open opens a directory until the end of the test.
func Open(t testing.TB, dir string) *os.File {
	t.Helper()
	file, err := os.Open(dir)
	testutil.Must(t, err)
	t.Cleanup(func() { testutil.Must(t, file.Close()) })
	return file
}
