package netns

import (
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"

	"berth/internal/errdefs"
	"berth/internal/netns/thread"
	"berth/internal/testutil"
)

func TestMain(m *testing.M) { os.Exit(testutil.MainInMountNamespace(m)) }

// threadNamespaces returns the network namespaces of this process's threads.
func threadNamespaces(t *testing.T) map[string]bool {
	t.Helper()
	links, err := filepath.Glob("/proc/self/task/*/ns/net")
	testutil.Must(t, err)
	seen := map[string]bool{}
	for _, l := range links {
		ns, err := os.Readlink(l)
		if err == nil { // a thread may exit meanwhile
			seen[ns] = true
		}
	}
	return seen
}

func mountedIn(t *testing.T, mountinfo, path string) bool {
	t.Helper()
	table, err := os.ReadFile(mountinfo)
	testutil.Must(t, err)
	return strings.Contains(string(table), " "+path+" ")
}

func TestNewAndRemove(t *testing.T) {
	path := t.TempDir() + "/made/on/the/way/ns"
	testutil.Must(t, New(path))
	if len(threadNamespaces(t)) != 1 {
		t.Errorf("threads are in namespaces %v", threadNamespaces(t))
	}
	if Existing(path) != path {
		t.Error("no namespace at the path")
	}

	testutil.Must(t, In(path, func() error {
		links, err := netlink.LinkList()
		testutil.Must(t, err)
		if len(links) != 1 || links[0].Attrs().Name != "lo" || links[0].Attrs().Flags&net.FlagUp == 0 {
			t.Errorf("interfaces %v, want lo alone, up", links)
		}
		// A listener opened inside works from any thread.
		l, err := net.Listen("tcp", "127.0.0.1:0")
		testutil.Must(t, err)
		defer l.Close()
		c, err := net.Dial("tcp", l.Addr().String())
		testutil.Must(t, err)
		return c.Close()
	}))
	if err := New(path); errdefs.Code(err) != codes.AlreadyExists {
		t.Errorf("second New: %v (%v)", err, errdefs.Code(err))
	}
	if Existing(path) != path {
		t.Error("the failed second New removed the namespace of the first")
	}

	testutil.Must(t, Remove(path))
	testutil.Must(t, Remove(path))
	if mountedIn(t, "/proc/self/mountinfo", path) {
		t.Error("still mounted")
	}
	if _, err := os.Lstat(path); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("file is still there: %v", err)
	}
}

// An interface that is added to the namespace ignores router advertisements (CVE-2020-10749).
func TestRefusesRouterAdvertisements(t *testing.T) {
	if _, err := os.Stat("/proc/sys/net/ipv6"); errors.Is(err, os.ErrNotExist) {
		t.Skip("kernel without IPv6")
	}
	testutil.Must(t, InNew(func() error { // a namespace for the devices, so that the machine's stays unchanged
		testRefusesRouters(t)
		return nil
	}))
}

func testRefusesRouters(t *testing.T) {
	t.Helper()
	path := t.TempDir() + "/ns"
	testutil.Must(t, New(path))
	defer func() { testutil.Must(t, Remove(path)) }()
	testutil.Must(t, netlink.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "berthra0"}, PeerName: "berthra1"}))
	peer, err := netlink.LinkByName("berthra1")
	testutil.Must(t, err)
	ns, err := os.Open(path)
	testutil.Must(t, err)
	defer ns.Close()
	testutil.Must(t, netlink.LinkSetNsFd(peer, int(ns.Fd())))
	testutil.Must(t, In(path, func() error {
		for _, dev := range []string{"all", "default", "berthra1"} {
			value, err := os.ReadFile("/proc/sys/net/ipv6/conf/" + dev + "/accept_ra")
			testutil.Must(t, err)
			if strings.TrimSpace(string(value)) != "0" {
				t.Errorf("%s: accept_ra is %s", dev, value)
			}
		}
		return nil
	}))
	value, err := os.ReadFile("/proc/sys/net/ipv6/conf/default/accept_ra")
	testutil.Must(t, err)
	if strings.TrimSpace(string(value)) == "0" {
		t.Error("accept_ra was changed outside of the namespace")
	}
}

