package profile

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	crierrors "k8s.io/cri-api/pkg/errors"

	"berth/internal/errdefs"
)

// Limits of a profile. Docker's default profile has about 500 names in 30 rules and 15 KiB.
const (
	MaxSize  = 1 << 20 // bytes of the layer
	maxRules = 2048    // entries of syscalls
	maxNames = 2048    // names of all entries together
	maxName  = 128     // bytes of one name
	maxWords = 64      // architectures and flags
	maxArgs  = 6       // filters of one entry: a system call has six arguments

	// maxConditions limits the filters of all names together. libseccomp compiles 512 in half a
	// second for five architectures, but 2000 in minutes. A program of the kernel has no room for
	// 1024.
	maxConditions = 512

	// maxValues limits the JSON values before they are decoded. A byte of JSON may take 30 bytes in
	// memory. Fewer than this are in a profile whose canonical encoding has MaxSize.
	maxValues = 1 << 17
)

var (
	actions = []specs.LinuxSeccompAction{
		specs.ActKill, specs.ActKillProcess, specs.ActKillThread, specs.ActTrap,
		specs.ActErrno, specs.ActTrace, specs.ActAllow, specs.ActLog,
	}
	operators = []specs.LinuxSeccompOperator{
		specs.OpNotEqual, specs.OpLessThan, specs.OpLessEqual, specs.OpEqualTo,
		specs.OpGreaterEqual, specs.OpGreaterThan, specs.OpMaskedEqual,
	}
	flags = []specs.LinuxSeccompFlag{
		specs.LinuxSeccompFlagLog, specs.LinuxSeccompFlagSpecAllow,
	}
	architectures = []specs.Arch{
		specs.ArchX86, specs.ArchX86_64, specs.ArchX32, specs.ArchARM, specs.ArchAARCH64,
		specs.ArchMIPS, specs.ArchMIPS64, specs.ArchMIPS64N32, specs.ArchMIPSEL,
		specs.ArchMIPSEL64, specs.ArchMIPSEL64N32, specs.ArchPPC, specs.ArchPPC64,
		specs.ArchPPC64LE, specs.ArchS390, specs.ArchS390X, specs.ArchPARISC,
		specs.ArchPARISC64, specs.ArchRISCV64, specs.ArchLOONGARCH64, specs.ArchM68K,
		specs.ArchSH, specs.ArchSHEB,
	}
)

// Parse checks the seccomp JSON of the runtime specification and returns its canonical encoding.
//
// Unknown fields are refused. The runtime specification lets a runtime ignore them, but a field
// that narrows a rule, such as Docker's "excludes", would then widen what the profile allows.
func Parse(data []byte) ([]byte, error) {
	if len(data) > MaxSize {
		return nil, invalid("profile has %d bytes, the limit is %d", len(data), MaxSize)
	}
	values := bytes.Count(data, []byte("{")) + bytes.Count(data, []byte("[")) + bytes.Count(data, []byte(","))
	if values > maxValues {
		return nil, invalid("profile has %d JSON values, the limit is %d", values, maxValues)
	}
	var p specs.LinuxSeccomp
	if err := decode(data, &p); err != nil {
		return nil, err
	}
	if err := check(&p); err != nil {
		return nil, err
	}
	out, err := json.Marshal(&p)
	if err != nil {
		return nil, fmt.Errorf("encode profile: %w", err)
	}
	return out, nil
}

// Confirm returns an error unless Parse would return data for it. The daemon checks so the answer
// of a process that ran Parse, which may have been compromised. It runs the decoder of Parse
// itself, but Go's decoder is memory-safe, and Parse limits bytes and values. What may exhaust
// memory or time by a fault in it has met the limits of the process first.
func Confirm(data []byte) error {
	again, err := Parse(data)
	if err == nil && !bytes.Equal(again, data) {
		err = errors.New("the encoding is not canonical")
	}
	return err
}

