//go:build cgo && seccomp

package bpfcache

// The linker redirects calls of these functions to bpfcache.c. They are all functions that take a
// filter and read or change its rules (TestAllFunctionsAreWrapped).

// #cgo pkg-config: libseccomp
// #cgo LDFLAGS: -Wl,--wrap=seccomp_init -Wl,--wrap=seccomp_arch_add -Wl,--wrap=seccomp_attr_set -Wl,--wrap=seccomp_rule_add_array
// #cgo LDFLAGS: -Wl,--wrap=seccomp_export_bpf -Wl,--wrap=seccomp_load -Wl,--wrap=seccomp_release -Wl,--wrap=seccomp_merge
// #cgo LDFLAGS: -Wl,--wrap=seccomp_reset -Wl,--wrap=seccomp_arch_remove -Wl,--wrap=seccomp_syscall_priority
// #cgo LDFLAGS: -Wl,--wrap=seccomp_rule_add_exact_array -Wl,--wrap=seccomp_export_pfc -Wl,--wrap=seccomp_export_bpf_mem
// #cgo LDFLAGS: -Wl,--wrap=seccomp_precompute -Wl,--wrap=seccomp_transaction_start -Wl,--wrap=seccomp_transaction_commit
// #cgo LDFLAGS: -Wl,--wrap=seccomp_transaction_reject
// #include "bpfcache.h"
import "C"

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"unsafe"

	"github.com/opencontainers/runc/libcontainer/configs"
	"github.com/opencontainers/runc/libcontainer/seccomp"
	"golang.org/x/net/bpf"
)

// generatePatch returns the instructions that libcontainer puts before libseccomp's program. They
// make unknown system calls fail with ENOSYS. libcontainer has no function for the whole filter
// (TestFiltersContainTheInstalledOne).
//
//go:linkname generatePatch github.com/opencontainers/runc/libcontainer/seccomp/patchbpf.generatePatch
func generatePatch(profile *configs.Seccomp) ([]bpf.Instruction, error)

// patchTries is the number of patches that patched generates. Some orders of architectures are
// rare, one in 64. One of these is missing in one call of 500.
const patchTries = 400

// patched returns a program with each of libcontainer's patches.
func patched(profile *configs.Seccomp, program []byte) (filters [][]byte, err error) {
	for range patchTries {
		patch, err := generatePatch(profile)
		if err != nil {
			return nil, fmt.Errorf("patch of a seccomp filter: %w", err)
		}
		raw, err := bpf.Assemble(patch)
		if err != nil {
			return nil, fmt.Errorf("patch of a seccomp filter: %w", err)
		}
		filter := slices.Concat(encodeInstructions(raw), program)
		if !slices.ContainsFunc(filters, func(f []byte) bool { return bytes.Equal(f, filter) }) {
			filters = append(filters, filter)
		}
	}
	return filters, nil
}

// encodeInstructions returns instructions as struct sock_filter.
func encodeInstructions(raw []bpf.RawInstruction) (encoded []byte) {
	for _, i := range raw {
		encoded = binary.NativeEndian.AppendUint16(encoded, i.Op)
		encoded = append(encoded, i.Jt, i.Jf)
		encoded = binary.NativeEndian.AppendUint32(encoded, i.K)
	}
	return encoded
}

// compile records how libcontainer makes the filter, without installing it. It returns nil if
// libcontainer fails; init will report the reason.
func compile(profile *configs.Seccomp) (*Recording, error) {
	return record(func() {
		if _, err := seccomp.InitSeccomp(profile); err == nil {
			panic("libcontainer has installed a seccomp filter without libseccomp")
		}
	})
}

// record records the next filter that makeFilter makes. It returns nil if there is no program.
func record(makeFilter func()) (*Recording, error) {
	if C.bpfcache_record() != 0 {
		return nil, errors.New("libseccomp is linked without the wrappers of berth/shim/launcher/bpfcache")
	}
	defer C.bpfcache_stop()
	makeFilter()
	r := C.bpfcache_result()
	if r.program == nil {
		return nil, nil
	}
	m := &Recording{
		calls:   C.GoBytes(r.calls, C.int(r.calls_size)),
		program: C.GoBytes(r.program, C.int(r.program_size)),
	}
	return m, m.check()
}

// stopComparing ends a comparison.
func stopComparing() { C.bpfcache_stop() }

// compare starts the comparison of the next filter with the recording. Its memory must be pinned or
// outside Go's heap.
func (m *Recording) compare() {
	C.bpfcache_compare(C.struct_bpfcache_recording{
		calls:        unsafe.Pointer(unsafe.SliceData(m.calls)),
		calls_size:   C.size_t(len(m.calls)),
		program:      unsafe.Pointer(unsafe.SliceData(m.program)),
		program_size: C.size_t(len(m.program)),
	})
}
