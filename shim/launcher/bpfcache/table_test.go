package bpfcache

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/cespare/xxhash/v2"
	"github.com/opencontainers/runc/libcontainer/configs"
	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
)

func newTable(tb testing.TB) *Table {
	tb.Helper()
	f, err := os.Create(filepath.Join(tb.TempDir(), "table"))
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() { f.Close() })
	return NewTable(f)
}

// sample returns an encoded recording with this number of instructions.
func sample(instructions int) []byte {
	return (&Recording{calls: []byte{kindInit, callSize - 1: 0}, program: bytes.Repeat([]byte("instruct"), instructions)}).encode()
}

func mustFind(t *testing.T, table *Table, n byte, want []byte) {
	t.Helper()
	if got, err := table.find(key{n}); err != nil || !bytes.Equal(got, want) {
		t.Errorf("recording %d has %d bytes, want %d, %v", n, len(got), len(want), err)
	}
}

func mustAdd(t *testing.T, table *Table, n byte, recording []byte) {
	t.Helper()
	if err := table.add(key{n}, recording); err != nil {
		t.Fatal(err)
	}
}

func TestTable(t *testing.T) {
	table := newTable(t)
	mustFind(t, table, 1, nil)
	mustAdd(t, table, 1, sample(1))
	mustAdd(t, table, 2, sample(2))
	mustAdd(t, table, 1, sample(3)) // kept: another launcher was first
	mustFind(t, table, 1, sample(1))
	mustFind(t, table, 2, sample(2))
	mustFind(t, table, 3, nil)
}

// Profiles that differ anywhere have different keys, also where one list's end is the next one's
// beginning.
func TestProfilesHaveTheirOwnKeys(t *testing.T) {
	one, zero := uint(1), uint(0)
	call := func(name string, args ...*configs.Arg) *configs.Syscall {
		return &configs.Syscall{Name: name, Action: configs.Errno, Args: args}
	}
	arg := &configs.Arg{Index: 1, Value: 2, ValueTwo: 3, Op: configs.EqualTo}
	profiles := []configs.Seccomp{
		{},
		{DefaultAction: configs.Allow},
		{DefaultErrnoRet: &zero}, {DefaultErrnoRet: &one},
		{Architectures: []string{"a"}}, {Architectures: []string{"a", "b"}}, {Architectures: []string{"ab"}},
		{Flags: []specs.LinuxSeccompFlag{"a"}}, {Flags: []specs.LinuxSeccompFlag{"a", "b"}},
		{Syscalls: []*configs.Syscall{call("a")}}, {Syscalls: []*configs.Syscall{call("a"), call("a")}},
		{Syscalls: []*configs.Syscall{call("b")}},
		{Syscalls: []*configs.Syscall{{Name: "a", Action: configs.Errno, ErrnoRet: &one}}},
		{Syscalls: []*configs.Syscall{{Name: "a", Action: configs.Kill}}},
		{Syscalls: []*configs.Syscall{call("a", arg)}}, {Syscalls: []*configs.Syscall{call("a", arg, arg)}},
	}
	seen := map[key]int{}
	for i := range profiles {
		k := profileKey(&profiles[i])
		if other, has := seen[k]; has {
			t.Errorf("profiles %d and %d have the same key", other, i)
		}
		seen[k] = i
	}
}

func TestFullTableIsEmptied(t *testing.T) {
	table := newTable(t)
	big := sample(maxInstructions)
	n := byte(maxTable / len(big))
	for i := range n + 1 {
		mustAdd(t, table, i+1, big)
	}
	mustFind(t, table, n+1, big)
	mustFind(t, table, 1, nil)
	if info, err := table.f.Stat(); err != nil || info.Size() > maxTable {
		t.Errorf("the table has %d bytes, %v", info.Size(), err)
	}
}

// Readers ignore the incomplete entry of a killed launcher, and the next one overwrites it.
func TestPartialEntryOfKilledLauncher(t *testing.T) {
	whole := newTable(t)
	mustAdd(t, whole, 1, sample(1))
	before, err := os.ReadFile(whole.f.Name())
	if err != nil {
		t.Fatal(err)
	}
	mustAdd(t, whole, 2, sample(2))
	after, err := os.ReadFile(whole.f.Name())
	if err != nil {
		t.Fatal(err)
	}
	for n := len(before); n <= len(after); n++ {
		table := newTable(t)
		if _, err := table.f.WriteAt(append(before[:tableHead:tableHead], after[tableHead:n]...), 0); err != nil {
			t.Fatal(err)
		}
		mustFind(t, table, 1, sample(1))
		mustFind(t, table, 2, nil)
		mustAdd(t, table, 3, sample(3))
		mustFind(t, table, 3, sample(3))
	}
}

// A lookup in a damaged table ends, and returns intact recordings only.
func TestDamagedTable(t *testing.T) {
	whole := newTable(t)
	mustAdd(t, whole, 1, sample(1))
	mustAdd(t, whole, 2, sample(2))
	good, err := os.ReadFile(whole.f.Name())
	if err != nil {
		t.Fatal(err)
	}
	for i := range good {
		for _, flip := range []byte{0x01, 0x80, 0xff} {
			table := newTable(t)
			bad := bytes.Clone(good)
			bad[i] ^= flip
			if _, err := table.f.WriteAt(bad, 0); err != nil {
				t.Fatal(err)
			}
			for k, want := range map[key][]byte{{1}: sample(1), {2}: sample(2)} {
				if got, err := table.find(k); err != nil || got != nil && !bytes.Equal(got, want) {
					t.Errorf("byte %d ^ %#x: recording %d = %x, %v", i, flip, k[0], got, err)
				}
			}
		}
	}
}

