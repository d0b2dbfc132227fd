//go:build cgo && seccomp

package bpfcache

import (
	"bytes"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"testing"
	"unsafe"

	profiles "github.com/moby/profiles/seccomp"
	"github.com/opencontainers/runc/libcontainer/configs"
	"github.com/opencontainers/runc/libcontainer/seccomp"
	"github.com/opencontainers/runc/libcontainer/specconv"
	"github.com/opencontainers/runtime-spec/specs-go"
	libseccomp "github.com/seccomp/libseccomp-golang"
	"golang.org/x/sys/unix"

	"berth/internal/testutil"
)

// profileEnv makes the test binary a process that installs a filter as a container's init does,
// with the recording on descriptor initFD.
const profileEnv = "BERTH_TEST_SECCOMP_PROFILE"

// The first thread installs the filter, and filterOf reads that thread's. main keeps a thread that
// init has locked.
func init() {
	if os.Getenv(profileEnv) != "" {
		runtime.LockOSThread()
	}
}

func TestMain(m *testing.M) {
	if profile := os.Getenv(profileEnv); profile != "" {
		install(profile)
	}
	os.Exit(m.Run())
}

func install(text string) {
	var profile configs.Seccomp
	err := json.Unmarshal([]byte(text), &profile)
	if err == nil {
		err = Receive()
	}
	if err == nil {
		_, err = seccomp.InitSeccomp(&profile)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	fmt.Println("installed")
	for {
		unix.RawSyscall(unix.SYS_PAUSE, 0, 0, 0)
	}
}

// runtimeDefault returns the profile RuntimeDefault in libcontainer's form.
func runtimeDefault(tb testing.TB) *configs.Seccomp {
	tb.Helper()
	profile, err := profiles.GetDefaultProfile(&specs.Spec{Process: &specs.Process{Capabilities: &specs.LinuxCapabilities{}}})
	if err != nil {
		tb.Fatal(err)
	}
	return libcontainers(tb, profile)
}

func libcontainers(tb testing.TB, profile *specs.LinuxSeccomp) *configs.Seccomp {
	tb.Helper()
	config, err := specconv.SetupSeccomp(profile)
	if err != nil {
		tb.Fatal(err)
	}
	return config
}

// testProfiles returns profiles with all features. They allow the system calls that install needs
// after the filter.
func testProfiles(tb testing.TB) map[string]*configs.Seccomp {
	errno, other := uint(unix.EACCES), uint(unix.ENOSYS)
	call := func(action specs.LinuxSeccompAction, names ...string) specs.LinuxSyscall {
		return specs.LinuxSyscall{Names: names, Action: action}
	}
	arg := func(index uint, op specs.LinuxSeccompOperator, value, two uint64) specs.LinuxSeccompArg {
		return specs.LinuxSeccompArg{Index: index, Op: op, Value: value, ValueTwo: two}
	}
	conditions := []specs.LinuxSyscall{
		{Names: []string{"personality"}, Action: specs.ActErrno, ErrnoRet: &errno, Args: []specs.LinuxSeccompArg{arg(0, specs.OpNotEqual, 0xffffffff, 0)}},
		{Names: []string{"clone"}, Action: specs.ActTrace, Args: []specs.LinuxSeccompArg{arg(0, specs.OpMaskedEqual, 0x7e020000, 0x7e020000), arg(1, specs.OpGreaterThan, 1<<40, 0)}},
		{Names: []string{"socket"}, Action: specs.ActErrno, Args: []specs.LinuxSeccompArg{arg(0, specs.OpEqualTo, 40, 0), arg(0, specs.OpEqualTo, 41, 0)}},
		{Names: []string{"ioctl"}, Action: specs.ActLog, Args: []specs.LinuxSeccompArg{arg(1, specs.OpLessThan, 7, 0), arg(2, specs.OpLessEqual, 9, 0), arg(3, specs.OpGreaterEqual, 1, 0)}},
	}
	result := map[string]*configs.Seccomp{"RuntimeDefault": runtimeDefault(tb)}
	for name, p := range map[string]*specs.LinuxSeccomp{
		"nothing denied": {DefaultAction: specs.ActAllow},
		"one call":       {DefaultAction: specs.ActAllow, Syscalls: []specs.LinuxSyscall{call(specs.ActErrno, "mkdir", "mkdirat")}},
		"conditions":     {DefaultAction: specs.ActAllow, Syscalls: conditions},
		"kill":           {DefaultAction: specs.ActAllow, Syscalls: []specs.LinuxSyscall{call(specs.ActKillProcess, "reboot"), call(specs.ActKillThread, "swapon"), call(specs.ActTrap, "swapoff")}},
		"unknown calls":  {DefaultAction: specs.ActAllow, Syscalls: []specs.LinuxSyscall{call(specs.ActErrno, "no_such_call", "mkdir", "nor_this")}},
		"redundant":      {DefaultAction: specs.ActAllow, Syscalls: []specs.LinuxSyscall{call(specs.ActAllow, "mkdir"), call(specs.ActErrno, "rmdir")}},
		"flags": {DefaultAction: specs.ActAllow, Flags: []specs.LinuxSeccompFlag{"SECCOMP_FILTER_FLAG_TSYNC", specs.LinuxSeccompFlagLog, specs.LinuxSeccompFlagSpecAllow},
			Syscalls: []specs.LinuxSyscall{call(specs.ActErrno, "mkdir")}},
		"one architecture":   {DefaultAction: specs.ActAllow, Architectures: []specs.Arch{specs.ArchX86_64}, Syscalls: conditions},
		"five architectures": {DefaultAction: specs.ActAllow, Architectures: []specs.Arch{specs.ArchX86_64, specs.ArchX86, specs.ArchX32, specs.ArchAARCH64, specs.ArchARM}, Syscalls: conditions},
		"notify":             {DefaultAction: specs.ActAllow, ListenerPath: "/run/agent", Syscalls: []specs.LinuxSyscall{call(specs.ActNotify, "mkdir"), call(specs.ActErrno, "rmdir")}},
		"default errno": {DefaultAction: specs.ActErrno, DefaultErrnoRet: &other, Syscalls: append([]specs.LinuxSyscall{
			call(specs.ActAllow, "pause", "write", "futex", "read", "close", "rt_sigreturn", "rt_sigprocmask", "sigaltstack", "nanosleep", "epoll_pwait", "mmap", "munmap",
				"madvise", "sched_yield", "getpid", "gettid", "tgkill", "fcntl", "exit_group", "exit", "clone3")}, conditions...)},
	} {
		result[name] = libcontainers(tb, p)
	}
	return result
}

// installed returns the kernel's filter of a process that has installed a profile, with or without
// a recording.
func installed(t *testing.T, profile *configs.Seccomp, recording *os.File) []byte {
	t.Helper()
	text, err := json.Marshal(profile)
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), profileEnv+"="+string(text))
	cmd.Stderr = os.Stderr
	if recording != nil {
		cmd.ExtraFiles = []*os.File{recording}
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = cmd.Process.Kill(); _ = cmd.Wait() }()
	said := make([]byte, len("installed\n"))
	if n, err := out.Read(said); string(said[:n]) != "installed\n" {
		t.Fatalf("the filter is not installed: %q, %v", said[:n], err)
	}
	return filterOf(t, cmd.Process.Pid)
}

