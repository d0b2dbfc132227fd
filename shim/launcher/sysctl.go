package launcher

import (
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"

	specs "github.com/opencontainers/runtime-spec/specs-go"

	"berth/internal/failpoint"
	"berth/internal/netns"
	"berth/shim/proto"
)

// setDottedSysctls sets the sysctls of interfaces whose names have dots, such as
// net.ipv4.conf.eth0/100.rp_filter, and removes them from the spec. libcontainer and other OCI
// runtimes read each dot and slash as a separator. All of them belong to the network namespace.
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
	return netns.In(c.Spec.Linux.Namespaces[at].Path, func() error {
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
