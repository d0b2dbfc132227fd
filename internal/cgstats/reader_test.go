package cgstats

import (
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"berth/internal/testutil"
)

func at(dir string, v2 bool) func() (Group, error) {
	return find(Group{V2: v2, Dir: func(string) string { return dir }})
}

func find(g Group) func() (Group, error) { return func() (Group, error) { return g, nil } }

func read(t *testing.T, r *Reader) Sample {
	t.Helper()
	t.Cleanup(func() {
		if err := r.Close(); err != nil {
			t.Error(err)
		}
	})
	var s Sample
	testutil.Must(t, r.Read(&s))
	return s
}

// The files in testdata describe the same state in both versions, as far as both versions can
// express it.
func TestReadCapturedFiles(t *testing.T) {
	t.Parallel()
	memory := Memory{Known: true, Usage: 23171072, Limit: 64 << 20, RSS: 8515584, Cache: 12288000, MappedFile: 5406720,
		ActiveFile: 2596864, InactiveFile: 9691136, PageFaults: 12345, MajorPageFaults: 67, SwapKnown: true, Swap: 4096}
	memory1, memory2 := memory, memory
	memory1.SwapLimit = 64 << 20
	memory2.SwapLimit, memory2.Kernel = Unlimited, 2367488
	memory2.Pressure = Pressure{Known: true, Some: Stall{2.59, 1.67, 0.76, 7008558000}, Full: Stall{0.85, 0.76, 0.41, 4884498000}}
	devices := []Device{{"", 8, 0, 90430464, 299008000, 8950, 1252}, {"", 8, 16, 1459200, 314773504, 192, 353}}
	for name, want := range map[string]struct {
		Sample
		Detail
	}{
		"v1": {
			Sample{CPU: CPU{Known: true, Usage: 5372140211}, Memory: memory1, Tasks: 4, TasksKnown: true},
			Detail{CPU: CPU{Known: true, Usage: 5372140211, TimesKnown: true, User: 5000000000, System: 372140211, QuotaKnown: true, Periods: 41, ThrottledPeriods: 17, Throttled: 1282339000},
				MaxUsage: Figure{25001984, true}, KernelMemory: Figure{2367488, true}, LimitHits: Figure{29, true}, OOMKills: Figure{1, true},
				Tasks: Figure{4, true}, TasksMax: Figure{100, true}, Processes: Figure{3, true}, Reservation: Figure{Unlimited, true},
				Devices: devices, HugePages: []HugePages{{"2MB", Figure{2097152, true}, Figure{4194304, true}}}},
		},
		"v2": {
			Sample{CPU: CPU{Known: true, Usage: 367245000, TimesKnown: true, User: 360365000, System: 6879000, QuotaKnown: true, Periods: 41, ThrottledPeriods: 17, Throttled: 1282339000,
				Pressure: Pressure{Known: true, Some: Stall{51.5, 34.33, 22.67, 188490071000}, Full: Stall{0, 0.05, 100, 1024880000}}},
				Memory: memory2, IO: Pressure{Known: true}, Tasks: 4, TasksKnown: true},
			Detail{CPU: CPU{Known: true, Usage: 367245000, TimesKnown: true, User: 360365000, System: 6879000, QuotaKnown: true, Periods: 41, ThrottledPeriods: 17, Throttled: 1282339000},
				MaxUsage: Figure{25001984, true}, LimitHits: Figure{29, true}, OOMKills: Figure{1, true},
				Tasks: Figure{4, true}, TasksMax: Figure{Unlimited, true}, Processes: Figure{3, true}, Reservation: Figure{1 << 20, true},
				Devices:   []Device{devices[1], devices[0], {Major: 253}},
				HugePages: []HugePages{{"1GB", Figure{0, true}, Figure{}}, {"2MB", Figure{2097152, true}, Figure{}}}},
		},
	} {
		t.Run(name, func(t *testing.T) {
			r := New(at(filepath.Join("testdata", name), name == "v2"), true)
			s := read(t, r)
			if s.At.IsZero() {
				t.Error("the sample has no time")
			}
			s.At = want.At
			if s != want.Sample {
				t.Errorf("\n got %+v\nwant %+v", s, want.Sample)
			}
			var d Detail
			testutil.Must(t, r.ReadDetail(&d))
			for i := range d.Devices {
				d.Devices[i].Name = "" // depends on the machine
			}
			if !reflect.DeepEqual(d, want.Detail) {
				t.Errorf("\n got %+v\nwant %+v", d, want.Detail)
			}
		})
	}
}

