//go:build seccomp

package shim

import (
	"strings"
	"testing"

	"berth/shim/proto"
	specs "github.com/opencontainers/runtime-spec/specs-go"
)

func TestSeccomp(t *testing.T) {
	e := newEnv(t)
	c := e.run("seccomp", "mkdir /dir; echo $?", func(r *proto.Launch) {
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

// TestDefaultProfile runs containers and execs with the same profile. The first launcher compiles
// it, and the others find the recording. No command inherits its descriptor.
func TestDefaultProfile(t *testing.T) {
	e := newEnv(t)
	const script = "ls /proc/self/fd | tr '\\n' ' '; grep ^Seccomp: /proc/self/status; unshare -m true 2>/dev/null || echo denied"
	const want = "0 1 2 3 Seccomp:\t2\ndenied\n" // 3 is what ls reads
	for i := range 2 {
		c := e.run("default-"+itoa(i), script+"; exec sleep 1000", func(r *proto.Launch) {
			r.Spec.Process.Capabilities = &specs.LinuxCapabilities{}
			filtered(r)
		})
		e.until("the container has said all", func() bool { return strings.Count(c.output("stdout"), "\n") >= 2 })
		if got := c.output("stdout"); got != want {
			t.Errorf("container %d sees %q", i, got)
		}
		for x := range 3 {
			if out, stderr, code := c.execIn("exec-"+itoa(x), script); out != want || code != 0 {
				t.Errorf("command %d in %d sees %q, %q, %d", x, i, out, stderr, code)
			}
		}
	}
}

// TestProfilesOfContainers runs containers with different profiles at the same time. Each has its
// own profile.
func TestProfilesOfContainers(t *testing.T) {
	e := newEnv(t)
	deny := func(calls ...string) func(*proto.Launch) {
		return func(r *proto.Launch) {
			r.Spec.Linux.Seccomp = &specs.LinuxSeccomp{DefaultAction: specs.ActAllow,
				Syscalls: []specs.LinuxSyscall{{Names: calls, Action: specs.ActErrno}}}
		}
	}
	const script = "mkdir /d 2>/dev/null; echo -n $?; : >/f; mv /f /g 2>/dev/null; echo $?"
	for round := range 2 {
		for name, c := range map[string]struct {
			change func(*proto.Launch)
			want   string
		}{
			"mkdir":  {deny("mkdir", "mkdirat"), "10\n"},
			"rename": {deny("rename", "renameat", "renameat2"), "01\n"},
			"none":   {func(*proto.Launch) {}, "00\n"},
		} {
			t.Run(name, func(t *testing.T) {
				profiled := e.run(name+"-"+itoa(round), script, c.change)
				profiled.wait()
				if got := profiled.output("stdout"); got != c.want {
					t.Errorf("mkdir and mv said %q", got)
				}
			})
		}
	}
}
