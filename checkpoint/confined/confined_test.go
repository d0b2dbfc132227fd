package confined

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"

	"berth/checkpoint/archive"
	"berth/checkpoint/verify"
	"berth/checkpoint/verify/verifytest"
	"berth/internal/errdefs"
	"berth/internal/testutil"
)

// built is the program berth-verify, without what verifies signatures.
var built string

func TestMain(m *testing.M) {
	testutil.MainNeedsRoot()
	os.Exit(run(m))
}

func run(m *testing.M) int {
	dir, err := os.MkdirTemp("", "berth-verify-")
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer os.RemoveAll(dir)
	built = filepath.Join(dir, "berth-verify")
	cmd := exec.Command("go", "build", "-o", built, "berth/cmd/berth-verify")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0") // as contrib/build does
	cmd.Stdout, cmd.Stderr = os.Stderr, os.Stderr
	if err := cmd.Run(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return m.Run()
}

// container makes the directory of a container with the images of a version of CRIU.
func container(t *testing.T, version string) string {
	t.Helper()
	dir := t.TempDir()
	testutil.Must(t, os.Rename(verifytest.Images(t, version), filepath.Join(dir, archive.ImagesDir)))
	return dir
}

func TestVerifyInConfinedProgram(t *testing.T) {
	for _, version := range verifytest.Versions {
		dir := verifytest.Open(t, container(t, version))
		r, err := Container(t.Context(), built, dir, []verify.Expected{verifytest.ExpectedOf(t, version)})
		testutil.Must(t, err)
		if len(r.Differences) > 0 || len(r.Processes) != 2 || r.Memory == 0 {
			t.Errorf("%s: %+v", version, r)
		}
	}
}

// The images may fit any of the filters that a launcher could load.
func TestVerifyWithSeveralFilters(t *testing.T) {
	other := verifytest.Expected(t)
	other.Seccomp = []byte("12345678")
	dir := verifytest.Open(t, container(t, verifytest.Versions[0]))
	r, err := Container(t.Context(), built, dir, []verify.Expected{other, verifytest.Expected(t), other})
	testutil.Must(t, err)
	if len(r.Differences) > 0 {
		t.Errorf("%+v", r.Differences)
	}
	r, err = Container(t.Context(), built, dir, []verify.Expected{other, other})
	testutil.Must(t, err)
	if len(r.Differences) == 0 || !strings.Contains(r.Differences[0].Field, "seccomp") {
		t.Errorf("%+v", r.Differences)
	}
}

func TestVerifyReportsDifferences(t *testing.T) {
	expected := verifytest.Expected(t)
	expected.Spec.Process.Capabilities.Bounding = nil
	dir := verifytest.Open(t, container(t, verifytest.Versions[0]))
	r, err := Container(t.Context(), built, dir, []verify.Expected{expected})
	testutil.Must(t, err)
	if len(r.Differences) != 3 || !strings.Contains(r.Differences[0].Archive, "CAP_KILL") { // of three threads
		t.Errorf("%+v", r.Differences)
	}
}

// writeTar writes a tar with one file.
func writeTar(t *testing.T, path string, h tar.Header) {
	t.Helper()
	var data bytes.Buffer
	w := tar.NewWriter(&data)
	testutil.Must(t, w.WriteHeader(&h))
	testutil.Must(t, w.Close())
	testutil.Must(t, os.WriteFile(path, data.Bytes(), 0o600))
}

// The files of a writable layer and of /dev/shm are compared in the program, too. A missing tar is
// empty.
func TestVerifyFiles(t *testing.T) {
	dir := container(t, verifytest.Versions[0])
	expected := verifytest.Expected(t)
	expected.Spec.Process.User.UID = 1000 // not the owner
	runs := map[string]func() (*verify.Report, error){
		archive.RootfsDiffFile: func() (*verify.Report, error) {
			return Container(t.Context(), built, verifytest.Open(t, dir), []verify.Expected{expected})
		},
		archive.ShmFile: func() (*verify.Report, error) { return Shm(t.Context(), built, verifytest.Open(t, dir)) },
	}
	for name, run := range runs {
		t.Run(name, func(t *testing.T) {
			path := filepath.Join(dir, name)
			defer os.Remove(path)
			writeTar(t, path, tar.Header{Name: "program", Typeflag: tar.TypeReg, Mode: 0o4755})
			r, err := run()
			testutil.Must(t, err)
			if len(r.Differences) != 1 || r.Differences[0].Field != "file program" {
				t.Errorf("set-user-ID file: %+v", r.Differences)
			}
			testutil.Must(t, os.WriteFile(path, []byte("this is not a tar"), 0o600))
			if r, err := run(); errdefs.Code(err) != codes.InvalidArgument || !strings.Contains(err.Error(), name) {
				t.Errorf("no tar: %+v, %v", r, err)
			}
			testutil.Must(t, os.Remove(path))
			testutil.Must(t, os.Symlink("/etc/passwd", path))
			if r, err := run(); errdefs.Code(err) != codes.InvalidArgument {
				t.Errorf("symbolic link: %+v, %v", r, err)
			}
		})
	}
	if r, err := Shm(t.Context(), built, verifytest.Open(t, dir)); err != nil || len(r.Differences) > 0 {
		t.Errorf("without a tar: %+v, %v", r, err)
	}
}

// A program that cannot read the files, dies or says something else gives no report.
func TestVerifyWithoutReport(t *testing.T) {
	dir := container(t, verifytest.Versions[0])
	testutil.Must(t, os.WriteFile(filepath.Join(dir, archive.ImagesDir, "pstree.img"), []byte("no image"), 0o600))
	liar := filepath.Join(t.TempDir(), "liar")
	testutil.Must(t, os.WriteFile(liar, []byte("#!/bin/sh\necho '{\"report\":{\"processes\":[],\"memory\":0,\"openFiles\":0}} more'\n"), 0o700))
	dead := filepath.Join(t.TempDir(), "dead")
	testutil.Must(t, os.WriteFile(dead, []byte("#!/bin/sh\necho oh no >&2\nexit 3\n"), 0o700))
	canceled, cancel := context.WithCancelCause(t.Context())
	gone := errors.New("the client is gone")
	cancel(gone)
	for _, tc := range []struct {
		name, program, text string
		ctx                 context.Context
		code                codes.Code
	}{
		{"broken image", built, "pstree.img: wrong magic", t.Context(), codes.InvalidArgument},
		{"dead program", dead, "exit status 3: \"oh no\"", t.Context(), codes.Internal},
		{"false answer", liar, "more than one", t.Context(), codes.Internal},
		{"no program", filepath.Join(t.TempDir(), "none"), "no such file", t.Context(), codes.Internal},
		{"canceled", built, gone.Error(), canceled, codes.Unknown},
	} {
		t.Run(tc.name, func(t *testing.T) {
			r, err := Container(tc.ctx, tc.program, verifytest.Open(t, dir), []verify.Expected{verifytest.Expected(t)})
			if r != nil || err == nil || errdefs.Code(err) != tc.code || !strings.Contains(err.Error(), tc.text) {
				t.Errorf("%+v, %v: %v", r, errdefs.Code(err), err)
			}
		})
	}
}