// decode reads one JSON object and refuses unknown fields and anything after the object.
func decode(data []byte, into *specs.LinuxSeccomp) error {
	d := json.NewDecoder(bytes.NewReader(data))
	d.DisallowUnknownFields()
	if err := d.Decode(into); err != nil {
		return invalid("profile is no seccomp JSON: %s", errdefs.Clip(err.Error()))
	}
	if _, err := d.Token(); err != io.EOF {
		return invalid("profile has data after its JSON object")
	}
	return nil
}

func check(p *specs.LinuxSeccomp) error {
	if p.ListenerPath != "" || p.ListenerMetadata != "" {
		return invalid("listenerPath and listenerMetadata are not allowed in an artifact")
	}
	if err := known("default action", p.DefaultAction, actions); err != nil {
		return err
	}
	for _, a := range p.Architectures {
		if err := known("architecture", a, architectures); err != nil {
			return err
		}
	}
	if p.Flags != nil && len(p.Flags) == 0 { // without the field, runtimes set SPEC_ALLOW
		return invalid("flags is empty, which an encoding cannot keep")
	}
	for _, f := range p.Flags {
		if err := known("flag", f, flags); err != nil {
			return err
		}
	}
	if n := len(p.Architectures) + len(p.Flags); n > maxWords {
		return invalid("profile has %d architectures and flags, the limit is %d", n, maxWords)
	}
	if len(p.Syscalls) > maxRules {
		return invalid("profile has %d syscalls entries, the limit is %d", len(p.Syscalls), maxRules)
	}
	names, conditions := 0, 0
	for i := range p.Syscalls {
		if err := checkRule(&p.Syscalls[i]); err != nil {
			return err
		}
		if names += len(p.Syscalls[i].Names); names > maxNames {
			return invalid("profile has more than %d names", maxNames)
		}
		if conditions += len(p.Syscalls[i].Names) * len(p.Syscalls[i].Args); conditions > maxConditions {
			return invalid("profile has more than %d conditions on arguments", maxConditions)
		}
	}
	return nil
}

func checkRule(r *specs.LinuxSyscall) error {
	if len(r.Names) == 0 {
		return invalid("a syscalls entry has no names")
	}
	for _, n := range r.Names {
		if n == "" || len(n) > maxName {
			return invalid("a name in syscalls has %d bytes, allowed are 1 to %d", len(n), maxName)
		}
		if strings.ContainsFunc(n, notInName) {
			return invalid("%q is no name of a system call", errdefs.Clip(n))
		}
	}
	if err := known("action", r.Action, actions); err != nil {
		return err
	}
	if len(r.Args) > maxArgs {
		return invalid("a syscalls entry has %d args, the limit is %d", len(r.Args), maxArgs)
	}
	for _, a := range r.Args {
		if a.Index >= maxArgs {
			return invalid("argument index %d is above %d", a.Index, maxArgs-1)
		}
		if err := known("operator", a.Op, operators); err != nil {
			return err
		}
	}
	return nil
}

func notInName(r rune) bool {
	return r != '_' && (r < '0' || r > '9') && (r < 'a' || r > 'z') && (r < 'A' || r > 'Z')
}

func known[T ~string](what string, value T, allowed []T) error {
	if slices.Contains(allowed, value) {
		return nil
	}
	return invalid("%s %q is not allowed", what, errdefs.Clip(string(value)))
}

// Invalid returns a permanent refusal of a request: InvalidArgument, SecurityProfileInvalid.
func Invalid(format string, args ...any) error { return invalid(format, args...) }

func invalid(format string, args ...any) error {
	return errdefs.InvalidArgument("%w: %s", crierrors.ErrSecurityProfileInvalid,
		fmt.Sprintf(format, args...))
}

// Refused returns the error for a refusal whose reason another process has given. The reason may be
// hostile, so it is shortened.
func Refused(reason string) error {
	return invalid("%s", errdefs.Clip(strings.TrimPrefix(reason, crierrors.ErrSecurityProfileInvalid.Error()+": ")))
}
