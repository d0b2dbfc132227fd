package main

import (
	"os/exec"
	"slices"
	"strings"
	"testing"
)

// The daemon runs as root and reads hostile input, so it links no code for people: commands,
// Kubernetes' manifests, tables and templates. A path that ends in "/" stands for all packages
// below it.
//
// text/template and html/template also call methods by name, so the linker could remove none. The
// package text/tabwriter stays: Go's runtime/pprof uses it.
var notLinked = []string{
	"berth/cmd/berth/", "github.com/spf13/cobra",
	"k8s.io/api/", "k8s.io/client-go/", "k8s.io/apimachinery/pkg/util/yaml",
	"html/template", "text/template",
}

func TestDaemonLinksNoCommands(t *testing.T) {
	cmd := exec.Command("go", "list", "-deps", "-tags", "grpcnotrace,nri_no_wasm", ".")
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("go list: %v", err)
	}
	linked := strings.Fields(string(out))
	if !slices.Contains(linked, "berth/sandbox") {
		t.Fatalf("the list lacks the daemon's own packages: %d packages", len(linked))
	}
	for _, p := range linked {
		for _, not := range notLinked {
			if p == not || strings.HasSuffix(not, "/") && strings.HasPrefix(p, not) {
				t.Errorf("the daemon links %s", p)
			}
		}
	}
}
