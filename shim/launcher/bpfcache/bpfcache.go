// Package bpfcache installs seccomp filters of containers and execs, and compiles a profile once.
//
// libcontainer makes libseccomp compile the filter in the process that installs it. RuntimeDefault
// has some 400 rules, and compiling them takes longer than the rest of that process.
// Here the launcher runs the same code once per profile and captures the program (capture.h).
//
// libcontainer also installs the filter before its own last steps. So every profile would have to
// allow the system calls of these steps (fstatfs, openat2, statx: runc#5059), or even setuid and
// capset. Here init installs the filter as its last step, and only the execve of the command
// follows. [Table.Pass] adds the program to the process's arguments, behind a NUL byte. [Init], in
// the new process, takes the profile out of libcontainer's configuration. libcontainer does all of
// its work, and its execve fails because of the NUL byte. Then Init installs the filter and
// executes the command.
//
// If no_new_privs is not set, only CAP_SYS_ADMIN may install a filter. So the process keeps this
// capability in its permitted and effective set until execve. execve computes the command's sets
// from the bounding, inheritable and ambient sets (capabilities(7)), which never have it.
//
// # Contract
//
// The filter is always libcontainer's for the profile. If Init did not take the profile out,
// libcontainer would install the filter itself, and its execve would fail. So no command runs
// without its filter. A command cannot bring its own filter, because Pass refuses arguments with a
// NUL byte. For profiles with a listener, and for containers with startContainer hooks,
// libcontainer itself installs the filter, and the hooks run with it.
//
// A pulled profile has a base profile (KEP-6061). Then the filter is one program that permits a
// call only if both profiles permit it (join). libcontainer knows only one profile, so Pass fails
// where libcontainer would install the filter itself.
package bpfcache

import (
	"crypto/sha256"
	"encoding/base64"
	"encoding/binary"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"strings"

	"github.com/opencontainers/runc/libcontainer"
	"github.com/opencontainers/runc/libcontainer/configs"
	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/net/bpf"
	"golang.org/x/sys/unix"
)

// carrierPrefix begins the last argument of a process with a filter. execve accepts no argument
// with a NUL byte.
const carrierPrefix = "\x00berth-seccomp:"

// ErrArgument is the error of a command with a NUL byte in an argument.
var ErrArgument = errors.New("an argument of the command has a NUL byte")

// Denied is the error if a profile does not allow the system calls that start a command.
type Denied struct{ Syscall string }

func (e *Denied) Error() string {
	return fmt.Sprintf("the seccomp profile does not allow %s, which executes the command", e.Syscall)
}

// Pass adds the filter of the container's profile to a process that is about to start. It adds
// nothing if there is no profile, or if libcontainer must install the filter itself. If the profile
// does not compile, init reports why. The error is *Denied if the profile does not allow execve. It
// is ErrArgument if the command looks like a command with a filter.
func (t *Table) Pass(p *libcontainer.Process, config *configs.Config) error {
	passed, err := t.pass(p, config)
	if err == nil && !passed && hasBase(config.Seccomp) { // libcontainer would leave out the base
		return fmt.Errorf("%w: one of them does not compile, or libcontainer would install the filter", ErrNoJoint)
	}
	return err
}

func (t *Table) pass(p *libcontainer.Process, config *configs.Config) (passed bool, err error) {
	switch {
	case slices.ContainsFunc(p.Args, func(arg string) bool { return strings.IndexByte(arg, 0) >= 0 }):
		return false, ErrArgument
	case config.Seccomp == nil, hasListener(config.Seccomp):
		return false, nil
	case p.Init && len(config.Hooks[configs.StartContainer]) > 0:
		return false, nil
	}
	if p.Capabilities == nil {
		p.Capabilities = config.Capabilities // libcontainer's rule
	}
	if p.Capabilities == nil { // Init cannot know the privileges of the command
		return false, nil
	}
	f, err := t.filterOf(config.Seccomp)
	if err != nil || f == nil {
		return false, err
	}
	if !f.allows(unix.SYS_EXECVE) {
		return false, &Denied{"execve"}
	}
	p.Args = append(slices.Clip(p.Args), carrierPrefix+base64.StdEncoding.EncodeToString(f.encode()))
	return true, nil
}