// filterOf returns the only filter of a process's first thread.
func filterOf(t *testing.T, pid int) []byte {
	t.Helper()
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	if err := unix.PtraceSeize(pid); err != nil {
		t.Fatalf("ptrace: %v", err)
	}
	if err := unix.PtraceInterrupt(pid); err != nil {
		t.Fatalf("ptrace: %v", err)
	}
	if _, err := unix.Wait4(pid, nil, unix.WALL, nil); err != nil {
		t.Fatal(err)
	}
	get := func(index int, to unsafe.Pointer) (int, unix.Errno) {
		n, _, errno := unix.Syscall6(unix.SYS_PTRACE, unix.PTRACE_SECCOMP_GET_FILTER, uintptr(pid), uintptr(index), uintptr(to), 0, 0)
		return int(n), errno
	}
	n, errno := get(0, nil)
	if errno != 0 {
		t.Fatalf("read the filter: %v", errno)
	}
	if _, errno := get(1, nil); errno != unix.ENOENT {
		t.Errorf("there is a second filter: %v", errno)
	}
	filter := make([]unix.SockFilter, n)
	if _, errno := get(0, unsafe.Pointer(&filter[0])); errno != 0 {
		t.Fatalf("read the filter: %v", errno)
	}
	return bytes.Clone(unsafe.Slice((*byte)(unsafe.Pointer(&filter[0])), n*instructionSize))
}

