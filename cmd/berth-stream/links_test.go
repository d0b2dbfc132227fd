package main

import (
	"os/exec"
	"slices"
	"strings"
	"testing"
)

// The program stays on the node beside the daemon, so it links no gRPC and no protobuf runtime.
func TestStreamLinksNoGRPC(t *testing.T) {
	out, err := exec.Command("go", "list", "-deps", ".").Output()
	if err != nil {
		t.Fatalf("go list: %v", err)
	}
	linked := strings.Fields(string(out))
	if !slices.Contains(linked, "berth/server/streaming") {
		t.Fatalf("the list lacks the streaming server: %d packages", len(linked))
	}
	for _, p := range linked {
		if strings.HasPrefix(p, "google.golang.org/grpc") || p == "google.golang.org/protobuf/proto" {
			t.Errorf("berth-stream links %s", p)
		}
	}
}
