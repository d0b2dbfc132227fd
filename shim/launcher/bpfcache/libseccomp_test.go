//go:build cgo && seccomp

package bpfcache

import (
	"bytes"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"testing"
	"unsafe"

	profiles "github.com/moby/profiles/seccomp"
	"github.com/opencontainers/runc/libcontainer"
	"github.com/opencontainers/runc/libcontainer/configs"
	"github.com/opencontainers/runc/libcontainer/seccomp"
	"github.com/opencontainers/runc/libcontainer/specconv"
	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"berth/internal/testutil"
)

// profileEnv makes the test binary a process that installs a profile as libcontainer does,
// filterEnv one that executes a command with an encoded filter.
const (
	profileEnv = "BERTH_TEST_SECCOMP_PROFILE"
	filterEnv  = "BERTH_TEST_SECCOMP_FILTER"
)

// The first thread installs the filter, and filterOf reads that thread's. main keeps a thread that
// init has locked.
func init() {
	if os.Getenv(profileEnv)+os.Getenv(filterEnv) != "" {
		runtime.LockOSThread()
	}
}

func TestMain(m *testing.M) {
	if profile := os.Getenv(profileEnv); profile != "" {
		install(profile)
	}
	if encoded := os.Getenv(filterEnv); encoded != "" {
		executeFiltered(encoded)
	}
	os.Exit(m.Run())
}

// executeFiltered executes os.Args[1:] with a filter, as Init does.
func executeFiltered(encoded string) {
	err := os.Unsetenv(filterEnv)
	data, decodeErr := base64.StdEncoding.DecodeString(encoded)
	f, filterErr := decode(data)
	if err = errors.Join(err, decodeErr, filterErr); err == nil {
		err = (&command{filter: f, args: os.Args[1:], env: []string{"HOME=/", "A=b"}}).execute(os.Args[1])
	}
	fmt.Fprintln(os.Stderr, err)
	os.Exit(1)
}

