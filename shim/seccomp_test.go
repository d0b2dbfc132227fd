//go:build seccomp

package shim

import (
	"testing"

	specs "github.com/opencontainers/runtime-spec/specs-go"
)

func TestSeccomp(t *testing.T) {
	e := newEnv(t)
	c := e.run("seccomp", "mkdir /dir; echo $?", func(r *LaunchRequest) {
		errno := uint(13)
		r.Spec.Linux.Seccomp = &specs.LinuxSeccomp{
			DefaultAction: specs.ActAllow,
			Syscalls:      []specs.LinuxSyscall{{Names: []string{"mkdir", "mkdirat"}, Action: specs.ActErrno, ErrnoRet: &errno}},
		}
	})
	c.wait()
	if got := c.output("stdout"); got != "1\n" {
		t.Errorf("mkdir said %q, %q", got, c.output("stderr"))
	}
}
