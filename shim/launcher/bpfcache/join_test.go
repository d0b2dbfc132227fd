//go:build cgo && seccomp

package bpfcache

import (
	"encoding/json"
	"math/rand/v2"
	"os"
	"os/exec"
	"slices"
	"testing"

	"github.com/opencontainers/runc/libcontainer"
	"github.com/opencontainers/runc/libcontainer/configs"
	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"berth/internal/testutil"
)

// withBase returns a profile with its base, in the form of package confine.
func withBase(tb testing.TB, profile, base *specs.LinuxSeccomp) *configs.Seccomp {
	tb.Helper()
	config := libcontainers(tb, profile)
	encoded, err := json.Marshal(base)
	testutil.Must(tb, err)
	config.ListenerMetadata = string(encoded)
	return config
}

func joined(tb testing.TB, profile *configs.Seccomp) *filter {
	tb.Helper()
	f, err := compileWithBase(profile)
	if err != nil || f == nil {
		tb.Fatalf("compileWithBase = %v, %v", f, err)
	}
	return f
}

// randomProfile returns a profile with rules for a few calls, so that two profiles have rules for
// the same calls.
func randomProfile(r *rand.Rand) *specs.LinuxSeccomp {
	actions := []specs.LinuxSeccompAction{specs.ActAllow, specs.ActAllow, specs.ActAllow, specs.ActErrno, specs.ActLog,
		specs.ActTrace, specs.ActTrap, specs.ActKillProcess, specs.ActKillThread}
	operators := []specs.LinuxSeccompOperator{specs.OpNotEqual, specs.OpLessThan, specs.OpLessEqual, specs.OpEqualTo,
		specs.OpGreaterEqual, specs.OpGreaterThan, specs.OpMaskedEqual}
	names := []string{"read", "clone", "ioctl", "socket", "personality", "mkdir", "mmap2", "umount", "openat2", "statmount"}
	p := &specs.LinuxSeccomp{DefaultAction: actions[r.IntN(len(actions))]}
	for _, a := range []specs.Arch{specs.ArchX86_64, specs.ArchX86, specs.ArchX32, specs.ArchAARCH64, specs.ArchARM} {
		if r.IntN(3) > 0 {
			p.Architectures = append(p.Architectures, a)
		}
	}
	for range r.IntN(12) {
		call := specs.LinuxSyscall{Names: []string{names[r.IntN(len(names))]}, Action: actions[r.IntN(len(actions))]}
		if errno := uint(1 + r.IntN(3)); call.Action == specs.ActErrno || call.Action == specs.ActTrace {
			call.ErrnoRet = &errno
		}
		for _, index := range r.Perm(3)[:r.IntN(3)] {
			call.Args = append(call.Args, specs.LinuxSeccompArg{Index: uint(index), Value: randomArg(r), ValueTwo: randomArg(r),
				Op: operators[r.IntN(len(operators))]})
		}
		p.Syscalls = append(p.Syscalls, call)
	}
	return p
}

// compilable returns a profile's filter, or nil if libseccomp refuses two conditions of it
// together.
func compilable(t *testing.T, profile *specs.LinuxSeccomp) *filter {
	t.Helper()
	f, err := compile(libcontainers(t, profile))
	testutil.Must(t, err)
	return f
}

// randomArg returns one of few values, so that conditions often hold.
func randomArg(r *rand.Rand) uint64 { return uint64(r.IntN(4)) << (32 * r.IntN(2)) }

// The numbers of names in randomProfile, and of one more call, on each architecture. 1 << 30 marks
// calls of x32.
var testCalls = map[uint32][]uint32{
	unix.AUDIT_ARCH_X86_64:  {0, 16, 41, 56, 83, 135, 166, 437, 457, 1, 1 << 30, 1<<30 | 514, 1<<30 | 56, 1<<30 | 41},
	unix.AUDIT_ARCH_I386:    {3, 120, 54, 359, 136, 39, 192, 22, 437, 457, 4},
	unix.AUDIT_ARCH_AARCH64: {63, 220, 29, 198, 92, 34, 437, 457, 64},
	unix.AUDIT_ARCH_ARM:     {3, 120, 54, 281, 136, 39, 192, 22, 437, 457, 4},
	unix.AUDIT_ARCH_RISCV64: {63},
}

// wantJoined returns the value of two filters together. A denial of the base comes first. The
// kernel would return the stricter of two denials.
func wantJoined(base, profile uint32) uint32 {
	if denies(base) {
		return base
	}
	if denies(profile) || profile&unix.SECCOMP_RET_ACTION_FULL <= base&unix.SECCOMP_RET_ACTION_FULL {
		return profile
	}
	return base
}

// A joined program permits a call with given arguments if and only if both programs permit it.
func TestJoinedProgramIsTheIntersection(t *testing.T) {
	seed := uint64(1) // libseccomp 2.5.4 does not return for one of some 10,000 random profiles
	if testutil.AllTests() {
		seed = rand.Uint64()
	}
	t.Logf("seed %d", seed)
	r := rand.New(rand.NewPCG(seed, 0))
	seen := map[[2]bool]int{} // calls, by whether the base and the profile permit them
	for pairs := 0; pairs < 150; {
		base, profile := randomProfile(r), randomProfile(r)
		first, second := compilable(t, base), compilable(t, profile)
		if first == nil || second == nil {
			continue
		}
		pairs++
		config := withBase(t, profile, base)
		both := joined(t, config)
		for arch, calls := range testCalls {
			for _, call := range append(calls, r.Uint32()) {
				for range 3 {
					args := [6]uint64{randomArg(r), randomArg(r), randomArg(r)}
					x, y, got := run(t, first, arch, call, args), run(t, second, arch, call, args), run(t, both, arch, call, args)
					if got != wantJoined(x, y) {
						text, _ := json.Marshal(profile) // only for the message
						t.Fatalf("seed %d: arch %#x call %#x %v: base %#x, profile %#x, both %#x\n%s\n%s",
							seed, arch, call, args, x, y, got, config.ListenerMetadata, text)
					}
					seen[[2]bool{denies(x), denies(y)}]++
				}
			}
		}
	}
	if len(seen) != 4 {
		t.Errorf("not all cases were tested: %v", seen)
	}
}

