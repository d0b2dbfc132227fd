package bpfcache

import (
	"bytes"
	"os"
	"path/filepath"
	"testing"

	"github.com/opencontainers/runc/libcontainer/configs"
	"github.com/opencontainers/runtime-spec/specs-go"
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

// sample returns an encoded filter with this number of instructions.
func sample(instructions int) []byte {
	return (&filter{program: bytes.Repeat([]byte("instruct"), instructions)}).encode()
}

func mustFind(t *testing.T, table *Table, n byte, want []byte) {
	t.Helper()
	if got, err := table.find(key{n}); err != nil || !bytes.Equal(got, want) {
		t.Errorf("filter %d has %d bytes, want %d, %v", n, len(got), len(want), err)
	}
}

func mustAdd(t *testing.T, table *Table, n byte, encoded []byte) {
	t.Helper()
	if err := table.add(key{n}, encoded); err != nil {
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
		{DefaultAction: configs.Allow}, {ListenerMetadata: "{}"}, {ListenerPath: "/x", ListenerMetadata: "{}"}, {ListenerPath: "/x"},
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

// A lookup in a damaged table ends, and returns intact filters only.
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
					t.Errorf("byte %d ^ %#x: filter %d = %x, %v", i, flip, k[0], got, err)
				}
			}
		}
	}
}

func TestDecode(t *testing.T) {
	program := make([]byte, instructionSize)
	for name, c := range map[string]struct {
		filter filter
		ok     bool
	}{
		"smallest":                     {filter{0, 0, program}, true},
		"patch and flags":              {filter{6, instructionSize, append(program, program...)}, true},
		"patch only":                   {filter{0, instructionSize, program}, false},
		"half a patch":                 {filter{0, 1, append(program, program...)}, false},
		"no program":                   {filter{}, false},
		"half an instruction":          {filter{0, 0, program[1:]}, false},
		"longer than the kernel takes": {filter{0, 0, make([]byte, (maxInstructions+1)*instructionSize)}, false},
	} {
		t.Run(name, func(t *testing.T) {
			f, err := decode(c.filter.encode())
			if (err == nil) != c.ok || c.ok && (f.flags != c.filter.flags || f.patch != c.filter.patch || !bytes.Equal(f.program, c.filter.program)) {
				t.Errorf("decode = %+v, %v", f, err)
			}
		})
	}
}

func TestDamagedFilterIsRefused(t *testing.T) {
	good := sample(2)
	for n := range good {
		if _, err := decode(good[:n]); err == nil {
			t.Errorf("decode accepts %d of %d bytes", n, len(good))
		}
		bad := bytes.Clone(good)
		bad[n] ^= 4
		if _, err := decode(bad); err == nil {
			t.Errorf("decode accepts a filter with byte %d changed", n)
		}
	}
}
