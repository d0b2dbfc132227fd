package subject

import (
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"
)

func TestParseUsage(t *testing.T) {
	for content, want := range map[string]time.Duration{
		"1234567\n": 1234567,
		"usage_usec 15\nuser_usec 10\nsystem_usec 5\nnr_periods 0\n": 15 * time.Microsecond,
	} {
		if got, err := parseUsage(content); err != nil || got != want {
			t.Errorf("%q: got %v, %v, want %v", content, got, err, want)
		}
	}
	for _, content := range []string{"", "max\n", "user_usec 10\n"} {
		if got, err := parseUsage(content); err == nil {
			t.Errorf("%q: got %v, want an error", content, got)
		}
	}
}

func TestDisk(t *testing.T) {
	s := &Subject{Root: t.TempDir()}
	path := filepath.Join(s.Root, "f")
	if err := os.WriteFile(path, make([]byte, 5000), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Link(path, path+"2"); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink("f", path+"3"); err != nil {
		t.Fatal(err)
	}
	hole, err := os.Create(path + "4")
	if err != nil {
		t.Fatal(err)
	}
	if err := hole.Truncate(1 << 30); err != nil {
		t.Fatal(err)
	}
	if err := hole.Close(); err != nil {
		t.Fatal(err)
	}
	if got, err := s.Disk(); err != nil || got != 5000 {
		t.Errorf("got %d, %v, want 5000", got, err)
	}
}

func TestParseTrace(t *testing.T) {
	const text = `[{"monotonic": 5, "spans": [{"name": "RunPodSandbox", "depth": 0, "from": 0, "took": 9}, {"name": "network", "depth": 1, "from": 2, "took": 3}]}, {"spans": []}]`
	got, err := parseTrace(text)
	want := []Span{{Name: "network", Depth: 1, Begin: 2, End: 5}}
	if err != nil || len(got) != 1 || !slices.Equal(got["RunPodSandbox"], want) {
		t.Errorf("got %v, %v", got, err)
	}
	if _, err := parseTrace("{"); err == nil {
		t.Error("parseTrace accepted text that is not JSON")
	}
}

func TestPSS(t *testing.T) {
	if got, err := PSS(os.Getpid()); err != nil || got < 1<<20 || got > 1<<30 {
		t.Errorf("got %v, %v", got, err)
	}
}

// Processes that wait for pods count as the daemon's. Processes of pods count nowhere. All others
// count as others.
func TestSumMemory(t *testing.T) {
	all := map[int]process{
		10: {parent: 1, pss: 1},                    // the daemon
		11: {parent: 10, pss: 2},                   // a waiting launcher
		12: {parent: 11, pss: 4},                   // a child of the launcher
		13: {parent: 10, pss: 8, ofPod: true},      // a monitor
		14: {parent: 1, pss: 16, ofPod: true},      // a shim
		15: {parent: 13, pss: 32, container: true}, // the workload
		20: {parent: 1, pss: 64},                   // another daemon
		30: {parent: 31, pss: 128}, 31: {parent: 30, pss: 256},
	}
	want := Memory{Daemon: 1, Kept: 2 + 4, Others: 8 + 16 + 64 + 128 + 256}
	if got := sumMemory(all, 10); got != want {
		t.Errorf("got %v, want %v", got, want)
	}
}

func TestReadProcess(t *testing.T) {
	p, ok := readProcess(os.Getpid())
	if !ok || p.parent != os.Getppid() || p.pss <= 0 || p.container || p.ofPod {
		t.Errorf("got %+v, %v", p, ok)
	}
	if _, err := parentIn("Name:\tsh\n"); err == nil {
		t.Error("parentIn accepted a status without a parent")
	}
}

func TestExpectsTerm(t *testing.T) {
	for status, want := range map[string]bool{
		"Name:\tawait-term\nState:\tS (sleeping)\nSigCgt:\t0000000000000000\n":                    true,
		"Name:\tawait-term\nState:\tR (running)\nSigCgt:\t0000000000000000\n":                     false,
		"Name:\tsh\nState:\tS (sleeping)\nSigBlk:\t0000000000000000\nSigCgt:\t0000000000004002\n": true,
		"Name:\tsleep\nState:\tS (sleeping)\nSigIgn:\t0000000000004000\nSigCgt:\t0\n":             false,
		"": false,
	} {
		if got := expectsTerm(status); got != want {
			t.Errorf("%q: got %v", status, got)
		}
	}
}
