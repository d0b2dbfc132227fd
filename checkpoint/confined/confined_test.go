package confined

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"

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

func TestVerifyInConfinedProgram(t *testing.T) {
	for _, version := range verifytest.Versions {
		r, err := Verify(t.Context(), built, verifytest.Open(t, verifytest.Images(t, version)), verifytest.Expected(t))
		testutil.Must(t, err)
		if len(r.Differences) > 0 || len(r.Processes) != 2 || r.Memory == 0 {
			t.Errorf("%s: %+v", version, r)
		}
	}
}

func TestVerifyReportsDifferences(t *testing.T) {
	expected := verifytest.Expected(t)
	expected.Spec.Process.Capabilities.Bounding = nil
	r, err := Verify(t.Context(), built, verifytest.Open(t, verifytest.Images(t, verifytest.Versions[0])), expected)
	testutil.Must(t, err)
	if len(r.Differences) != 3 || !strings.Contains(r.Differences[0].Archive, "CAP_KILL") { // of three threads
		t.Errorf("%+v", r.Differences)
	}
}

// A program that cannot read the images, dies or says something else gives no report.
func TestVerifyWithoutReport(t *testing.T) {
	images := verifytest.Images(t, verifytest.Versions[0])
	testutil.Must(t, os.WriteFile(filepath.Join(images, "pstree.img"), []byte("no image"), 0o600))
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
			r, err := Verify(tc.ctx, tc.program, verifytest.Open(t, images), verifytest.Expected(t))
			if r != nil || err == nil || errdefs.Code(err) != tc.code || !strings.Contains(err.Error(), tc.text) {
				t.Errorf("%+v, %v: %v", r, errdefs.Code(err), err)
			}
		})
	}
}