func TestRemoveAfterCrash(t *testing.T) {
	dir := t.TempDir()
	testutil.Must(t, Remove(dir+"/missing/dir/ns"))
	testutil.Must(t, os.WriteFile(dir+"/unmounted", nil, 0o444)) // a crash between the creation of the file and the mount
	testutil.Must(t, Remove(dir+"/unmounted"))

	testutil.Must(t, New(dir+"/stacked"))
	testutil.Must(t, unix.Mount("/proc/self/ns/net", dir+"/stacked", "", unix.MS_BIND, ""))
	testutil.Must(t, Remove(dir+"/stacked"))

	left, err := os.ReadDir(dir)
	testutil.Must(t, err)
	if len(left) != 0 {
		t.Errorf("left: %v", left)
	}
}

// A process with an older copy of the mount table, such as a launcher, does not keep a removed
// namespace alive.
func TestRemoveWithOldMountTables(t *testing.T) {
	path := t.TempDir() + "/ns"
	testutil.Must(t, New(path))
	launcher := exec.Command("sleep", "1000")
	launcher.SysProcAttr = &syscall.SysProcAttr{Unshareflags: unix.CLONE_NEWNS, Pdeathsig: unix.SIGKILL}
	testutil.Must(t, launcher.Start())
	defer func() {
		testutil.Must(t, launcher.Process.Kill())
		if err := launcher.Wait(); err == nil {
			t.Error("sleep ended by itself")
		}
	}()
	table := fmt.Sprintf("/proc/%d/mountinfo", launcher.Process.Pid)
	if !mountedIn(t, table, path) {
		t.Fatal("the other process has no copy")
	}
	testutil.Must(t, Remove(path))
	if mountedIn(t, table, path) {
		t.Error("still mounted in the other process")
	}
}

func TestInRefusesOtherFiles(t *testing.T) {
	dir := t.TempDir()
	testutil.Must(t, os.WriteFile(dir+"/file", nil, 0o444))
	for _, path := range []string{dir + "/missing", dir + "/file", "/proc/self/ns/mnt"} {
		t.Run(filepath.Base(path), func(t *testing.T) {
			err := In(path, func() error { t.Errorf("ran in %s", path); return nil })
			if errdefs.Code(err) != codes.NotFound {
				t.Errorf("%v (%v)", err, errdefs.Code(err))
			}
		})
	}
	want := errors.New("its own")
	if err := In("/proc/self/ns/net", func() error { return want }); err != want {
		t.Errorf("error %v", err)
	}
}

func TestFailedNewLeavesNothing(t *testing.T) {
	file := t.TempDir() + "/file"
	testutil.Must(t, os.WriteFile(file, nil, 0o644))
	if err := New(file + "/ns"); errdefs.Code(err) != codes.Internal {
		t.Errorf("error %v (%v)", err, errdefs.Code(err))
	}
}

func BenchmarkNewAndRemove(b *testing.B) {
	path := b.TempDir() + "/ns"
	for b.Loop() {
		testutil.Must(b, New(path))
		testutil.Must(b, Remove(path))
	}
}

// A namespace of another process is pinned like one of this process.
func TestPinOfOtherProcess(t *testing.T) {
	source, path := t.TempDir()+"/source", t.TempDir()+"/ns"
	testutil.Must(t, thread.Run(func() error { // as in a process started in a new namespace
		testutil.Must(t, unix.Unshare(unix.CLONE_NEWNET))
		testutil.Must(t, os.WriteFile(source, nil, 0o600))
		return unix.Mount("/proc/thread-self/ns/net", source, "", unix.MS_BIND, "")
	}))
	testutil.Must(t, Pin(source, path))
	testutil.Must(t, unix.Unmount(source, 0))
	testutil.Must(t, In(path, func() error {
		lo, err := netlink.LinkByIndex(1)
		testutil.Must(t, err)
		if lo.Attrs().Flags&net.FlagUp == 0 {
			t.Error("lo is down")
		}
		return nil
	}))
	testutil.Must(t, Remove(path))
	if err := Pin("/proc/self/ns/uts", path); errdefs.Code(err) != codes.Internal {
		t.Errorf("no network namespace: %v", err)
	}
	if _, err := os.Lstat(path); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the failed call left a file: %v", err)
	}
}

// A panic in a namespace reaches the caller, which recovers, and does not end the daemon.
func TestPanicReachesCaller(t *testing.T) {
	defer func() {
		if p := recover(); p == nil || !strings.Contains(fmt.Sprint(p), "oh") || !strings.Contains(fmt.Sprint(p), "TestPanicReachesCaller") {
			t.Errorf("recovered %v", p)
		}
	}()
	err := InNew(func() error { panic("oh") })
	t.Errorf("no panic: %v", err)
}
