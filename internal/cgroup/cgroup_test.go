package cgroup

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"testing"
	"time"

	"github.com/opencontainers/cgroups"
	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"berth/internal/testutil"
)

// group creates a cgroup for the test and starts a process tree in it.
func group(t *testing.T) *Group {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root to make cgroups")
	}
	g, err := Open(fmt.Sprintf("/berth-unit-test-%d/%s", os.Getpid(), t.Name()), false)
	testutil.Must(t, err)
	cmd := exec.Command("sh", "-c", "read go; sleep 1000 & sleep 1000 & echo up; wait")
	in, err := cmd.StdinPipe()
	testutil.Must(t, err)
	out, childOut, err := os.Pipe()
	testutil.Must(t, err)
	defer out.Close()
	defer childOut.Close()
	cmd.Stdout = childOut
	testutil.Must(t, cmd.Start())
	reaped := make(chan struct{})
	go func() { defer close(reaped); _ = cmd.Wait() }() // reap at once, otherwise the group stays busy
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		if err := g.Kill(ctx); err != nil {
			t.Error(err)
		}
		_ = cmd.Process.Kill() // in case the process never entered the group
		<-reaped
		if err := g.Destroy(ctx); err != nil {
			t.Error(err)
		}
		if err := RemoveIfEmpty(fmt.Sprintf("/berth-unit-test-%d", os.Getpid())); err != nil {
			t.Error(err)
		}
	})
	testutil.Must(t, g.mgr.Apply(cmd.Process.Pid))
	if _, err := in.Write([]byte("go\n")); err != nil { // its children start in the group
		t.Fatal(err)
	}
	if _, err := out.Read(make([]byte, 3)); err != nil { // its children exist now
		t.Fatal(err)
	}
	return g
}

func TestFreezerIsRemovedLast(t *testing.T) {
	for name, test := range map[string]struct {
		paths map[string]string
		want  int // number of directories
		last  string
	}{
		"v1":            {map[string]string{"pids": "/pids/c", "freezer": "/freezer/c", "memory": "/memory/c", "cpu": "/cpu,cpuacct/c", "rdma": ""}, 4, "/freezer/c"},
		"one hierarchy": {map[string]string{"pids": "/all/c", "freezer": "/all/c"}, 1, "/all/c"},
		"v2":            {map[string]string{"": "/unified/c"}, 1, "/unified/c"},
		"no freezer":    {map[string]string{"pids": "/pids/c"}, 1, "/pids/c"},
	} {
		for range 20 { // map order is random
			got := inRemovalOrder(test.paths)
			if len(got) != test.want || got[len(got)-1] != test.last || slices.Index(got, test.last) != len(got)-1 {
				t.Fatalf("%s: %v", name, got)
			}
		}
	}
}

func TestKillAndDestroyAreIdempotent(t *testing.T) {
	g := group(t)
	pids, err := g.Procs()
	if err != nil || len(pids) == 0 {
		t.Fatalf("Procs: %v, %v", pids, err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	for range 2 { // the second call finds nothing
		testutil.Must(t, g.Kill(ctx))
		testutil.Must(t, g.Destroy(ctx))
	}
	for _, dir := range g.dirs() {
		if _, err := os.Lstat(dir); !os.IsNotExist(err) {
			t.Errorf("%s is still there: %v", dir, err)
		}
	}
}

func TestUpdateSetsLimits(t *testing.T) {
	g := group(t)
	limit, shares := int64(64<<20), uint64(512)
	r := &specs.LinuxResources{Memory: &specs.LinuxMemory{Limit: &limit}, CPU: &specs.LinuxCPU{Shares: &shares}}
	if _, err := g.Update(r); err != nil {
		t.Fatal(err)
	}
	stats, err := g.mgr.GetStats()
	testutil.Must(t, err)
	if stats.MemoryStats.Usage.Limit != uint64(limit) {
		t.Errorf("memory limit is %d, want %d", stats.MemoryStats.Usage.Limit, limit)
	}
}

func TestOpenRefusesInvalidPaths(t *testing.T) {
	for _, path := range []string{"", "relative", "/a/../b", "/a//b"} {
		if _, err := Open(path, false); err == nil {
			t.Errorf("Open(%q) succeeded", path)
		}
	}
	if _, err := Open("no-colons", true); err == nil {
		t.Error("Open accepted a systemd path without three parts")
	}
}

// hangingManager is a cgroup manager whose Destroy waits for systemd.
type hangingManager struct {
	cgroups.Manager
	release chan struct{}
}

func (m hangingManager) Destroy() error { <-m.release; return nil }

func TestDestroyEndsWithItsContext(t *testing.T) {
	g := &Group{path: "a.slice:b:c", systemd: true, mgr: hangingManager{release: make(chan struct{})}}
	defer close(g.mgr.(hangingManager).release)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := g.Destroy(ctx); !errors.Is(err, context.Canceled) {
		t.Errorf("error %v", err)
	}
}

// scarceManager first fails for lack of descriptors and then hangs.
type scarceManager struct {
	cgroups.Manager
	calls   chan struct{} // capacity 1
	hangs   func()
	release chan struct{}
}

func (m scarceManager) Destroy() error {
	select {
	case m.calls <- struct{}{}:
		return unix.EMFILE
	default:
		m.hangs()
		<-m.release
		return nil
	}
}

func TestDestroyReportsFirstError(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	g := &Group{path: "/a", mgr: scarceManager{calls: make(chan struct{}, 1), hangs: cancel, release: make(chan struct{})}}
	defer close(g.mgr.(scarceManager).release)
	if err := g.Destroy(ctx); !errors.Is(err, unix.EMFILE) || errors.Is(err, context.Canceled) {
		t.Errorf("error %v", err)
	}
}
