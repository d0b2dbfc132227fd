package podenv

import (
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/cni"
	"berth/internal/errdefs"
	"berth/internal/safefs"
	"berth/internal/task"
	"berth/internal/testutil"
	"berth/internal/trash"
	"berth/oci/confine"
	"berth/sandbox/lsm"
	"berth/sandbox/state"
)

func dirsBelow(root string) state.Dirs {
	return state.Dirs{Root: filepath.Join(root, "root"), State: filepath.Join(root, "state"), NetNSs: filepath.Join(root, "netns")}
}

func makeAll(t *testing.T, dirs ...string) {
	t.Helper()
	for _, dir := range dirs {
		testutil.Must(t, os.MkdirAll(dir, 0o700))
	}
}

// FinishFiles labels the pod's files, which all containers read, and writes its addresses.
func TestFinishFiles(t *testing.T) {
	labels := map[string]string{}
	k := Provisioner{Dirs: dirsBelow(t.TempDir()), SELinux: lsm.SELinux{Relabel: func(path, label string) error { labels[path] = label; return nil }}}
	dir := k.Dirs.Etc("p")
	makeAll(t, dir)
	pod := &state.PodSpec{ID: "p", Labels: confine.Labels{Process: "pod-process", Mount: "pod-files"}, Config: &runtimeapi.PodSandboxConfig{Hostname: "ship"}}
	testutil.Must(t, k.FinishFiles(t.Context(), pod, []string{"10.0.0.7"}))
	if want := map[string]string{dir: "pod-files"}; !maps.Equal(labels, want) {
		t.Errorf("labelled %v, want %v", labels, want)
	}
	hosts, err := os.ReadFile(filepath.Join(dir, "hosts"))
	if err != nil || !strings.Contains(string(hosts), "10.0.0.7\tship") {
		t.Errorf("/etc/hosts is %q (%v)", hosts, err)
	}
}

// Unrecorded finds unknown IDs in all directories and ignores other names.
func TestUnrecorded(t *testing.T) {
	k := Provisioner{Dirs: dirsBelow(t.TempDir())}
	makeAll(t, k.Dirs.Shim(""), k.Dirs.Libcontainer(), k.Dirs.OCI(""), k.Dirs.SharedMounts(), k.Dirs.PodFiles(""), k.Dirs.Trash())
	known, everywhere := state.NewID(), state.NewID()
	places := []string{k.Dirs.Shim(known), k.Dirs.Shim("not-an-id"), k.Dirs.Shim(everywhere), k.Dirs.PodFiles(everywhere)}
	want := []string{everywhere}
	for _, place := range []func(string) string{k.Dirs.Shim, k.Dirs.OCI, k.Dirs.PodMounts, k.Dirs.PodFiles, k.Dirs.Writable,
		func(id string) string { return filepath.Join(k.Dirs.Libcontainer(), id) }} {
		id := state.NewID()
		places, want = append(places, place(id)), append(want, id)
	}
	makeAll(t, places...)
	found, err := k.Unrecorded(func(id string) bool { return id == known })
	testutil.Must(t, err)
	slices.Sort(want)
	if got := slices.Sorted(maps.Keys(found)); !slices.Equal(got, want) {
		t.Errorf("found %v, want %v", got, want)
	}
	testutil.Must(t, os.RemoveAll(k.Dirs.Shim("")))
	if _, err := k.Unrecorded(func(string) bool { return false }); err == nil {
		t.Error("an unreadable directory counts as empty")
	}
}

// Without a CNI configuration everything of a pod without a record is removed, except the files
// that show that a DEL is due.
func TestRemoveUnrecordedWithoutNetwork(t *testing.T) {
	testutil.NeedRoot(t)
	dir, log := t.TempDir(), slog.New(slog.DiscardHandler)
	cache := filepath.Join(dir, "cache")
	network, err := cni.New(cni.Config{ConfDir: filepath.Join(dir, "net.d"), BinDirs: []string{dir}, CacheDir: cache}, log)
	testutil.Must(t, err)
	defer network.Close()
	tasks := task.NewRunner(log, nil)
	k := Provisioner{Dirs: dirsBelow(dir)}
	makeAll(t, k.Dirs.Trash(), filepath.Join(cache, "results"))
	k.Trash, k.Namespaces.Dirs = trash.New(k.Dirs.Trash(), safefs.RemoveAll, new(task.Waits), log), k.Dirs
	k.Networks, err = OpenNetworks(network, k.Dirs.Root, tasks, log)
	testutil.Must(t, err)
	exists := func(path string) bool { _, err := os.Lstat(path); return err == nil }
	id := state.NewID()
	kept := filepath.Join(cache, "results", "net-"+id+"-eth0")
	testutil.Must(t, os.WriteFile(kept, []byte(`{"containerId": "`+id+`"}`), 0o600))
	makeAll(t, k.Dirs.PodFiles(id), k.Dirs.Writable(id), k.Dirs.Tmpfs(id), k.Dirs.OldShm(id))
	if err := k.RemoveUnrecorded(t.Context(), id); errdefs.Code(err) != codes.FailedPrecondition {
		t.Errorf("with an address and no network: %v", err)
	}
	if exists(k.Dirs.Writable(id)) || exists(k.Dirs.PodMounts(id)) || !exists(k.Dirs.PodFiles(id)) {
		t.Error("directories remain, or the pod's files were removed before DEL")
	}
	testutil.Must(t, os.Remove(kept))
	if err := k.RemoveUnrecorded(t.Context(), id); err != nil || exists(k.Dirs.PodFiles(id)) {
		t.Errorf("without an address: %v", err)
	}
	tasks.Background.Close()
	testutil.Must(t, tasks.Background.Wait(t.Context()))
}
