// Package bpfcache compiles each seccomp profile once and passes the program to all containers and
// execs that use the profile.
//
// libcontainer makes libseccomp compile the filter in the process that installs it. RuntimeDefault
// has some 400 rules, and compiling them takes longer than the rest of that process.
// Here the launcher runs the same code once per profile and records the calls to libseccomp and the
// resulting program (Recording). libcontainer's init gets the recording with the profile and runs
// unchanged. The wrapped functions of libseccomp compare its calls with the recorded ones. If all
// are equal it gets the recorded program. At the first difference libseccomp gets all calls
// (bpfcache.h).
//
// # Contract
//
// Programs come from launchers, which are not part of a container. Each process gets its own copy
// in sealed memory (F_SEAL_WRITE), so no container can change another container's copy. A
// missing, damaged or wrong recording costs time and changes nothing: the filter is always
// libseccomp's for the profile. The descriptor is closed when the container's command runs.
package bpfcache

import (
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"os"

	"github.com/opencontainers/runc/libcontainer"
	"github.com/opencontainers/runc/libcontainer/configs"
	"golang.org/x/sys/unix"
)

// initFD is the descriptor of the first of libcontainer.Process.ExtraFiles in init.
const initFD = 3

// seals make a recording immutable.
const seals = unix.F_SEAL_SEAL | unix.F_SEAL_SHRINK | unix.F_SEAL_GROW | unix.F_SEAL_WRITE

// Pass adds the recording of the container's profile to a process that is about to start. The
// caller calls done after the start. Pass adds nothing if there is no profile, if the profile does
// not compile (init reports why), or if sealing would take long. Then init compiles the profile
// itself.
func (t *Table) Pass(p *libcontainer.Process, profile *configs.Seccomp) (done func() error, err error) {
	nothing := func() error { return nil }
	if profile == nil {
		return nothing, nil
	}
	recording, err := t.recordingOf(profile)
	if err != nil || recording == nil {
		return nothing, err
	}
	f, err := sealed(recording)
	if err != nil || f == nil {
		return nothing, err
	}
	p.ExtraFiles = []*os.File{f}
	return f.Close, nil
}

// Filters returns the filters that libcontainer may load for a profile: struct sock_filter in the
// machine's byte order. libcontainer chooses the order of architectures at random. The result is
// empty for a profile that does not compile, and where libseccomp is missing.
func (t *Table) Filters(profile *configs.Seccomp) ([][]byte, error) {
	encoded, err := t.recordingOf(profile)
	if err != nil || encoded == nil {
		return nil, err
	}
	recording, err := decode(encoded)
	if err != nil {
		return nil, err
	}
	return patched(profile, recording.program)
}

// recordingOf returns a profile's encoded recording. It makes a recording that the table lacks. It
// returns nil for a profile that does not compile.
func (t *Table) recordingOf(profile *configs.Seccomp) ([]byte, error) {
	key := profileKey(profile)
	recording, err := t.find(key)
	if err != nil || recording != nil {
		return recording, err
	}
	compiled, err := compile(profile)
	if err != nil || compiled == nil {
		return nil, err
	}
	recording = compiled.encode()
	return recording, t.add(key, recording)
}

// sealed copies a recording into sealed memory. It returns nil if sealing would take long.
func sealed(recording []byte) (*os.File, error) {
	const flags = unix.MFD_CLOEXEC | unix.MFD_ALLOW_SEALING
	fd, err := unix.MemfdCreate("seccomp", flags|unix.MFD_NOEXEC_SEAL)
	if errors.Is(err, unix.EINVAL) { // MFD_NOEXEC_SEAL is Linux 6.3
		fd, err = unix.MemfdCreate("seccomp", flags)
	}
	if err != nil {
		return nil, os.NewSyscallError("memfd_create", err)
	}
	f := os.NewFile(uintptr(fd), "seccomp")
	if _, err := f.Write(recording); err != nil {
		return nil, errors.Join(fmt.Errorf("write a seccomp filter: %w", err), f.Close())
	}
	return seal(f)
}

// seal seals f, or closes it and returns nil if something else, such as page migration, holds one
// of its pages (memfd_wait_for_pins). The kernel has waited 150 ms by then; compiling is faster
// than waiting again.
func seal(f *os.File) (*os.File, error) {
	_, err := unix.FcntlInt(f.Fd(), unix.F_ADD_SEALS, seals)
	switch {
	case errors.Is(err, unix.EBUSY):
		return nil, f.Close()
	case err != nil:
		return nil, errors.Join(fmt.Errorf("seal a seccomp filter: %w", err), f.Close())
	}
	return f, nil
}

// Receive must be the first call of a process that libcontainer has started. If the process was
// passed a recording, the next filter is compared with it. An error means that the container's
// command would inherit the descriptor.
func Receive() error {
	has, err := unix.FcntlInt(initFD, unix.F_GET_SEALS, 0)
	if err != nil || has&seals != seals {
		return nil // a descriptor of libcontainer's
	}
	// The descriptor stays open, so that libcontainer passes no file with its number to the
	// command.
	if _, err := unix.FcntlInt(initFD, unix.F_SETFD, unix.FD_CLOEXEC); err != nil {
		return os.NewSyscallError("fcntl(F_SETFD)", err)
	}
	var st unix.Stat_t
	if err := unix.Fstat(initFD, &st); err != nil {
		return os.NewSyscallError("fstat", err)
	}
	if st.Size < headerSize || st.Size > maxRecording {
		return nil
	}
	data, err := unix.Mmap(initFD, 0, int(st.Size), unix.PROT_READ, unix.MAP_PRIVATE|unix.MAP_POPULATE)
	if err != nil {
		return nil // libseccomp compiles
	}
	if m, err := decode(data); err == nil { // otherwise libseccomp compiles
		m.compare()
	}
	return nil
}

// key identifies a profile. It is a cryptographic hash: nobody can write a profile whose key is that
// of another one.
type key [sha256.Size]byte

// profileKey returns the key of a profile's recording.
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