// samePrograms bounds the number of installations without a recording. The order of the
// architectures in libcontainer's prologue, for system calls newer than the profile, is random, and
// some orders are rare (one in 64).
const samePrograms = 400

// isOneOf returns whether the filter is one that libcontainer makes without a recording.
func isOneOf(t *testing.T, filter []byte, profile *configs.Seccomp) bool {
	t.Helper()
	for range samePrograms {
		if bytes.Equal(filter, installed(t, profile, nil)) {
			return true
		}
	}
	return false
}

// recordingOf compiles a profile and seals the recording.
func recordingOf(t *testing.T, profile *configs.Seccomp) (*Recording, *os.File) {
	t.Helper()
	m, err := compile(profile)
	if err != nil || m == nil {
		t.Fatalf("compile = %v, %v", m, err)
	}
	f, err := sealed(m.encode())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	return m, f
}

func TestRecordingGivesTheSameFilter(t *testing.T) {
	for name, profile := range testProfiles(t) {
		t.Run(name, func(t *testing.T) {
			_, f := recordingOf(t, profile)
			if filter := installed(t, profile, f); !isOneOf(t, filter, profile) {
				t.Errorf("with a recording the kernel has another filter: %x", filter)
			}
		})
	}
}

// allowAll is "ret ALLOW".
var allowAll = func() []byte {
	instruction := unix.SockFilter{Code: unix.BPF_RET | unix.BPF_K, K: 0x7fff0000}
	return bytes.Clone(unsafe.Slice((*byte)(unsafe.Pointer(&instruction)), instructionSize))
}()

// A recording with another program shows whether it is used.
func TestRecordingIsUsed(t *testing.T) {
	profile := testProfiles(t)["one call"]
	m, _ := recordingOf(t, profile)
	m.program = allowAll
	f, err := sealed(m.encode())
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if filter := installed(t, profile, f); !bytes.Equal(filter, allowAll) {
		t.Errorf("the kernel has %x, the recording %x", filter, allowAll)
	}
}

func TestWrongRecordingChangesNothing(t *testing.T) {
	all := testProfiles(t)
	wrong := func(change func([]byte) []byte) *os.File {
		m, _ := recordingOf(t, all["RuntimeDefault"])
		f, err := sealed(change(m.encode()))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { f.Close() })
		return f
	}
	_, foreign := recordingOf(t, all["conditions"])
	for name, f := range map[string]*os.File{
		"foreign":    foreign,
		"short":      wrong(func(b []byte) []byte { return b[:len(b)/2] }),
		"very short": wrong(func(b []byte) []byte { return b[:3] }),
		"damaged":    wrong(func(b []byte) []byte { b[len(b)/2] ^= 1; return b }),
		"too long":   wrong(func(b []byte) []byte { return append(b, make([]byte, maxRecording)...) }),
	} {
		t.Run(name, func(t *testing.T) {
			for _, profile := range []string{"one call", "RuntimeDefault"} {
				if !isOneOf(t, installed(t, all[profile], f), all[profile]) {
					t.Errorf("%s is another filter with it", profile)
				}
			}
		})
	}
}

