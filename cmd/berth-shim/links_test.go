package main

import (
	"os/exec"
	"slices"
	"strings"
	"testing"
)

// Each pod and container starts a launcher of its own, so berth-shim links no gRPC and no protobuf
// runtime. The package protowire stays: CRIU's protocol needs it.
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
		if strings.HasPrefix(p, "google.golang.org/grpc") || p == "google.golang.org/protobuf/proto" {
			t.Errorf("berth-shim links %s", p)
		}
	}
}
