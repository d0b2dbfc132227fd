package footprint

import (
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/oci/confine"
	"berth/sandbox/layout"
	"berth/sandbox/lsm"
	"berth/sandbox/record"
)

func dirsBelow(root string) layout.Dirs {
	return layout.Dirs{Root: filepath.Join(root, "root"), State: filepath.Join(root, "state"), NetNSs: filepath.Join(root, "netns")}
}

func makeAll(t *testing.T, dirs ...string) {
	t.Helper()
	for _, dir := range dirs {
		if err := os.MkdirAll(dir, 0o700); err != nil {
			t.Fatal(err)
		}
	}
}

// All containers read the pod's files, so they have the pod's label, and /etc/hosts its addresses.
func TestFinishFiles(t *testing.T) {
	labels := map[string]string{}
	k := Kit{Dirs: dirsBelow(t.TempDir()), SELinux: lsm.SELinux{Relabel: func(path, label string) error { labels[path] = label; return nil }}}
	dir := k.Dirs.PodFiles("p")
	makeAll(t, dir)
	pod := Pod{Rec: &record.Pod{ID: "p", IPs: []string{"10.0.0.7"}, SELinux: confine.Labels{Process: "pod-process", Mount: "pod-files"}},
		Config: &runtimeapi.PodSandboxConfig{Hostname: "ship"}}
	if err := k.FinishFiles(pod); err != nil {
		t.Fatal(err)
	}
	if want := map[string]string{dir: "pod-files"}; !maps.Equal(labels, want) {
		t.Errorf("labelled %v, want %v", labels, want)
	}
	hosts, err := os.ReadFile(filepath.Join(dir, "hosts"))
	if err != nil || !strings.Contains(string(hosts), "10.0.0.7\tship") {
		t.Errorf("/etc/hosts is %q (%v)", hosts, err)
	}
}

// What bears an ID that nobody knows is found wherever it is; names that are no IDs are not ours.
func TestUnrecorded(t *testing.T) {
	k := Kit{Dirs: dirsBelow(t.TempDir())}
	makeAll(t, k.Dirs.Shim(""), k.Dirs.Libcontainer(), k.Dirs.OCI(""), k.Dirs.SharedMounts(), k.Dirs.PodFiles(""), k.Dirs.Trash())
	known, everywhere := layout.NewID(), layout.NewID()
	places := []string{k.Dirs.Shim(known), k.Dirs.Shim("not-an-id"), k.Dirs.Shim(everywhere), k.Dirs.PodFiles(everywhere)}
	want := []string{everywhere}
	for _, place := range []func(string) string{k.Dirs.Shim, k.Dirs.OCI, k.Dirs.PodMounts, k.Dirs.PodFiles, k.Dirs.Writable,
		func(id string) string { return filepath.Join(k.Dirs.Libcontainer(), id) }} {
		id := layout.NewID()
		places, want = append(places, place(id)), append(want, id)
	}
	makeAll(t, places...)
	found, err := k.Unrecorded(func(id string) bool { return id == known })
	if err != nil {
		t.Fatal(err)
	}
	slices.Sort(want)
	if got := slices.Sorted(maps.Keys(found)); !slices.Equal(got, want) {
		t.Errorf("found %v, want %v", got, want)
	}
	if err := os.RemoveAll(k.Dirs.Shim("")); err != nil {
		t.Fatal(err)
	}
	if _, err := k.Unrecorded(func(string) bool { return false }); err == nil {
		t.Error("a place that can't be looked at counts as empty")
	}
}