func TestUnsealedRecordingIsIgnored(t *testing.T) {
	profile := testProfiles(t)["one call"]
	m, _ := recordingOf(t, profile)
	m.program = allowAll
	fd, err := unix.MemfdCreate("unsealed", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		t.Fatal(err)
	}
	f := os.NewFile(uintptr(fd), "unsealed")
	defer f.Close()
	if _, err := f.Write(m.encode()); err != nil {
		t.Fatal(err)
	}
	if !isOneOf(t, installed(t, profile, f), profile) {
		t.Error("a recording in unsealed memory is used")
	}
}

func TestBrokenProfile(t *testing.T) {
	profile := &configs.Seccomp{DefaultAction: configs.Allow, Syscalls: []*configs.Syscall{{Name: "write", Action: configs.Notify}}}
	if m, err := compile(profile); m != nil || err != nil {
		t.Errorf("compile = %v, %v", m, err)
	}
	if m, err := compile(testProfiles(t)["one call"]); m == nil || err != nil {
		t.Errorf("afterwards compile = %v, %v", m, err)
	}
}

func TestTableOfProfiles(t *testing.T) {
	table := newTable(t)
	for range 2 {
		for name, profile := range testProfiles(t) {
			got, err := table.recordingOf(profile)
			if err != nil {
				t.Fatal(err)
			}
			want, _ := recordingOf(t, profile)
			if !bytes.Equal(got, want.encode()) {
				t.Errorf("%s has another profile's recording", name)
			}
		}
	}
}

// step is a call to libseccomp.
type step func(*testing.T, *libseccomp.ScmpFilter)

func rule(name string, action libseccomp.ScmpAction, conditions ...libseccomp.ScmpCondition) step {
	return func(t *testing.T, f *libseccomp.ScmpFilter) {
		call, err := libseccomp.GetSyscallFromName(name)
		testutil.Must(t, err)
		if conditions == nil {
			testutil.Must(t, f.AddRule(call, action))
		} else {
			testutil.Must(t, f.AddRuleConditional(call, action, conditions))
		}
	}
}

func export(t *testing.T, f *libseccomp.ScmpFilter) []byte {
	t.Helper()
	fd, err := unix.MemfdCreate("program", unix.MFD_CLOEXEC)
	testutil.Must(t, err)
	out := os.NewFile(uintptr(fd), "program")
	defer out.Close()
	testutil.Must(t, f.ExportBPF(out))
	program := make([]byte, maxRecording)
	n, _ := out.ReadAt(program, 0)
	return program[:n]
}

// program makes a filter in steps, compared with a recording if there is one, and exports it.
func program(t *testing.T, m *Recording, steps []step) []byte {
	t.Helper()
	if m != nil {
		var pins runtime.Pinner
		defer pins.Unpin()
		pins.Pin(unsafe.SliceData(m.calls))
		pins.Pin(unsafe.SliceData(m.program))
		m.compare()
		defer stopComparing()
	}
	f, err := libseccomp.NewFilter(libseccomp.ActAllow)
	testutil.Must(t, err)
	defer f.Release()
	for _, s := range steps {
		s(t, f)
	}
	return export(t, f)
}

// recorded returns the recording of a filter made in steps.
func recorded(t *testing.T, steps []step) *Recording {
	t.Helper()
	m, err := record(func() {
		f, err := libseccomp.NewFilter(libseccomp.ActAllow)
		testutil.Must(t, err)
		defer f.Release()
		for _, s := range steps {
			s(t, f)
		}
		if f.ExportBPF(os.Stdout) == nil {
			t.Error("a recorded filter is exported")
		}
	})
	if err != nil || m == nil {
		t.Fatalf("record = %v, %v", m, err)
	}
	return m
}

