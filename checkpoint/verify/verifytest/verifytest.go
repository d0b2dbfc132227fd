// Package verifytest has the images of containers for tests. CRIU made them on Linux with cgroups
// of version 1. That of CRIU 4.2.1 ran a program with two processes, a second thread and open files
// of many kinds. That of CRIU 4.1.1, which could not save internet sockets there, ran a shell with
// a child and a deleted file. Pages are zeroed, and names of the machine are replaced.
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

// Versions are the versions of CRIU with images. Tests change those of the first.
var Versions = []string{"criu-4.2.1", old}

const old = "criu-4.1.1"

// Files that are packed with the images of old: what its container may have.
const (
	specFile   = "spec.json"
	filterFile = "seccomp.bpf"
)

func read(t testing.TB, name string) []byte {
	t.Helper()
	data, err := testdata.ReadFile("testdata/" + name)
	testutil.Must(t, err)
	return data
}

// eachFile calls do with each file of a version.
func eachFile(t testing.TB, version string, do func(name string, data []byte)) {
	t.Helper()
	unzipped, err := gzip.NewReader(bytes.NewReader(read(t, version+".tar.gz")))
	testutil.Must(t, err)
	for r := tar.NewReader(unzipped); ; {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			return
		}
		testutil.Must(t, err)
		data, err := io.ReadAll(r)
		testutil.Must(t, err)
		do(h.Name, data)
	}
}

// Images writes the images of a version of CRIU into a new directory and returns its path.
func Images(t testing.TB, version string) string {
	t.Helper()
	dir := t.TempDir()
	eachFile(t, version, func(name string, data []byte) {
		if name != specFile && name != filterFile {
			testutil.Must(t, os.WriteFile(filepath.Join(dir, name), data, 0o600))
		}
	})
	return dir
}

// ExpectedOf returns what the container of a version may have.
func ExpectedOf(t testing.TB, version string) verify.Expected {
	t.Helper()
	e := Expected(t)
	if version != old {
		return e
	}
	e.Spec, e.ExternalFiles = new(specs.Spec), []string{"pipe:[berth-null]"}
	eachFile(t, version, func(name string, data []byte) {
		switch name {
		case specFile:
			testutil.Must(t, json.Unmarshal(data, e.Spec))
		case filterFile:
			e.Seccomp = data
		}
	})
	return e
}

// Expected returns what the container of the first version may have.
func Expected(t testing.TB) verify.Expected {
	t.Helper()
	e := verify.Expected{Spec: new(specs.Spec), Seccomp: read(t, filterFile), Memory: 1 << 30,
		AbsentPaths: []string{"/proc/kcore"}, // the kernel that made the images has none
		Cgroups: []string{"", "blkio", "cpu", "cpuacct", "cpuset", "devices",
			"freezer", "memory", "name=systemd", "pids"},
		UnprivilegedPort: 1024,
	}
	testutil.Must(t, json.Unmarshal(read(t, specFile), e.Spec))
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