func TestWorkingSetAndAvailableMemory(t *testing.T) {
	t.Parallel()
	m := Memory{Usage: 100, InactiveFile: 30, Limit: 200, Swap: 5, SwapLimit: 20}
	if m.WorkingSet() != 70 {
		t.Error("working set", m.WorkingSet())
	}
	if v, ok := m.Available(); !ok || v != 130 {
		t.Error("available", v, ok)
	}
	if v, ok := m.SwapAvailable(); !ok || v != 15 {
		t.Error("swap available", v, ok)
	}
	m = Memory{Usage: 100, InactiveFile: 130, Limit: Unlimited, SwapLimit: Unlimited} // read at slightly different times
	if _, ok := m.Available(); ok || m.WorkingSet() != 0 {
		t.Error("working set", m.WorkingSet())
	}
	if _, ok := m.SwapAvailable(); ok {
		t.Error("available of no limit")
	}
}

// A directory with only the CPU's files stands for a node without the memory controller.
func TestMissingControllersAreUnknown(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	write(t, dir, "cpu.stat", "usage_usec 5\n")
	s := read(t, New(at(dir, true), true))
	want := Sample{At: s.At, CPU: CPU{Known: true, Usage: 5000}}
	if s != want {
		t.Errorf("got %+v", s)
	}
}

func TestErrorNamesMalformedFile(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	write(t, dir, "cpu.stat", "usage_usec 5\n")
	write(t, dir, "memory.current", "many\n")
	r := New(at(dir, true), false)
	defer r.Close()
	var s Sample
	err := r.Read(&s)
	if err == nil || !strings.Contains(err.Error(), "memory.current") || !strings.Contains(err.Error(), "many") {
		t.Errorf("got %v", err)
	}
}

func write(t *testing.T, dir, name, content string) {
	t.Helper()
	testutil.Must(t, os.WriteFile(filepath.Join(dir, name), []byte(content), 0o600))
}

func TestRemovedOrClosedGroupReturnsErrGone(t *testing.T) {
	var s Sample
	if err := New(at(t.TempDir(), true), false).Read(&s); !errors.Is(err, ErrGone) {
		t.Errorf("a missing group: %v", err)
	}
	before := openFiles(t)
	r := New(at("testdata/v1", false), false)
	read(t, r)
	if openFiles(t) != before+5 {
		t.Errorf("%d files are open, before %d", openFiles(t), before)
	}
	for range 2 {
		if err := r.Close(); err != nil {
			t.Error(err)
		}
	}
	if err := r.Read(&s); !errors.Is(err, ErrGone) {
		t.Errorf("closed: %v", err)
	}
	if openFiles(t) != before {
		t.Errorf("%d files are open, before %d", openFiles(t), before)
	}
}

func TestCloseDuringConcurrentReads(t *testing.T) {
	before := openFiles(t)
	for range 50 {
		r := New(at("testdata/v2", true), false)
		var group sync.WaitGroup
		for range 4 {
			group.Go(func() {
				var s Sample
				for {
					if err := r.Read(&s); errors.Is(err, ErrGone) {
						return
					} else if err != nil {
						t.Error(err)
						return
					}
				}
			})
		}
		group.Go(func() {
			if err := r.Close(); err != nil {
				t.Error(err)
			}
		})
		group.Wait()
	}
	if n := openFiles(t); n != before {
		t.Errorf("%d files are open, before %d", n, before)
	}
}

func openFiles(t *testing.T) int {
	t.Helper()
	entries, err := os.ReadDir("/proc/self/fd")
	testutil.Must(t, err)
	return len(entries)
}