// If any call differs from the recording, the program is the one that the calls make.
func TestDifferentCallsGiveTheirOwnFilter(t *testing.T) {
	condition := func(value uint64) libseccomp.ScmpCondition {
		c, err := libseccomp.MakeCondition(1, libseccomp.CompareEqual, value)
		testutil.Must(t, err)
		return c
	}
	deny := libseccomp.ActErrno.SetReturnCode(int16(unix.EACCES))
	steps := []step{
		func(t *testing.T, f *libseccomp.ScmpFilter) { testutil.Must(t, f.AddArch(libseccomp.ArchX86)) },
		func(t *testing.T, f *libseccomp.ScmpFilter) { testutil.Must(t, f.SetLogBit(true)) },
		func(t *testing.T, f *libseccomp.ScmpFilter) { testutil.Must(t, f.SetOptimize(2)) },
		rule("mkdir", deny), rule("rmdir", deny), rule("ioctl", deny, condition(1)), rule("reboot", libseccomp.ActKillProcess), rule("mount", deny),
	}
	others := map[string]step{
		"rule":         rule("swapon", deny),
		"action":       rule("mkdir", libseccomp.ActLog),
		"condition":    rule("ioctl", deny, condition(2)),
		"architecture": func(t *testing.T, f *libseccomp.ScmpFilter) { testutil.Must(t, f.AddArch(libseccomp.ArchX32)) },
		"attribute":    func(t *testing.T, f *libseccomp.ScmpFilter) { testutil.Must(t, f.SetBadArchAction(libseccomp.ActLog)) },
		"priority":     func(t *testing.T, f *libseccomp.ScmpFilter) { testutil.Must(t, f.SetSyscallPriority(83, 200)) },
		"exact rule": func(t *testing.T, f *libseccomp.ScmpFilter) {
			if f.AddRuleExact(165, deny) == nil { // not possible for several architectures
				rule("swapoff", deny)(t, f)
			}
		},
		"removed architecture": func(t *testing.T, f *libseccomp.ScmpFilter) {
			if there, err := f.IsArchPresent(libseccomp.ArchX86); err == nil && there {
				testutil.Must(t, f.RemoveArch(libseccomp.ArchX86))
			}
		},
		"reset": func(t *testing.T, f *libseccomp.ScmpFilter) { testutil.Must(t, f.Reset(libseccomp.ActLog)) },
		"merge": func(t *testing.T, f *libseccomp.ScmpFilter) {
			src, err := libseccomp.NewFilter(libseccomp.ActAllow)
			testutil.Must(t, err)
			testutil.Must(t, src.RemoveArch(libseccomp.ArchNative))
			testutil.Must(t, src.AddArch(libseccomp.ArchARM64))
			_ = f.Merge(src) // it fails in both cases or in none
		},
		"text": func(t *testing.T, f *libseccomp.ScmpFilter) {
			testutil.Must(t, f.ExportPFC(os.NewFile(uintptr(devNull(t)), "null")))
		},
		"export": func(t *testing.T, f *libseccomp.ScmpFilter) { export(t, f) },
		"another filter": func(t *testing.T, f *libseccomp.ScmpFilter) {
			other, err := libseccomp.NewFilter(libseccomp.ActKillProcess)
			testutil.Must(t, err)
			other.Release()
		},
	}
	recording := recorded(t, steps)
	check := func(name string, steps []step) {
		if want, got := program(t, nil, steps), program(t, recording, steps); !bytes.Equal(want, got) {
			t.Errorf("%s: libseccomp makes\n%x, with a recording\n%x", name, want, got)
		}
	}
	check("all", steps)
	for n := range steps {
		check(fmt.Sprintf("the first %d", n), steps[:n])
		check(fmt.Sprintf("without %d", n), slices.Delete(slices.Clone(steps), n, n+1))
		for name, other := range others {
			check(fmt.Sprintf("%s before %d", name, n), slices.Insert(slices.Clone(steps), n, other))
			check(fmt.Sprintf("%s instead of %d", name, n), append(slices.Clone(steps[:n]), other))
		}
	}
	for name, other := range others {
		check(name+" at the end", append(slices.Clone(steps), other))
	}
}

func devNull(t *testing.T) int {
	fd, err := unix.Open("/dev/null", unix.O_WRONLY|unix.O_CLOEXEC, 0)
	testutil.Must(t, err)
	return fd
}

