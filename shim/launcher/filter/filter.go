// Package filter spares a container's first process, and each command that is executed in a container, the compilation of a seccomp filter.
//
// libcontainer has libseccomp compile the filter in the process that it is for: for the profile RuntimeDefault some 400 rules, which take longer
// than all else that happens there. Here the launcher has the same code do it once for each profile, and records what libseccomp is told and
// what it makes of it: a [Memo]. libcontainer's init gets the memo with the profile, and does everything as ever; but what it tells libseccomp is only compared
// with the recording, and when all of it agrees it gets the recorded program. At the first difference libseccomp gets everything (memo.h).
//
// # Contract
//
// A program comes from the launcher, which is no part of a container, and is handed on in sealed memory (F_SEAL_WRITE), a copy for each process:
// nothing that a container can reach is anything that another one gets. A memo that is
// missing, damaged or another profile's costs time and changes nothing: the filter that is installed is always libseccomp's for this profile. The
// descriptor is gone when the container's command runs.
package filter

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"

	"github.com/cespare/xxhash/v2"
	"github.com/opencontainers/runc/libcontainer"
	"github.com/opencontainers/runc/libcontainer/configs"
	"golang.org/x/sys/unix"
)

// initFD is the first of libcontainer.Process.ExtraFiles.
const initFD = 3

// seals make a memo what nobody can change any more.
const seals = unix.F_SEAL_SEAL | unix.F_SEAL_SHRINK | unix.F_SEAL_GROW | unix.F_SEAL_WRITE

// Lend gives a process that is about to be started what its container's profile is compiled to, and returns what takes it back when the process has
// been started. Without a profile it does nothing; nor with one that cannot be compiled, for init will tell why, nor where sealing would take
// time: init compiles the profile then.
func (t *Table) Lend(p *libcontainer.Process, profile *configs.Seccomp) (takeBack func() error, err error) {
	nothing := func() error { return nil }
	if profile == nil {
		return nothing, nil
	}
	memo, err := t.memo(profile)
	if err != nil || memo == nil {
		return nothing, err
	}
	f, err := sealed(memo)
	if err != nil || f == nil {
		return nothing, err
	}
	p.ExtraFiles = []*os.File{f}
	return f.Close, nil
}

// memo finds a profile's memo, or makes it; nil: there is none to be had.
func (t *Table) memo(profile *configs.Seccomp) ([]byte, error) {
	key := hash(profile)
	memo, err := t.find(key)
	if err != nil || memo != nil {
		return memo, err
	}
	compiled, err := compile(profile)
	if err != nil || compiled == nil {
		return nil, err
	}
	memo = compiled.encode()
	return memo, t.add(key, memo)
}

// sealed puts a memo into memory that nobody can change; nil: it cannot be had now.
func sealed(memo []byte) (*os.File, error) {
	const flags = unix.MFD_CLOEXEC | unix.MFD_ALLOW_SEALING
	fd, err := unix.MemfdCreate("seccomp", flags|unix.MFD_NOEXEC_SEAL)
	if errors.Is(err, unix.EINVAL) { // MFD_NOEXEC_SEAL is Linux 6.3
		fd, err = unix.MemfdCreate("seccomp", flags)
	}
	if err != nil {
		return nil, os.NewSyscallError("memfd_create", err)
	}
	f := os.NewFile(uintptr(fd), "seccomp")
	if _, err := f.Write(memo); err != nil {
		return nil, errors.Join(fmt.Errorf("write a seccomp filter: %w", err), f.Close())
	}
	return seal(f)
}

// seal seals f, or closes it. It returns nil if somebody else, such as page migration, holds one of the pages (memfd_wait_for_pins):
// the kernel has waited 150 ms for that, and to wait again takes longer than to compile.
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

// Take is called by a process that libcontainer has started, before anything else: if it was given a memo, the filter that it makes is
// compared with that. An error means that the descriptor would be seen by the container's command.
func Take() error {
	has, err := unix.FcntlInt(initFD, unix.F_GET_SEALS, 0)
	if err != nil || has&seals != seals {
		return nil // something else, of libcontainer's
	}
	// It stays open: its number is not to be had by a file that libcontainer would leave to the command.
	if _, err := unix.FcntlInt(initFD, unix.F_SETFD, unix.FD_CLOEXEC); err != nil {
		return os.NewSyscallError("fcntl(F_SETFD)", err)
	}
	var st unix.Stat_t
	if err := unix.Fstat(initFD, &st); err != nil {
		return os.NewSyscallError("fstat", err)
	}
	if st.Size < headerSize || st.Size > maxMemo {
		return nil
	}
	data, err := unix.Mmap(initFD, 0, int(st.Size), unix.PROT_READ, unix.MAP_PRIVATE|unix.MAP_POPULATE)
	if err != nil {
		return nil // libseccomp does it
	}
	if m, err := decode(data); err == nil { // else libseccomp does it
		m.compare()
	}
	return nil
}

// hash finds a profile's memo again. Two profiles may have the same: the memo then agrees with one of them.
func hash(p *configs.Seccomp) uint64 {
	h := xxhash.New()
	number := func(n uint64) { _, _ = h.Write(binary.NativeEndian.AppendUint64(nil, n)) } // it never fails
	optional := func(n *uint) {
		if n == nil {
			number(0)
			return
		}
		number(1)
		number(uint64(*n))
	}
	text := func(s string) { number(uint64(len(s))); _, _ = h.WriteString(s) }

	number(uint64(p.DefaultAction))
	optional(p.DefaultErrnoRet)
	number(uint64(len(p.Architectures)))
	for _, a := range p.Architectures {
		text(a)
	}
	for _, f := range p.Flags {
		text(string(f))
	}
	for _, call := range p.Syscalls {
		text(call.Name)
		number(uint64(call.Action))
		optional(call.ErrnoRet)
		for _, arg := range call.Args {
			number(uint64(arg.Index))
			number(arg.Value)
			number(arg.ValueTwo)
			number(uint64(arg.Op))
		}
	}
	return h.Sum64()
}