func run(t *testing.T, f *filter, arch, call uint32, args [6]uint64) uint32 {
	t.Helper()
	value, err := f.run(arch, call, args)
	testutil.Must(t, err)
	return value
}

// The kernel accepts a joined filter, and the command has it.
func TestCommandHasTheJoinedFilter(t *testing.T) {
	base := &specs.LinuxSeccomp{DefaultAction: specs.ActAllow,
		Syscalls: []specs.LinuxSyscall{{Names: []string{"mkdir", "mkdirat"}, Action: specs.ActErrno}}}
	profile := &specs.LinuxSeccomp{DefaultAction: specs.ActAllow, Syscalls: []specs.LinuxSyscall{
		{Names: []string{"rmdir", "unlinkat"}, Action: specs.ActErrno}, {Names: []string{"getcwd"}, Action: specs.ActLog}}}
	dir := t.TempDir()
	testutil.Must(t, os.Mkdir(dir+"/present", 0o755))
	cmd := exec.Command("/proc/self/exe", "/bin/sh", "-c", `mkdir "$0/new"; rmdir "$0/present"; ls "$0"`, dir)
	cmd.Env = append(os.Environ(), encodedEnv(joined(t, withBase(t, profile, base))))
	out, err := cmd.Output()
	testutil.Must(t, err)
	if string(out) != "present\n" {
		t.Errorf("the directory has %q", out)
	}
}

// Without a joined filter, no process starts.
func TestPassNeedsTheBase(t *testing.T) {
	base, err := json.Marshal(&specs.LinuxSeccomp{DefaultAction: specs.ActAllow})
	testutil.Must(t, err)
	var many []specs.LinuxSyscall
	for i := range uint64(maxInstructions) {
		many = append(many, specs.LinuxSyscall{Names: []string{"read"}, Action: specs.ActErrno,
			Args: []specs.LinuxSeccompArg{{Value: i, Op: specs.OpEqualTo}}})
	}
	hooks := configs.Hooks{configs.StartContainer: configs.HookList{configs.NewCommandHook(&configs.Command{Path: "/hook"})}}
	caps := &configs.Capabilities{}
	for name, c := range map[string]struct {
		base     string
		profile  *specs.LinuxSeccomp
		hooks    configs.Hooks
		caps     *configs.Capabilities
		succeeds bool
	}{
		"joined":          {string(base), &specs.LinuxSeccomp{DefaultAction: specs.ActAllow}, nil, caps, true},
		"hook":            {string(base), &specs.LinuxSeccomp{DefaultAction: specs.ActAllow}, hooks, caps, false},
		"no capabilities": {string(base), &specs.LinuxSeccomp{DefaultAction: specs.ActAllow}, nil, nil, false},
		"too long":        {string(base), &specs.LinuxSeccomp{DefaultAction: specs.ActAllow, Syscalls: many}, nil, caps, false},
		"no JSON":         {"x", &specs.LinuxSeccomp{DefaultAction: specs.ActAllow}, nil, caps, false},
		"empty":           {"{}", &specs.LinuxSeccomp{DefaultAction: specs.ActAllow}, nil, caps, false},
		"listener": {`{"defaultAction":"SCMP_ACT_NOTIFY","listenerPath":"/x"}`,
			&specs.LinuxSeccomp{DefaultAction: specs.ActAllow}, nil, caps, false},
	} {
		t.Run(name, func(t *testing.T) {
			config := libcontainers(t, c.profile)
			config.ListenerMetadata = c.base
			p := &libcontainer.Process{Args: []string{"true"}, Init: true, Capabilities: c.caps}
			err := newTable(t).Pass(p, &configs.Config{Seccomp: config, Hooks: c.hooks})
			if (err == nil) != c.succeeds || (len(p.Args) == 2) != c.succeeds {
				t.Errorf("Pass = %v, %d arguments", err, len(p.Args))
			}
		})
	}
}

func TestJoinRefusesUnknownInstructions(t *testing.T) {
	f := compiled(t, runtimeDefault(t))
	g := &filter{program: slices.Concat([]byte{0x87, 0, 0, 0, 0, 0, 0, 0}, f.program)} // TXA
	if _, err := join(f, g); err == nil {
		t.Error("join accepted a program that reads the index register")
	}
	if _, err := join(g, f); err == nil {
		t.Error("join accepted a program that reads the index register")
	}
}

func BenchmarkJoin(b *testing.B) {
	f, err := compile(runtimeDefault(b))
	testutil.Must(b, err)
	for b.Loop() {
		joint, err := join(f, f)
		testutil.Must(b, err)
		b.ReportMetric(float64(len(joint.program)/instructionSize), "instructions")
	}
}
