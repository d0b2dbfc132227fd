package main

import (
	"errors"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"
)

// Each pod and container starts a launcher of its own, so berth-shim links no gRPC and no protobuf
// runtime.
func TestShimLinksNoGRPC(t *testing.T) {
	out, err := exec.Command("go", "list", "-deps", "-tags", "seccomp", ".").Output()
	if err != nil {
		t.Fatalf("go list: %v", err)
	}
	linked := strings.Fields(string(out))
	if !slices.Contains(linked, "berth/shim/launcher") {
		t.Fatalf("the list lacks the launcher: %d packages", len(linked))
	}
	for _, p := range linked {
		if strings.HasPrefix(p, "google.golang.org/") {
			t.Errorf("berth-shim links %s", p)
		}
	}
}

// mostInits bounds the packages that berth-shim initializes. Each launcher, each container and each
// exec starts the program, so an initialization counts two or three times per pod.
const mostInits = 88

// The bound fails if a new import adds initializations. Packages whose initialization is slow must
// not be linked at all.
func TestInits(t *testing.T) {
	program := t.TempDir() + "/berth-shim"
	if out, err := exec.Command("go", "build", "-tags", "seccomp", "-o", program, ".").CombinedOutput(); err != nil {
		t.Fatalf("go build: %v\n%s", err, out)
	}
	shim := exec.Command(program) // without arguments it only says that it does not work by hand
	shim.Env = append(os.Environ(), "GODEBUG=inittrace=1")
	trace, err := shim.CombinedOutput()
	if exit := (*exec.ExitError)(nil); !errors.As(err, &exit) {
		t.Fatalf("%v: %v\n%s", shim, err, trace)
	}
	var inits []string
	for line := range strings.Lines(string(trace)) {
		if fields := strings.Fields(line); len(fields) > 1 && fields[0] == "init" {
			inits = append(inits, fields[1])
		}
	}
	if !slices.Contains(inits, "main") || len(inits) > mostInits {
		t.Errorf("%d packages are initialized, at most %d are allowed: %v", len(inits), mostInits, inits)
	}
	for _, slow := range []string{"runtime/metrics", "google.golang.org/protobuf/internal/detrand"} {
		if slices.Contains(inits, slow) {
			t.Errorf("%s is initialized", slow)
		}
	}
}
