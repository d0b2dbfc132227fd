package nri

import (
	"path"
	"slices"
	"strings"

	"github.com/containerd/nri/pkg/api"
	specs "github.com/opencontainers/runtime-spec/specs-go"
	"google.golang.org/grpc/codes"

	"berth/internal/errdefs"
)

// refusal returns the error for an adjustment that berth does not support.
func refusal(format string, args ...any) error {
	return errdefs.New(codes.Unimplemented, "NRI adjustment: "+format+": not supported", args...)
}

func invalid(format string, args ...any) error {
	return errdefs.InvalidArgument("NRI adjustment: "+format, args...)
}

// Check refuses adjustments that berth does not support with Unimplemented, and malformed ones with
// InvalidArgument. Unsupported are
//
//   - the cgroup's path, because kubelet looks for the container there;
//   - block I/O and RDT classes and RDT groups, because berth has no configuration for them;
//   - poststop hooks, because no libcontainer process remains when a container has exited;
//   - seccomp listeners;
//   - user, mount and time namespaces;
//   - limits that cgroup v2 does not have, see toCRI.
func Check(adjust *api.ContainerAdjustment) error {
	for _, step := range []func(*api.ContainerAdjustment) error{
		checkUnsupported, checkProcess, checkHooks, checkMounts, checkLinux,
	} {
		if err := step(adjust); err != nil {
			return err
		}
	}
	return nil
}

func checkUnsupported(adjust *api.ContainerAdjustment) error {
	linux := adjust.GetLinux()
	switch {
	case linux.GetCgroupsPath() != "":
		return refusal("cgroups path %q", linux.GetCgroupsPath())
	case linux.GetRdt() != nil:
		return refusal("RDT")
	case len(adjust.GetHooks().GetPoststop()) > 0:
		return refusal("poststop hook %q", adjust.GetHooks().GetPoststop()[0].GetPath())
	case linux.GetSeccompPolicy().GetListenerPath() != "" || linux.GetSeccompPolicy().GetListenerMetadata() != "":
		return refusal("seccomp listener %q", linux.GetSeccompPolicy().GetListenerPath())
	}
	return nil
}

func checkProcess(adjust *api.ContainerAdjustment) error {
	for _, e := range adjust.GetEnv() {
		key, _ := e.IsMarkedForRemoval()
		if key == "" || strings.ContainsAny(key, "=\x00") || strings.IndexByte(e.GetValue(), 0) >= 0 {
			return invalid("environment variable %q: empty name, or '=' or NUL in it", key)
		}
	}
	for i, arg := range adjust.GetArgs() {
		if strings.IndexByte(arg, 0) >= 0 || i == 0 && arg == "" {
			return invalid("argument %d %q: NUL byte, or an empty command", i, arg)
		}
	}
	for _, l := range adjust.GetRlimits() {
		if !rlimits[l.GetType()] || l.GetSoft() > l.GetHard() {
			return invalid("rlimit %q: unknown, or the soft limit %d is above the hard one %d",
				l.GetType(), l.GetSoft(), l.GetHard())
		}
	}
	return nil
}

// rlimits lists the limits of setrlimit(2).
var rlimits = map[string]bool{
	"RLIMIT_AS": true, "RLIMIT_CORE": true, "RLIMIT_CPU": true, "RLIMIT_DATA": true, "RLIMIT_FSIZE": true,
	"RLIMIT_LOCKS":   true,
	"RLIMIT_MEMLOCK": true, "RLIMIT_MSGQUEUE": true, "RLIMIT_NICE": true, "RLIMIT_NOFILE": true, "RLIMIT_NPROC": true,
	"RLIMIT_RSS": true, "RLIMIT_RTPRIO": true, "RLIMIT_RTTIME": true, "RLIMIT_SIGPENDING": true, "RLIMIT_STACK": true,
}

func checkHooks(adjust *api.ContainerAdjustment) error {
	hooks := adjust.GetHooks()
	for _, list := range [][]*api.Hook{hooks.GetPrestart(), hooks.GetCreateRuntime(), hooks.GetCreateContainer(),
		hooks.GetStartContainer(), hooks.GetPoststart()} {
		for _, hook := range list {
			if !path.IsAbs(hook.GetPath()) {
				return invalid("hook %q is not an absolute path", hook.GetPath())
			}
		}
	}
	return nil
}

func checkMounts(adjust *api.ContainerAdjustment) error {
	for _, m := range adjust.GetMounts() {
		destination, removed := m.IsMarkedForRemoval()
		if !path.IsAbs(destination) || path.Clean(destination) == "/" || strings.IndexByte(destination, 0) >= 0 {
			return invalid("mount of %q: not an absolute path below the root", destination)
		}
		if !removed && isBind(m) && !path.IsAbs(m.GetSource()) {
			return invalid("mount of %s: source %q is not an absolute path", destination, m.GetSource())
		}
	}
	return nil
}

// isBind reports whether a mount is a bind mount. Like libcontainer it also checks the options.
func isBind(m *api.Mount) bool {
	return m.GetType() == "bind" || slices.Contains(m.GetOptions(), "bind") || slices.Contains(m.GetOptions(), "rbind")
}

func checkLinux(adjust *api.ContainerAdjustment) error {
	for _, n := range adjust.GetLinux().GetNamespaces() {
		kind, removed := n.IsMarkedForRemoval()
		switch specs.LinuxNamespaceType(kind) {
		case specs.NetworkNamespace, specs.IPCNamespace, specs.UTSNamespace, specs.PIDNamespace, specs.CgroupNamespace:
		default:
			return refusal("namespace of type %q", kind)
		}
		if !removed && n.GetPath() != "" && !path.IsAbs(n.GetPath()) {
			return invalid("%s namespace: %q is not an absolute path", kind, n.GetPath())
		}
	}
	for _, d := range adjust.GetLinux().GetDevices() {
		name, removed := d.IsMarkedForRemoval()
		if !path.IsAbs(name) || path.Clean(name) != name || strings.IndexByte(name, 0) >= 0 {
			return invalid("device %q: not a clean absolute path", name)
		}
		if kind := d.GetType(); !removed && kind != "c" && kind != "b" && kind != "u" && kind != "p" {
			return invalid("device %s: unknown type %q", name, kind)
		}
	}
	for name, d := range adjust.GetLinux().GetNetDevices() {
		if key, _ := api.IsMarkedForRemoval(name); !isInterface(key) || d.GetName() != "" && !isInterface(d.GetName()) {
			return invalid("network device %q as %q: not a name of an interface", key, d.GetName())
		}
	}
	if score := adjust.GetLinux().GetOomScoreAdj(); score != nil && (score.GetValue() < -1000 || score.GetValue() > 1000) {
		return invalid("oom_score_adj %d is not between -1000 and 1000", score.GetValue())
	}
	return nil
}

// isInterface reports whether the kernel accepts an interface name (dev_valid_name).
func isInterface(name string) bool {
	return name != "" && len(name) < 16 && name != "." && name != ".." && !strings.ContainsAny(name, "/: \t\n\v\f\r\x00")
}