func install(text string) {
	var profile configs.Seccomp
	err := json.Unmarshal([]byte(text), &profile)
	if err == nil {
		_, err = seccomp.InitSeccomp(&profile)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	fmt.Println("installed")
	for {
		unix.RawSyscall6(unix.SYS_PPOLL, 0, 0, 0, 0, 0, 0) // arm64 has no pause(2)
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

// installed returns the kernel's filter of a process that has installed a profile.
func installed(t *testing.T, profile *configs.Seccomp) []byte {
	t.Helper()
	text, err := json.Marshal(profile)
	testutil.Must(t, err)
	return filterOfProcess(t, profileEnv+"="+string(text), "installed\n")
}

// filterOfProcess starts this program with a variable, waits for its first output, and returns its
// filter.
func filterOfProcess(t *testing.T, variable, says string, args ...string) []byte {
	t.Helper()
	cmd := exec.Command("/proc/self/exe", args...)
	cmd.Env = append(os.Environ(), variable)
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	testutil.Must(t, err)
	_, err = cmd.StdinPipe() // open until the process is killed
	testutil.Must(t, err)
	testutil.Must(t, cmd.Start())
	defer func() { _ = cmd.Process.Kill(); _ = cmd.Wait() }()
	said := make([]byte, len(says))
	if n, err := io.ReadFull(out, said); string(said[:n]) != says {
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

// samePrograms bounds the number of installations of libcontainer. The order of the
// architectures in libcontainer's prologue, for system calls newer than the profile, is random, and
// some orders are rare (one in 64).
const samePrograms = 400

// isOneOf returns whether the filter is one that libcontainer makes.
func isOneOf(t *testing.T, filter []byte, profile *configs.Seccomp) bool {
	t.Helper()
	for range samePrograms {
		if bytes.Equal(filter, installed(t, profile)) {
			return true
		}
	}
	return false
}

// compiled returns a profile's filter.
func compiled(t *testing.T, profile *configs.Seccomp) *filter {
	t.Helper()
	f, err := compile(profile)
	if err != nil || f == nil {
		t.Fatalf("compile = %v, %v", f, err)
	}
	return f
}

func TestFilterIsLibcontainers(t *testing.T) {
	for name, profile := range testProfiles(t) {
		t.Run(name, func(t *testing.T) {
			if f := compiled(t, profile); !isOneOf(t, f.program, profile) {
				t.Errorf("libcontainer installs another filter: %x", f.program)
			}
		})
	}
}

// encodedEnv returns the variable that executes a command with a filter.
func encodedEnv(f *filter) string {
	return filterEnv + "=" + base64.StdEncoding.EncodeToString(f.encode())
}

func TestCommandHasTheFilter(t *testing.T) {
	for name, profile := range testProfiles(t) {
		if hasListener(profile) || name == "default errno" { // that one allows no command
			continue
		}
		t.Run(name, func(t *testing.T) {
			f := compiled(t, profile)
			got := filterOfProcess(t, encodedEnv(f), "HOME=/ A=b\n", "/bin/sh", "-c", `echo HOME=$HOME A=$A; read x`)
			if !bytes.Equal(got, f.program) {
				t.Errorf("the command has another filter: %x", got)
			}
		})
	}
}

// The reason why a command does not start is on standard error, in libcontainer's words.
func TestCommandFails(t *testing.T) {
	script := filepath.Join(t.TempDir(), "script")
	testutil.Must(t, os.WriteFile(script, []byte("no program"), 0o755))
	f := compiled(t, testProfiles(t)["one call"])
	cmd := exec.Command("/proc/self/exe", script)
	cmd.Env = append(os.Environ(), encodedEnv(f))
	out, _ := cmd.CombinedOutput() // it ends with 255
	if want := "exec " + script + ": exec format error\n"; string(out) != want || cmd.ProcessState.ExitCode() != 255 {
		t.Errorf("%q, %v, want %q", out, cmd.ProcessState, want)
	}
}

func TestAllows(t *testing.T) {
	all := testProfiles(t)
	for _, c := range []struct {
		profile string
		call    uint32
		want    bool
	}{
		{"RuntimeDefault", unix.SYS_EXECVE, true},
		{"RuntimeDefault", unix.SYS_KEXEC_LOAD, false},
		{"nothing denied", unix.SYS_EXECVE, true},
		{"one call", unix.SYS_MKDIRAT, false},
		{"one call", unix.SYS_WRITE, true},
		{"kill", unix.SYS_REBOOT, false},
		{"kill", unix.SYS_SWAPOFF, false},
		{"default errno", unix.SYS_EXECVE, false},
		{"default errno", unix.SYS_WRITE, true},
		{"five architectures", unix.SYS_EXECVE, true},
	} {
		if got := compiled(t, all[c.profile]).allows(c.call); got != c.want {
			t.Errorf("%s allows system call %d: %t", c.profile, c.call, got)
		}
	}
}

func TestPass(t *testing.T) {
	all, table := testProfiles(t), newTable(t)
	hooked := configs.Hooks{configs.StartContainer: configs.HookList{configs.NewCommandHook(&configs.Command{Path: "/hook"})}}
	broken := &configs.Seccomp{DefaultAction: configs.Allow, Syscalls: []*configs.Syscall{{Name: "mkdir", Action: 99}}}
	caps := &configs.Capabilities{}
	for name, c := range map[string]struct {
		config *configs.Config
		init   bool
		want   bool
	}{
		"container":                {&configs.Config{Seccomp: all["RuntimeDefault"], Capabilities: caps}, true, true},
		"exec":                     {&configs.Config{Seccomp: all["RuntimeDefault"], Capabilities: caps, Hooks: hooked}, false, true},
		"container with hooks":     {&configs.Config{Seccomp: all["RuntimeDefault"], Capabilities: caps, Hooks: hooked}, true, false},
		"no profile":               {&configs.Config{Capabilities: caps}, true, false},
		"listener":                 {&configs.Config{Seccomp: all["notify"], Capabilities: caps}, true, false},
		"profile does not compile": {&configs.Config{Seccomp: broken, Capabilities: caps}, true, false},
		"capabilities not known":   {&configs.Config{Seccomp: all["RuntimeDefault"]}, true, false},
	} {
		t.Run(name, func(t *testing.T) {
			args := append(make([]string, 0, 9), "a")
			p := &libcontainer.Process{Args: args, Init: c.init}
			testutil.Must(t, table.Pass(p, c.config))
			if got := len(p.Args) == 2 && strings.HasPrefix(p.Args[1], carrierPrefix); got != c.want {
				t.Errorf("arguments %.40q", p.Args)
			}
			if args[:2][1] != "" {
				t.Error("the caller's arguments are changed")
			}
		})
	}
	err := table.Pass(&libcontainer.Process{}, &configs.Config{Seccomp: all["default errno"], Capabilities: caps})
	if denied := (*Denied)(nil); !errors.As(err, &denied) || denied.Syscall != "execve" {
		t.Errorf("a profile without execve: %v", err)
	}
}

// A command cannot bring a filter in place of the profile's. Its last argument would be one where
// Pass adds nothing.
func TestCommandBringsNoFilter(t *testing.T) {
	all := testProfiles(t)
	own := &libcontainer.Process{Args: []string{"a"}}
	testutil.Must(t, newTable(t).Pass(own, &configs.Config{Seccomp: all["one call"], Capabilities: &configs.Capabilities{}}))
	for name, args := range map[string][]string{"filter": own.Args, "NUL": {"a", "b\x00", "c"}} {
		for profile, seccomp := range map[string]*configs.Seccomp{"none": nil, "listener": all["notify"], "usual": all["RuntimeDefault"]} {
			p := &libcontainer.Process{Args: args}
			err := newTable(t).Pass(p, &configs.Config{Seccomp: seccomp, Capabilities: &configs.Capabilities{}})
			if !errors.Is(err, ErrArgument) || len(p.Args) != len(args) {
				t.Errorf("%s, profile %s: %v", name, profile, err)
			}
		}
	}
}

// libcontainer gets everything but the profile, and the capability to install it only if needed.
func TestInitsConfiguration(t *testing.T) {
	f := compiled(t, testProfiles(t)["one call"])
	for name, nnp := range map[string]bool{"usual": false, "no_new_privs": true} {
		t.Run(name, func(t *testing.T) {
			p := &libcontainer.Process{Args: []string{"a", "b\xff"}, Capabilities: &configs.Capabilities{}}
			testutil.Must(t, newTable(t).Pass(p, &configs.Config{Seccomp: testProfiles(t)["one call"]}))
			data, err := json.Marshal(map[string]any{"args": p.Args, "env": []string{"A=b"}, "uid": 7, "no_new_privileges": nnp,
				"capabilities": configs.Capabilities{Bounding: []string{"CAP_KILL"}, Permitted: []string{"CAP_KILL"}},
				"config":       configs.Config{Rootfs: "/x", Seccomp: testProfiles(t)["one call"]}, "later": 1})
			testutil.Must(t, err)
			var config map[string]json.RawMessage
			testutil.Must(t, json.Unmarshal(data, &config))
			c, err := newCommand(config)
			testutil.Must(t, err)
			if c.uid != 7 || len(c.args) != 2 || c.env[0] != "A=b" || c.flags != f.flags || !bytes.HasSuffix(c.program, f.program[f.patch:]) {
				t.Errorf("command %+v", c)
			}
			testutil.Must(t, withoutFilter(config))
			var container configs.Config
			var caps configs.Capabilities
			testutil.Must(t, errors.Join(json.Unmarshal(config["config"], &container), json.Unmarshal(config["capabilities"], &caps)))
			if container.Seccomp != nil || container.Rootfs != "/x" || string(config["later"]) != "1" {
				t.Errorf("configuration %s", config["config"])
			}
			if got := slices.Contains(caps.Permitted, "CAP_SYS_ADMIN"); got == nnp || !slices.Equal(caps.Bounding, []string{"CAP_KILL"}) {
				t.Errorf("capabilities %+v", caps)
			}
		})
	}
}

func TestBrokenProfile(t *testing.T) {
	profile := &configs.Seccomp{DefaultAction: configs.Allow, Syscalls: []*configs.Syscall{{Name: "write", Action: configs.Notify}}}
	if f, err := compile(profile); f != nil || err != nil {
		t.Errorf("compile = %v, %v", f, err)
	}
	if f, err := compile(testProfiles(t)["one call"]); f == nil || err != nil {
		t.Errorf("afterwards compile = %v, %v", f, err)
	}
}

func TestTableOfProfiles(t *testing.T) {
	table := newTable(t)
	for range 2 {
		for name, profile := range testProfiles(t) {
			got, err := table.filterOf(profile)
			testutil.Must(t, err)
			want := compiled(t, profile)
			if got.flags != want.flags || !bytes.Equal(got.program[got.patch:], want.program[want.patch:]) {
				t.Errorf("%s has another profile's filter", name)
			}
		}
	}
}

// A function that installs a filter and is not wrapped would install it in the launcher.
func TestAllFunctionsAreWrapped(t *testing.T) {
	header, err := os.ReadFile("/usr/include/seccomp.h")
	testutil.Must(t, err)
	source, err := os.ReadFile("libseccomp.go")
	testutil.Must(t, err)
	found := 0
	for _, m := range regexp.MustCompile(`(?m)^[a-z][\w ]*?\**(seccomp_(?:load|export_bpf)\w*)\(`).FindAllStringSubmatch(string(header), -1) {
		found++
		if !regexp.MustCompile(`--wrap=` + m[1] + `\b`).Match(source) {
			t.Errorf("%s is not wrapped", m[1])
		}
	}
	if found < 2 {
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
			if _, err := table.filterOf(profile); err != nil {
				b.Fatal(err)
			}
		}
	})
}
