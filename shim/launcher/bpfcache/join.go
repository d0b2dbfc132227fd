package bpfcache

import (
	"encoding/json"
	"errors"
	"fmt"
	"slices"

	"github.com/opencontainers/runc/libcontainer/configs"
	"github.com/opencontainers/runc/libcontainer/specconv"
	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/net/bpf"
	"golang.org/x/sys/unix"
)

// ErrNoJoint is the error of a profile that cannot be joined with its base.
var ErrNoJoint = errors.New("the seccomp profile cannot be joined with its base")

// hasBase returns whether a profile has a base. Package confine stores the base in a field that has
// no other use without a listener.
func hasBase(p *configs.Seccomp) bool {
	return p != nil && p.ListenerPath == "" && p.ListenerMetadata != ""
}

func baseOf(p *configs.Seccomp) (*configs.Seccomp, error) {
	var base specs.LinuxSeccomp
	if err := json.Unmarshal([]byte(p.ListenerMetadata), &base); err != nil {
		return nil, fmt.Errorf("decode the base of a seccomp profile: %w", err)
	}
	config, err := specconv.SetupSeccomp(&base)
	if err == nil && (config == nil || hasListener(config)) {
		err = errors.New("it is empty or has a listener")
	}
	if err != nil {
		return nil, fmt.Errorf("%w: the base: %w", ErrNoJoint, err)
	}
	return config, nil
}

// join returns a filter that permits a call only if both filters permit it. It is the first program
// with jumps in place of its permissive returns, and copies of the second program. There is a copy
// for each permissive value of the first, because the stricter of both values is returned:
// SECCOMP_RET_TRACE before LOG before ALLOW, as with two filters in the kernel (seccomp(2)).
//
// The kernel runs two installed filters in the same way. But the first would have to permit the
// installation of the second, and RuntimeDefault need not do that.
func join(first, second *filter) (*filter, error) {
	program, err := first.instructions()
	if err != nil {
		return nil, err
	}
	then, err := second.instructions()
	if err != nil {
		return nil, err
	}
	starts := map[uint32]int{} // of the copies, by the value of the first program
	for at := range len(program) {
		value := program[at].K
		if program[at].Op != opReturn || denies(value) {
			continue
		}
		if _, ok := starts[value]; !ok {
			starts[value] = len(program)
			program = appendCopy(program, then, value)
		}
		program[at] = bpf.RawInstruction{Op: opJump, K: uint32(starts[value] - at - 1)}
	}
	if len(program) > maxInstructions {
		return nil, fmt.Errorf("%w: %d instructions, the kernel's limit is %d", ErrNoJoint, len(program), maxInstructions)
	}
	return &filter{flags: joinFlags(first.flags, second.flags), patch: first.patch, program: assemble(program)}, nil
}

// appendCopy appends a program that ends with value where it would end with a more permissive one.
// The program finds the registers as at its start: the accumulator is zero. The kernel's cache of
// permitted calls knows AND, but not the load of a constant (seccomp_is_const_allow).
func appendCopy(to, program []bpf.RawInstruction, value uint32) []bpf.RawInstruction {
	to = append(to, bpf.RawInstruction{Op: opLoad}, bpf.RawInstruction{Op: opAnd})
	for _, i := range program {
		if i.Op == opReturn && !denies(i.K) && i.K&unix.SECCOMP_RET_ACTION_FULL > value&unix.SECCOMP_RET_ACTION_FULL {
			i.K = value
		}
		to = append(to, i)
	}
	return to
}

// denies returns whether the kernel does not run a call after this return value. A tracer may
// permit a call after SECCOMP_RET_TRACE.
func denies(value uint32) bool {
	switch value & unix.SECCOMP_RET_ACTION_FULL {
	case unix.SECCOMP_RET_ALLOW, unix.SECCOMP_RET_LOG, unix.SECCOMP_RET_TRACE:
		return false
	}
	return true
}

// joinFlags returns flags that are as strict as both. Without SPEC_ALLOW, the kernel mitigates
// speculative store bypass.
func joinFlags(a, b uint32) uint32 {
	const relaxing = unix.SECCOMP_FILTER_FLAG_SPEC_ALLOW
	return a&b&relaxing | (a|b)&^relaxing
}

// Operation codes of the instructions that libseccomp and libcontainer generate.
const (
	opLoad   = unix.BPF_LD | unix.BPF_W | unix.BPF_ABS
	opAnd    = unix.BPF_ALU | unix.BPF_AND | unix.BPF_K
	opJump   = unix.BPF_JMP | unix.BPF_JA
	opReturn = unix.BPF_RET | unix.BPF_K
)

var joinable = []uint16{
	opLoad, opAnd, opJump, opReturn,
	unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, unix.BPF_JMP | unix.BPF_JGT | unix.BPF_K,
	unix.BPF_JMP | unix.BPF_JGE | unix.BPF_K, unix.BPF_JMP | unix.BPF_JSET | unix.BPF_K,
}

// instructions returns the program. The error names an instruction that join does not know, for
// example one with a register that the other program has changed.
func (f *filter) instructions() ([]bpf.RawInstruction, error) {
	program := f.raw()
	for _, i := range program {
		if !slices.Contains(joinable, i.Op) {
			return nil, fmt.Errorf("%w: instruction with the code %#x", ErrNoJoint, i.Op)
		}
	}
	return program, nil
}