// hasListener returns whether another process decides about system calls of the profile.
func hasListener(profile *configs.Seccomp) bool {
	return profile.DefaultAction == configs.Notify ||
		slices.ContainsFunc(profile.Syscalls, func(s *configs.Syscall) bool { return s.Action == configs.Notify })
}

// Allows returns whether a profile allows a system call. It returns true for a profile that does
// not compile.
func (t *Table) Allows(profile *configs.Seccomp, call uint32) bool {
	if profile == nil {
		return true
	}
	f, err := t.filterOf(profile)
	return err != nil || f == nil || f.allows(call)
}

// filterOf returns a profile's filter. It compiles a profile that the table lacks. It returns nil
// for a profile that does not compile.
func (t *Table) filterOf(profile *configs.Seccomp) (*filter, error) {
	key := profileKey(profile)
	encoded, err := t.find(key)
	if err != nil {
		return nil, err
	}
	if f, err := decode(encoded); err == nil {
		return f, nil
	}
	f, err := compileWithBase(profile)
	if err != nil || f == nil {
		return nil, err
	}
	return f, t.add(key, f.encode())
}

// compileWithBase is compile for a profile with or without a base.
func compileWithBase(profile *configs.Seccomp) (*filter, error) {
	if !hasBase(profile) {
		return compile(profile)
	}
	base, err := baseOf(profile)
	if err != nil {
		return nil, err
	}
	first, err := compile(base)
	if err != nil || first == nil {
		return nil, err
	}
	second, err := compile(profile)
	if err != nil || second == nil {
		return nil, err
	}
	return join(first, second)
}

// filter is a BPF program in the kernel's form.
type filter struct {
	flags   uint32 // of seccomp(2)
	patch   int    // bytes of program that libcontainer adds before libseccomp's
	program []byte // of struct sock_filter
}

// An encoded filter, in the machine's byte order: header, program.
//
//	0   magic
//	8   flags, length of the patch (uint32)
//	16  SHA-256 of all of this, with zeros here
const headerSize = 16 + sha256.Size

// magic changes with the format.
var magic = [8]byte{'b', 'e', 'r', 't', 'h', 'f', 'i', '2'}

const (
	instructionSize = 8
	maxInstructions = 4096 // the kernel's limit
)

func (f *filter) encode() []byte {
	b := make([]byte, 0, headerSize+len(f.program))
	b = append(b, magic[:]...)
	b = binary.NativeEndian.AppendUint32(b, f.flags)
	b = binary.NativeEndian.AppendUint32(b, uint32(f.patch))
	b = append(b, make([]byte, sha256.Size)...)
	b = append(b, f.program...)
	sum := sha256.Sum256(b)
	copy(b[16:], sum[:])
	return b
}

// decode is the inverse of encode. The filter shares data's memory.
func decode(data []byte) (*filter, error) {
	if len(data) < headerSize || [8]byte(data[:8]) != magic {
		return nil, errors.New("not a seccomp filter")
	}
	unsummed := slices.Clone(data)
	clear(unsummed[16:headerSize])
	if sha256.Sum256(unsummed) != [sha256.Size]byte(data[16:headerSize]) {
		return nil, errors.New("damaged seccomp filter")
	}
	f := &filter{
		flags:   binary.NativeEndian.Uint32(data[8:]),
		patch:   int(binary.NativeEndian.Uint32(data[12:])),
		program: data[headerSize:],
	}
	n := len(f.program)
	if n == 0 || n%instructionSize != 0 || n/instructionSize > maxInstructions ||
		f.patch >= n || f.patch%instructionSize != 0 {
		return nil, fmt.Errorf("seccomp filter with a program of %d bytes, %d of them a patch", n, f.patch)
	}
	return f, nil
}

// auditArchs are the kernel's names of architectures (struct seccomp_data).
var auditArchs = map[string]uint32{"amd64": unix.AUDIT_ARCH_X86_64, "arm64": unix.AUDIT_ARCH_AARCH64}