func TestDecodeRecording(t *testing.T) {
	rule := func(args int) []byte {
		return append([]byte{kindRule, 16: byte(args), callSize - 1: 0}, make([]byte, args*argSize)...)
	}
	start := []byte{kindInit, callSize - 1: 0}
	arch := []byte{kindArch, callSize - 1: 0}
	program := make([]byte, instructionSize)
	join := func(parts ...[]byte) []byte { return bytes.Join(parts, nil) }
	for _, c := range []struct {
		name      string
		recording Recording
		ok        bool
	}{
		{"smallest", Recording{start, program}, true},
		{"settings and rules", Recording{join(start, arch, rule(0), rule(maxArgs), rule(1)), program}, true},
		{"no calls", Recording{nil, program}, false},
		{"no beginning", Recording{rule(0), program}, false},
		{"two beginnings", Recording{join(start, start), program}, false},
		{"setting after a rule", Recording{join(start, rule(0), arch), program}, false},
		{"unknown call", Recording{join(start, []byte{kindRule + 1, callSize - 1: 0}), program}, false},
		{"too many arguments", Recording{join(start, rule(maxArgs+1)), program}, false},
		{"arguments of a setting", Recording{join(start, []byte{kindArch, 16: 1, callSize - 1: 0}, make([]byte, argSize)), program}, false},
		{"half a call", Recording{start[:callSize-1], program}, false},
		{"half an argument", Recording{join(start, rule(1)[:callSize+argSize-1]), program}, false},
		{"no program", Recording{start, nil}, false},
		{"half an instruction", Recording{start, program[1:]}, false},
		{"longer than the kernel takes", Recording{start, make([]byte, (maxInstructions+1)*instructionSize)}, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			if m, err := decode(c.recording.encode()); (err == nil) != c.ok || c.ok && (!bytes.Equal(m.calls, c.recording.calls) || !bytes.Equal(m.program, c.recording.program)) {
				t.Errorf("decode = %+v, %v", m, err)
			}
		})
	}
}

func TestDamagedRecordingIsRefused(t *testing.T) {
	good := sample(2)
	for n := range good {
		if _, err := decode(good[:n]); err == nil {
			t.Errorf("decode accepts %d of %d bytes", n, len(good))
		}
		bad := bytes.Clone(good)
		bad[n] ^= 4
		if _, err := decode(bad); err == nil {
			t.Errorf("decode accepts a recording with byte %d changed", n)
		}
	}
}

func TestSealed(t *testing.T) {
	f, err := sealed(sample(1))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	again, err := os.OpenFile(fmt.Sprintf("/proc/self/fd/%d", f.Fd()), os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer again.Close()
	for name, err := range map[string]error{
		"write":    func() error { _, err := again.WriteAt([]byte{1}, 0); return err }(),
		"append":   func() error { _, err := again.WriteAt([]byte{1}, int64(len(sample(1)))); return err }(),
		"truncate": again.Truncate(1),
		"mmap": func() error {
			_, err := unix.Mmap(int(again.Fd()), 0, 8, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
			return err
		}(),
	} {
		if err == nil {
			t.Errorf("%s changes sealed memory", name)
		}
	}
}

// A page that a pipe holds cannot be sealed. That is no error: init compiles then.
func TestHeldPageIsNotSealed(t *testing.T) {
	fd, err := unix.MemfdCreate("seccomp", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		t.Fatal(err)
	}
	f := os.NewFile(uintptr(fd), "seccomp")
	if _, err := f.Write(make([]byte, os.Getpagesize())); err != nil {
		t.Fatal(err)
	}
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	defer w.Close()
	if n, err := unix.Splice(fd, new(int64), int(w.Fd()), nil, os.Getpagesize(), 0); n != int64(os.Getpagesize()) || err != nil {
		t.Fatalf("splice: %d, %v", n, err)
	}
	if _, err := unix.FcntlInt(f.Fd(), unix.F_ADD_SEALS, unix.F_SEAL_WRITE); err != unix.EBUSY {
		t.Skipf("a page in a pipe can be sealed: %v", err)
	}
	if got, err := seal(f); got != nil || err != nil {
		t.Errorf("seal = %v, %v", got, err)
	}
	if err := f.Close(); err == nil {
		t.Error("the file is still open")
	}
}

// FuzzDecodeRecording checks that accepted data encode to the same bytes.
func FuzzDecodeRecording(f *testing.F) {
	f.Add(sample(1))
	f.Add((&Recording{calls: append([]byte{kindInit, callSize - 1: 0}, []byte{kindRule, 16: 1, callSize + argSize - 1: 0}...), program: make([]byte, 16)}).encode())
	f.Fuzz(func(t *testing.T, data []byte) {
		// Set the right checksum, which the fuzzer would not find.
		if len(data) >= headerSize {
			data = bytes.Clone(data)
			binary.NativeEndian.PutUint64(data[16:], xxhash.Sum64(data[headerSize:]))
		}
		m, err := decode(data)
		if err == nil && !bytes.Equal(m.encode(), data) {
			t.Errorf("%x is read as %+v", data, m)
		}
	})
}
