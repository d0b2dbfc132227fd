//go:build cgo && seccomp

package filter

// The linker lets calls of these functions go to memo.c. All that take a filter are among them, but for those that change and read nothing of
// its rules (TestAllFunctionsAreWrapped).

// #cgo pkg-config: libseccomp
// #cgo LDFLAGS: -Wl,--wrap=seccomp_init -Wl,--wrap=seccomp_arch_add -Wl,--wrap=seccomp_attr_set -Wl,--wrap=seccomp_rule_add_array
// #cgo LDFLAGS: -Wl,--wrap=seccomp_export_bpf -Wl,--wrap=seccomp_load -Wl,--wrap=seccomp_release -Wl,--wrap=seccomp_merge
// #cgo LDFLAGS: -Wl,--wrap=seccomp_reset -Wl,--wrap=seccomp_arch_remove -Wl,--wrap=seccomp_syscall_priority
// #cgo LDFLAGS: -Wl,--wrap=seccomp_rule_add_exact_array -Wl,--wrap=seccomp_export_pfc -Wl,--wrap=seccomp_export_bpf_mem
// #cgo LDFLAGS: -Wl,--wrap=seccomp_precompute -Wl,--wrap=seccomp_transaction_start -Wl,--wrap=seccomp_transaction_commit
// #cgo LDFLAGS: -Wl,--wrap=seccomp_transaction_reject
// #include "memo.h"
import "C"

import (
	"errors"
	"unsafe"

	"github.com/opencontainers/runc/libcontainer/configs"
	"github.com/opencontainers/runc/libcontainer/seccomp"
)

// compile records how libcontainer makes the filter, up to where it has the program; none is installed. nil: it comes to no program, for
// a reason that init will tell.
func compile(profile *configs.Seccomp) (*Memo, error) {
	return record(func() {
		if _, err := seccomp.InitSeccomp(profile); err == nil {
			panic("libcontainer has installed a seccomp filter without asking libseccomp for it")
		}
	})
}

// record records how a filter is made; nil: it was not made to the end.
func record(makeFilter func()) (*Memo, error) {
	if C.memo_record() != 0 {
		return nil, errors.New("libseccomp is linked without the wrappers of berth/shim/launcher/filter")
	}
	defer C.memo_forget()
	makeFilter()
	r := C.memo_recording()
	if r.program == nil {
		return nil, nil
	}
	m := &Memo{
		calls:   C.GoBytes(r.calls, C.int(r.calls_size)),
		program: C.GoBytes(r.program, C.int(r.program_size)),
	}
	return m, m.check()
}

// forget ends what compare has begun.
func forget() { C.memo_forget() }

// compare has the next filter that is made compared with the memo, whose memory is not Go's, or pinned.
func (m *Memo) compare() {
	C.memo_compare(C.struct_memo{
		calls:        unsafe.Pointer(unsafe.SliceData(m.calls)),
		calls_size:   C.size_t(len(m.calls)),
		program:      unsafe.Pointer(unsafe.SliceData(m.program)),
		program_size: C.size_t(len(m.program)),
	})
}