// allows returns whether the filter allows a system call with all possible arguments. It returns
// true if it cannot tell.
func (f *filter) allows(call uint32) bool {
	arch, known := auditArchs[runtime.GOARCH]
	if !known {
		return true
	}
	value, err := f.run(arch, call, [6]uint64{})
	if err != nil {
		return true
	}
	action := value & unix.SECCOMP_RET_ACTION_FULL
	return action == unix.SECCOMP_RET_ALLOW || action == unix.SECCOMP_RET_LOG
}

// run returns what the program returns for a call.
func (f *filter) run(arch, call uint32, args [6]uint64) (value uint32, err error) {
	var program []bpf.Instruction
	for _, i := range f.raw() {
		program = append(program, i.Disassemble())
	}
	vm, err := bpf.NewVM(program)
	if err != nil {
		return 0, err
	}
	// The virtual machine reads words of packets, which are big-endian.
	data := binary.BigEndian.AppendUint32(nil, call)
	data = binary.BigEndian.AppendUint32(data, arch)
	data = append(data, make([]byte, 8)...) // instruction pointer
	for _, arg := range args {
		data = binary.BigEndian.AppendUint32(data, uint32(arg)) // the machine is little-endian
		data = binary.BigEndian.AppendUint32(data, uint32(arg>>32))
	}
	result, err := vm.Run(data)
	return uint32(result), err
}

// raw returns the instructions of the program.
func (f *filter) raw() (program []bpf.RawInstruction) {
	for i := range slices.Chunk(f.program, instructionSize) {
		program = append(program, bpf.RawInstruction{
			Op: binary.NativeEndian.Uint16(i), Jt: i[2], Jf: i[3], K: binary.NativeEndian.Uint32(i[4:])})
	}
	return program
}

// assemble is the inverse of raw.
func assemble(program []bpf.RawInstruction) (raw []byte) {
	for _, i := range program {
		raw = binary.NativeEndian.AppendUint16(raw, i.Op)
		raw = append(raw, i.Jt, i.Jf)
		raw = binary.NativeEndian.AppendUint32(raw, i.K)
	}
	return raw
}

// flagsOf returns the flags of seccomp(2) for a profile that has no listener. TSYNC would have no
// effect, because the other threads end with the execve. libcontainer also ignores it.
func flagsOf(profile *configs.Seccomp) (flags uint32) {
	for _, f := range profile.Flags {
		switch f {
		case specs.LinuxSeccompFlagLog:
			flags |= unix.SECCOMP_FILTER_FLAG_LOG
		case specs.LinuxSeccompFlagSpecAllow:
			flags |= unix.SECCOMP_FILTER_FLAG_SPEC_ALLOW
		case specs.LinuxSeccompFlagWaitKillableRecv:
			flags |= unix.SECCOMP_FILTER_FLAG_WAIT_KILLABLE_RECV
		}
	}
	return flags
}

// key identifies a profile. It is a cryptographic hash, so nobody can write a profile with the key
// of another profile.
type key [sha256.Size]byte

// profileKey returns the key of a profile's filter.
func profileKey(p *configs.Seccomp) (k key) {
	var b []byte
	number := func(n uint64) { b = binary.NativeEndian.AppendUint64(b, n) }
	optional := func(n *uint) {
		if n == nil {
			number(0)
			return
		}
		number(1)
		number(uint64(*n))
	}
	text := func(s string) { number(uint64(len(s))); b = append(b, s...) }

	text(p.ListenerPath) // without it, the metadata are the base
	text(p.ListenerMetadata)
	number(uint64(p.DefaultAction))
	optional(p.DefaultErrnoRet)
	number(uint64(len(p.Architectures)))
	for _, a := range p.Architectures {
		text(a)
	}
	number(uint64(len(p.Flags)))
	for _, f := range p.Flags {
		text(string(f))
	}
	number(uint64(len(p.Syscalls)))
	for _, call := range p.Syscalls {
		text(call.Name)
		number(uint64(call.Action))
		optional(call.ErrnoRet)
		number(uint64(len(call.Args)))
		for _, arg := range call.Args {
			number(uint64(arg.Index))
			number(arg.Value)
			number(arg.ValueTwo)
			number(uint64(arg.Op))
		}
	}
	return sha256.Sum256(b)
}
