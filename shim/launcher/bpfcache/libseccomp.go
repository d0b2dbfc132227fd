//go:build cgo && seccomp

package bpfcache

// The linker redirects calls of these functions to capture.c. They are the functions that return or
// install a program (TestAllFunctionsAreWrapped).

// #cgo pkg-config: libseccomp
// #cgo LDFLAGS: -Wl,--wrap=seccomp_export_bpf -Wl,--wrap=seccomp_export_bpf_mem -Wl,--wrap=seccomp_load
// #include "capture.h"
import "C"

import (
	"fmt"
	"slices"

	"github.com/opencontainers/runc/libcontainer/configs"
	"github.com/opencontainers/runc/libcontainer/seccomp"
	"golang.org/x/net/bpf"
)

// generatePatch returns the instructions that libcontainer puts before libseccomp's program. They
// make unknown system calls fail with ENOSYS. libcontainer has no function for the whole filter
// (TestFilterIsLibcontainers).
//
//go:linkname generatePatch github.com/opencontainers/runc/libcontainer/seccomp/patchbpf.generatePatch
func generatePatch(profile *configs.Seccomp) ([]bpf.Instruction, error)

// patchOf returns libcontainer's additional instructions as struct sock_filter.
func patchOf(profile *configs.Seccomp) (encoded []byte, err error) {
	patch, err := generatePatch(profile)
	if err != nil {
		return nil, fmt.Errorf("patch of a seccomp filter: %w", err)
	}
	raw, err := bpf.Assemble(patch)
	if err != nil {
		return nil, fmt.Errorf("patch of a seccomp filter: %w", err)
	}
	return assemble(raw), nil
}

// compile makes the filter as libcontainer does, but does not install it. If libcontainer fails, it
// returns nil, and init will report the reason.
func compile(profile *configs.Seccomp) (*filter, error) {
	C.capture_start()
	defer C.capture_stop()
	if _, err := seccomp.InitSeccomp(profile); err == nil {
		panic("libcontainer has installed a seccomp filter in the launcher")
	}
	var size C.size_t
	captured := C.capture_program(&size)
	if captured == nil || size == 0 {
		return nil, nil
	}
	patch, err := patchOf(profile)
	if err != nil {
		return nil, err
	}
	program := slices.Concat(patch, C.GoBytes(captured, C.int(size)))
	f := &filter{flags: flagsOf(profile), patch: len(patch), program: program}
	if _, err := decode(f.encode()); err != nil { // the kernel would refuse the filter
		return nil, nil
	}
	return f, nil
}