// cgroups creates a group in every mounted hierarchy and removes it when the test ends.
func cgroups(t testing.TB, name string) Group {
	t.Helper()
	machine := os.Getenv("BERTH_MACHINE")
	if os.Geteuid() != 0 || machine == "" {
		t.Skip("needs contrib/machine to make cgroups")
	}
	var st unix.Statfs_t
	testutil.Must(t, unix.Statfs("/sys/fs/cgroup", &st))
	v2 := st.Type == unix.CGROUP2_SUPER_MAGIC
	dir := func(controller string) string {
		if v2 {
			return filepath.Join("/sys/fs/cgroup", machine, name)
		}
		if _, err := os.Stat("/sys/fs/cgroup/" + controller); err != nil {
			return ""
		}
		return filepath.Join("/sys/fs/cgroup", controller, machine, name)
	}
	for _, controller := range []string{"cpu", "cpuacct", "memory", "pids"} {
		path := dir(controller)
		testutil.Must(t, os.MkdirAll(path, 0o755))
		t.Cleanup(func() {
			if err := os.Remove(path); err != nil && !os.IsNotExist(err) {
				t.Error(err)
			}
		})
	}
	return Group{V2: v2, Dir: dir}
}

// memory.stat may be two seconds old (mm/memcontrol.c, FLUSH_TIME), so the test does not check it.
func TestReaderSeesUsageOfRealCgroup(t *testing.T) {
	group := cgroups(t, "real")
	enter := "for d in " + strings.Join([]string{group.Dir("cpuacct"), group.Dir("memory"), group.Dir("pids")}, " ") + "; do echo $$ >$d/cgroup.procs; done; "
	cmd := exec.Command("sh", "-c", enter+"i=0; while [ $i -lt 100000 ]; do i=$((i+1)); done; echo done; read stop")
	in, err := cmd.StdinPipe()
	testutil.Must(t, err)
	out, err := cmd.StdoutPipe()
	testutil.Must(t, err)
	testutil.Must(t, cmd.Start())
	if _, err := out.Read(make([]byte, 5)); err != nil {
		t.Fatal(err)
	}
	r := New(find(group), true)
	s := read(t, r)
	if !s.CPU.Known || s.CPU.Usage == 0 || !s.Memory.Known || s.Memory.Usage == 0 || s.Memory.Limit != Unlimited || s.Tasks != 1 {
		t.Errorf("%+v", s)
	}
	var d Detail
	if err := r.ReadDetail(&d); err != nil || d.Processes != (Figure{1, true}) || d.CPU.User == 0 || d.CPU.Usage < s.CPU.Usage {
		t.Errorf("%+v, %v", d, err)
	}
	if err := in.Close(); err != nil {
		t.Error(err)
	}
	_ = cmd.Wait() // its read returns at end of file, and it exits
	for _, controller := range []string{"cpu", "cpuacct", "memory", "pids"} {
		if err := os.Remove(group.Dir(controller)); err != nil && !os.IsNotExist(err) {
			t.Fatal(err)
		}
	}
	if err := r.Read(&s); !errors.Is(err, ErrGone) {
		t.Errorf("removed: %v", err)
	}
}

// A hybrid node has pressure files in the v2 hierarchy.
func TestReaderSeesPressureOnHybridNode(t *testing.T) {
	t.Parallel()
	machine := os.Getenv("BERTH_MACHINE")
	dir := filepath.Join("/sys/fs/cgroup/unified", machine)
	if _, err := os.Stat("/sys/fs/cgroup/unified/cpu.pressure"); err != nil || machine == "" {
		t.Skip("needs contrib/machine on a hybrid node")
	}
	if err := os.Mkdir(dir, 0o755); err != nil && !os.IsExist(err) {
		t.Fatal(err)
	}
	defer os.Remove(dir)
	r := New(at(dir, true), false)
	if s := read(t, r); !s.CPU.Known || !s.CPU.Pressure.Known || !s.Memory.Pressure.Known || !s.IO.Known {
		t.Errorf("%+v", s)
	}
}

// here calls open in the network namespace of the test.
func here(open func() error) error { return open() }

