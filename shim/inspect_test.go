package shim

import (
	"testing"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	"google.golang.org/grpc/codes"

	"berth/internal/errdefs"
)

// A launcher tells the filter that it would load, and its resource limits.
func TestInspect(t *testing.T) {
	e := newEnv(t)
	profile := &specs.LinuxSeccomp{DefaultAction: specs.ActAllow,
		Syscalls: []specs.LinuxSyscall{{Names: []string{"swapon"}, Action: specs.ActErrno}}}
	got, err := e.Inspect(e.ctx, profile)
	if err != nil || len(got.Seccomp) == 0 || len(got.Seccomp[0])%8 != 0 || len(got.Rlimits) != 16 {
		t.Errorf("Inspect = %+v, %v", got, err)
	}
	if got, err := e.Inspect(e.ctx, nil); err != nil || got.Seccomp != nil || len(got.Rlimits) != 16 {
		t.Errorf("without a profile: %+v, %v", got, err)
	}
	profile.DefaultAction = "unknown"
	if got, err := e.Inspect(e.ctx, profile); errdefs.Code(err) != codes.InvalidArgument {
		t.Errorf("with an unknown action: %+v, %v", got, err)
	}
}