// FuzzDifferences records one sequence of rules and makes a filter of another with a common prefix.
func FuzzDifferences(f *testing.F) {
	f.Add(uint64(1), uint8(10), uint8(5))
	f.Add(uint64(2), uint8(3), uint8(3))
	f.Fuzz(func(t *testing.T, seed uint64, length, same uint8) {
		r := rand.New(rand.NewPCG(seed, 0))
		random := func() step {
			call, action := libseccomp.ScmpSyscall(r.IntN(330)), libseccomp.ActErrno.SetReturnCode(int16(r.IntN(3)+1))
			var conditions []libseccomp.ScmpCondition
			for index := range uint(r.IntN(4)) {
				c, err := libseccomp.MakeCondition(index, libseccomp.ScmpCompareOp(1+r.IntN(6))+libseccomp.CompareNotEqual-1, r.Uint64N(4))
				testutil.Must(t, err)
				conditions = append(conditions, c)
			}
			return func(t *testing.T, f *libseccomp.ScmpFilter) {
				_ = f.AddRuleConditional(call, action, conditions) // an impossible rule fails in both cases
			}
		}
		var first, second []step
		for range length % 32 {
			first = append(first, random())
		}
		second = append(second, first[:min(int(same), len(first))]...)
		for range r.IntN(8) {
			second = append(second, random())
		}
		recording, err := record(func() { // it may be invalid
			f, err := libseccomp.NewFilter(libseccomp.ActAllow)
			testutil.Must(t, err)
			defer f.Release()
			for _, s := range first {
				s(t, f)
			}
			_ = f.ExportBPF(os.Stdout)
		})
		if err != nil || recording == nil {
			return
		}
		for _, steps := range [][]step{first, second} {
			if want, got := program(t, nil, steps), program(t, recording, steps); !bytes.Equal(want, got) {
				t.Errorf("libseccomp makes\n%x, with a recording\n%x", want, got)
			}
		}
	})
}

// A function that takes a filter and is not wrapped would see a filter without rules.
func TestAllFunctionsAreWrapped(t *testing.T) {
	harmless := []string{
		"seccomp_arch_exist", "seccomp_attr_get", "seccomp_notify_fd", // they use no rules
		"seccomp_rule_add", "seccomp_rule_add_exact", // variadic: Go cannot call them
	}
	header, err := os.ReadFile("/usr/include/seccomp.h")
	testutil.Must(t, err)
	source, err := os.ReadFile("libseccomp.go")
	testutil.Must(t, err)
	found := 0
	for _, m := range regexp.MustCompile(`(?m)^[a-z][\w ]*?\**(seccomp_\w+)\(([^;]*)\);`).FindAllStringSubmatch(string(header), -1) {
		name, params := m[1], m[2]
		if name != "seccomp_init" && !strings.Contains(params, "scmp_filter_ctx") || slices.Contains(harmless, name) {
			continue
		}
		found++
		if !regexp.MustCompile(`--wrap=` + name + `\b`).Match(source) {
			t.Errorf("%s is not wrapped", name)
		}
	}
	if found < 12 {
		t.Errorf("only %d functions are found in the header", found)
	}
}

// BenchmarkCompile measures libseccomp's work for RuntimeDefault, and the lookup in the table
// instead.
func BenchmarkCompile(b *testing.B) {
	profile := runtimeDefault(b)
	b.Run("libseccomp", func(b *testing.B) {
		for b.Loop() {
			if _, err := compile(profile); err != nil {
				b.Fatal(err)
			}
		}
	})
	b.Run("table", func(b *testing.B) {
		table := newTable(b)
		for b.Loop() {
			if _, err := table.recordingOf(profile); err != nil {
				b.Fatal(err)
			}
		}
	})
}

// Filters returns the filter that a process of libcontainer has.
func TestFiltersContainTheInstalledOne(t *testing.T) {
	for name, profile := range testProfiles(t) {
		t.Run(name, func(t *testing.T) {
			got, err := newTable(t).Filters(profile)
			if err != nil {
				t.Fatal(err)
			}
			want := installed(t, profile, nil)
			if !slices.ContainsFunc(got, func(filter []byte) bool { return bytes.Equal(filter, want) }) {
				t.Errorf("%d filters, without that of the process of %d bytes", len(got), len(want))
			}
		})
	}
}