func TestNetDevReadsInterfaces(t *testing.T) {
	d := NewNetDev(here)
	before := openFiles(t)
	for range 2 {
		found, err := d.Read()
		testutil.Must(t, err)
		for _, i := range found {
			if _, err := net.InterfaceByName(i.Name); err != nil {
				t.Error(err)
			}
		}
	}
	if n := openFiles(t); n != before+1 {
		t.Errorf("%d files are open, before %d", n, before)
	}
	gone := NewNetDev(func(func() error) error { return ErrGone })
	for name, d := range map[string]*NetDev{"no namespace": gone, "closed": d} {
		if name == "closed" {
			if err := d.Close(); err != nil {
				t.Error(err)
			}
		}
		if _, err := d.Read(); !errors.Is(err, ErrGone) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if n := openFiles(t); n != before {
		t.Errorf("%d files are open, before %d", n, before)
	}
}

// newNetNS calls open in a new network namespace that set has prepared.
func newNetNS(t *testing.T, set func()) func(open func() error) error {
	t.Helper()
	if os.Geteuid() != 0 || os.Getenv("BERTH_MACHINE") == "" {
		t.Skip("needs contrib/machine to make a network namespace")
	}
	return func(open func() error) error {
		done := make(chan error, 1)
		go func() {
			runtime.LockOSThread() // never unlocked: the thread ends with the goroutine
			err := unix.Unshare(unix.CLONE_NEWNET)
			if err == nil {
				set()
				err = open()
			}
			done <- err
		}()
		return <-done
	}
}

// A container with its own network may create any number of interfaces with any names. The file
// lists the same namespace for every reader.
func TestNetDevBoundsHostileNames(t *testing.T) {
	const pairs = 300
	d := NewNetDev(newNetNS(t, func() {
		var batch strings.Builder
		batch.WriteString("link set lo name a\xff\xfe\nlink add eth0 type veth peer name b\xff\n")
		for i := range pairs {
			fmt.Fprintf(&batch, "link add many%da type veth peer name many%db\n", i, i)
		}
		cmd := exec.Command("ip", "-batch", "-")
		cmd.Stdin = strings.NewReader(batch.String())
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Errorf("%v: %s", err, out)
		}
	}))
	defer d.Close()
	if _, err := d.Read(); err != nil { // opens the file
		t.Fatal(err)
	}
	var readers sync.WaitGroup
	for range 4 {
		readers.Go(func() {
			found, err := d.Read()
			if err != nil || len(found) < 100 || len(found) >= 2*pairs {
				t.Errorf("%d interfaces, %v", len(found), err)
				return
			}
			for _, i := range found {
				if i.Name != "eth0" && !strings.HasPrefix(i.Name, "many") {
					t.Errorf("interface %q", i.Name)
				}
			}
		})
	}
	readers.Wait()
}

// The kernel writes pids.current again for each reader, but readers of an open file share the
// position in it. A reader that read twice would get the end of another number.
func TestConcurrentReadersOfChangingNumber(t *testing.T) {
	dir := cgroups(t, "changing").Dir("pids")
	// Nine processes. One of them repeatedly forks a tenth.
	cmd := exec.Command("sh", "-c", "echo $$ >"+dir+`/cgroup.procs; for i in 1 2 3 4 5 6 7 8; do sleep 1000 & done; echo in
		while :; do (:); done`)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	out, err := cmd.StdoutPipe()
	testutil.Must(t, err)
	testutil.Must(t, cmd.Start())
	t.Cleanup(func() {
		if err := unix.Kill(-cmd.Process.Pid, unix.SIGKILL); err != nil {
			t.Error(err)
		}
		_ = cmd.Wait()                      // killed
		for unix.Rmdir(dir) == unix.EBUSY { // until all of them have exited and init has reaped them
			time.Sleep(time.Millisecond)
		}
	})
	if _, err := out.Read(make([]byte, 3)); err != nil {
		t.Fatal(err)
	}
	f, err := openFile(dir + "/pids.current")
	testutil.Must(t, err)
	defer f.Close()
	var readers sync.WaitGroup
	for range 4 {
		readers.Go(func() {
			buf := buffers.New().(*buffer)
			for range 150_000 {
				if v, known, err := number(f, buf, parseUint); err != nil || !known || v < 9 || v > 10 {
					t.Errorf("%d, %v, %v", v, known, err)
					return
				}
			}
		})
	}
	readers.Wait()
}

// 500 containers with real cgroups, in the order of a list.
func BenchmarkRead500(b *testing.B) {
	var readers []*Reader
	for i := range 500 {
		r := New(find(cgroups(b, fmt.Sprintf("bench-%d", i))), false)
		defer r.Close()
		readers = append(readers, r)
	}
	var s Sample
	b.ReportAllocs()
	for b.Loop() {
		for _, r := range readers {
			testutil.Must(b, r.Read(&s))
		}
	}
}
