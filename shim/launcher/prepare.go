package launcher

import (
	"fmt"
	"maps"
	"os"
	"slices"
	"strconv"
	"strings"

	specs "github.com/opencontainers/runtime-spec/specs-go"

	"berth/internal/failpoint"
	"berth/internal/netns/thread"
	"berth/internal/pidfd"
	"berth/shim/proto"
)

// prepare does all work before the container's first process exists.
func (c *launch) prepare() error {
	clampOOMScore(c.Spec.Process)
	if err := c.setDottedSysctls(); err != nil {
		return err
	}
	if err := c.backend.prepare(); err != nil {
		return err
	}
	uid, gid, err := c.backend.hostRoot()
	if err != nil {
		return fmt.Errorf("owner of stdio: %w", err)
	}
	if err := c.openIO(uid, gid); err != nil {
		return err
	}
	if err := c.identifyMonitor(); err != nil {
		return err
	}
	if err := c.reserveExit(); err != nil {
		return err
	}
	c.endStep("prepare")
	return nil
}

// setDottedSysctls sets the sysctls of interfaces whose names have dots, such as
// net.ipv4.conf.eth0/100.rp_filter. It removes them from the spec, because libcontainer and other
// OCI runtimes read each dot and slash as a separator. All these sysctls belong to the network
// namespace.
func (c *launch) setDottedSysctls() error {
	dotted := maps.Clone(c.Spec.Linux.Sysctl)
	maps.DeleteFunc(dotted, func(name, _ string) bool { return !strings.Contains(name, "/") })
	if len(dotted) == 0 {
		return nil
	}
	at := slices.IndexFunc(c.Spec.Linux.Namespaces, func(ns specs.LinuxNamespace) bool {
		return ns.Type == specs.NetworkNamespace && ns.Path != ""
	})
	if at < 0 {
		return proto.Errorf(proto.Internal, "sysctls %v need a network namespace", slices.Sorted(maps.Keys(dotted)))
	}
	maps.DeleteFunc(c.Spec.Linux.Sysctl, func(name, _ string) bool { return strings.Contains(name, "/") })
	return thread.In(c.Spec.Linux.Namespaces[at].Path, func() error {
		for name, value := range dotted {
			if err := writeSysctl(name, value); err != nil {
				return err
			}
		}
		return nil
	})
}

// writeSysctl writes a sysctl of the thread's namespaces. The error has libcontainer's text.
func writeSysctl(name, value string) error {
	path := "/proc/sys/" + strings.NewReplacer("/", ".", ".", "/").Replace(name)
	failpoint.Reach("launcher.write-sysctl")
	f, err := os.OpenFile(path, os.O_WRONLY, 0)
	if err != nil {
		return fmt.Errorf("open sysctl %s file: %w", name, err)
	}
	defer f.Close()
	if _, err := f.WriteString(value); err != nil {
		return fmt.Errorf("%s%s = %q: %w", badSysctl, name, value, err)
	}
	failpoint.Reach("launcher.sysctl-written")
	return nil
}

// clampOOMScore raises the spec's oom_score_adj to the lowest value that this process may set. A
// lower value needs CAP_SYS_RESOURCE, and init would fail. The daemon has done the same before, and
// has logged it.
func clampOOMScore(p *specs.Process) {
	if p.OOMScoreAdj == nil {
		return
	}
	const file = "/proc/self/oom_score_adj"
	own, err := os.ReadFile(file)
	if err != nil {
		return
	}
	now, err := strconv.Atoi(string(own[:max(len(own)-1, 0)]))
	if err != nil || *p.OOMScoreAdj >= now {
		return
	}
	if os.WriteFile(file, []byte(strconv.Itoa(*p.OOMScoreAdj)), 0) != nil {
		*p.OOMScoreAdj = now
		return
	}
	// If that succeeds, init may set the value. Raising it again always succeeds.
	_ = os.WriteFile(file, own, 0)
}

// identifyMonitor stores this process's identity, because it becomes the monitor, or stands for the
// monitor until that begins. A pause has no monitor.
func (c *launch) identifyMonitor() (err error) {
	if c.Pause != "" {
		return nil
	}
	c.started.MonitorPID = os.Getpid()
	c.started.MonitorStartTime, err = pidfd.StartTime(c.started.MonitorPID)
	return err
}

// reserveExit takes the disk space of the exit record. If a full filesystem prevented the record,
// the container would count as lost.
func (c *launch) reserveExit() error {
	if c.Pause != "" {
		return nil
	}
	c.undo.Add("give up the exit record's space", func() error {
		failpoint.Reach("launcher.unreserve-exit")
		return proto.UnreserveFile(c.Dir, proto.ExitFile)
	})
	failpoint.Reach("launcher.reserve-exit")
	if err := proto.ReserveFile(c.Dir, proto.ExitFile); err != nil {
		return err
	}
	failpoint.Reach("launcher.exit-reserved")
	return nil
}
