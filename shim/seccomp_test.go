//go:build seccomp

package shim

import (
	"os"
	"runtime"
	"strings"
	"testing"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"berth/internal/pidfd"
	"berth/shim/proto"
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
// it, and the others find the filter. No command inherits a descriptor.
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

// onlyShell returns a profile that allows only what a static busybox needs to run a script, and
// nothing of what the start of a container needs besides execve.
func onlyShell(action specs.LinuxSeccompAction) *specs.LinuxSeccomp {
	calls := []string{
		"execve", "brk", "arch_prctl", "set_tid_address", "set_robust_list", "rseq", "mprotect", "prlimit64", "readlink",
		"getrandom", "getuid", "getgid", "geteuid", "getegid", "getpid", "getppid", "rt_sigaction", "rt_sigprocmask",
		"rt_sigreturn", "sigreturn", "open", "openat", "read", "write", "close", "fcntl", "dup2", "dup3", "stat", "newfstatat", "fstat",
		"lseek", "mmap", "munmap", "ioctl", "getcwd", "uname", "exit_group", "poll", "wait4", "vfork", "fork", "clone", "nanosleep",
		// busybox drops the privileges of setuid programs.
		"clock_nanosleep", "sendfile", "prctl", "gettid", "setuid", "setgid",
	}
	if runtime.GOARCH == "arm64" {
		calls = append(calls, "readlinkat", "ppoll") // it has no readlink and no poll
	}
	return &specs.LinuxSeccomp{DefaultAction: action, Architectures: []specs.Arch{specs.ArchX86_64, specs.ArchAARCH64},
		Syscalls: []specs.LinuxSyscall{{Action: specs.ActAllow, Names: calls}}}
}

// securityOf prints what a command has: capabilities, filters, no_new_privs, user and open files.
const securityOf = "grep -E '^(Cap|Seccomp|NoNewPrivs|Uid|Gid|Groups|SigBlk|SigIgn)' /proc/self/status; ulimit -n; ulimit -Hn; echo $HOME"

// TestTightProfile starts containers and commands with a profile that allows none of the system
// calls with which libcontainer prepares a process (runc#5059). They have the same credentials as
// without a profile, and exactly one filter.
func TestTightProfile(t *testing.T) {
	e := newEnv(t)
	if e.runtime() != nil {
		t.Skip("other OCI runtimes install filters themselves")
	}
	caps := []string{"CAP_CHOWN", "CAP_NET_BIND_SERVICE"}
	some := &specs.LinuxCapabilities{Bounding: caps, Effective: caps, Permitted: caps}
	ambient := &specs.LinuxCapabilities{Bounding: caps, Effective: caps[:1], Permitted: caps[:1], Inheritable: caps[:1], Ambient: caps[:1]}
	for name, c := range map[string]struct {
		user   specs.User
		nnp    bool
		caps   *specs.LinuxCapabilities
		action specs.LinuxSeccompAction
	}{
		"root":                {specs.User{}, false, some, specs.ActErrno},
		"root-nnp":            {specs.User{}, true, some, specs.ActErrno},
		"root-without-caps":   {specs.User{}, false, &specs.LinuxCapabilities{}, specs.ActKillProcess},
		"user":                {specs.User{UID: 1000, GID: 1001, AdditionalGids: []uint32{7}}, false, some, specs.ActErrno},
		"user-nnp":            {specs.User{UID: 1000, GID: 1001, AdditionalGids: []uint32{7}}, true, some, specs.ActKillProcess},
		"user-with-ambient":   {specs.User{UID: 1000}, false, ambient, specs.ActErrno},
		"user-without-any":    {specs.User{UID: 1000}, false, &specs.LinuxCapabilities{}, specs.ActErrno},
		"user-killed-ambient": {specs.User{UID: 1000}, true, ambient, specs.ActKillThread},
	} {
		t.Run(name, func(t *testing.T) {
			run := func(kind string, profile *specs.LinuxSeccomp) (status, inExec string) {
				as := func(p *specs.Process) { p.User, p.NoNewPrivileges, p.Capabilities = c.user, c.nnp, c.caps }
				c := e.run(name+kind, securityOf+"; echo end; read x", func(r *proto.Launch) {
					if err := os.Chmod(r.Rootfs.Upper, 0o755); err != nil {
						t.Fatal(err)
					}
					r.Stdin = true
					as(r.Spec.Process)
					r.Spec.Linux.Seccomp = profile
				})
				e.until("the container has said all", func() bool {
					return strings.HasSuffix(c.output("stdout"), "end\n") || strings.Contains(c.output("stderr"), "not found")
				})
				out, stderr, code := c.execIn("exec-"+name+kind, securityOf, as)
				if code != 0 {
					t.Errorf("the exec ends with %d, %q", code, stderr)
				}
				return strings.TrimSuffix(c.output("stdout"), "end\n"), out
			}
			without, withoutInExec := run("-free", nil)
			filtered := strings.NewReplacer("Seccomp:\t0", "Seccomp:\t2", "Seccomp_filters:\t0", "Seccomp_filters:\t1")
			status, inExec := run("-tight", onlyShell(c.action))
			if want := filtered.Replace(without); status != want {
				t.Errorf("the command has\n%s\nwant\n%s", status, want)
			}
			if want := filtered.Replace(withoutInExec); inExec != want {
				t.Errorf("a command of an exec has\n%s\nwant\n%s", inExec, want)
			}
		})
	}
}

// A pod's profile is for its containers. berth's own pause works under each, and reaps processes.
func TestPauseUnderTightProfile(t *testing.T) {
	e := newEnv(t)
	if e.runtime() != nil {
		t.Skip("other OCI runtimes install filters themselves")
	}
	for name, profile := range map[string]*specs.LinuxSeccomp{
		"nothing":  {DefaultAction: specs.ActErrno},
		"killed":   {DefaultAction: specs.ActKillProcess, Syscalls: []specs.LinuxSyscall{{Names: []string{"read"}, Action: specs.ActAllow}}},
		"no-wait4": {DefaultAction: specs.ActAllow, Syscalls: []specs.LinuxSyscall{{Names: []string{"wait4"}, Action: specs.ActErrno}}},
	} {
		t.Run(name, func(t *testing.T) {
			req := e.pauseRequest("pause-" + name)
			req.Spec.Linux.Seccomp, req.Pause = profile, proto.ContainerPause
			pause := e.launch(req)
			c := e.run("in-"+name, "orphan=$(sleep 0 >/dev/null & echo $!); while [ -e /proc/$orphan ]; do :; done; echo reaped; exec sleep 1000", func(r *proto.Launch) {
				for i, ns := range r.Spec.Linux.Namespaces {
					if ns.Type == specs.PIDNamespace {
						r.Spec.Linux.Namespaces[i].Path = "/proc/" + itoa(pause.InitPID) + "/ns/pid"
					}
				}
			})
			e.until("pause has reaped the orphan", func() bool { return c.output("stdout") == "reaped\n" })
			if err := pidfd.Signal(pause.Init, unix.SIGTERM); err != nil {
				t.Fatal(err)
			}
			if err := pidfd.Wait(e.ctx, pause.Init); err != nil {
				t.Fatal(err)
			}
		})
	}
}
