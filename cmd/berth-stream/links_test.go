package main

import (
	"os/exec"
	"slices"
	"strings"
	"testing"
)

// The program stays on the node beside the daemon, and most of its memory is its file. So it links
// no gRPC, no protobuf runtime and no types of Kubernetes' API.
func TestStreamLinksLittle(t *testing.T) {
	out, err := exec.Command("go", "list", "-deps", ".").Output()
	if err != nil {
		t.Fatalf("go list: %v", err)
	}
	linked := strings.Fields(string(out))
	if !slices.Contains(linked, "berth/server/streaming") {
		t.Fatalf("the list lacks the streaming server: %d packages", len(linked))
	}
	for _, p := range linked {
		if strings.HasPrefix(p, "google.golang.org/grpc") || p == "google.golang.org/protobuf/proto" ||
			strings.HasPrefix(p, "k8s.io/apimachinery/") {
			t.Errorf("berth-stream links %s", p)
		}
	}
}
