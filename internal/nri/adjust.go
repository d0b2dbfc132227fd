package nri

import (
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"path"
	"slices"
	"strings"

	"github.com/containerd/nri/pkg/api"
	specs "github.com/opencontainers/runtime-spec/specs-go"
	"google.golang.org/protobuf/proto"

	"berth/internal/errdefs"
	"berth/internal/host"
)

// Adjustment holds the changes of plugins to a new container, except limits. Limits are an Update.
// It is immutable. Records contain it as a JSON string. A nil Adjustment changes nothing.
type Adjustment struct{ adjust *api.ContainerAdjustment }

// newAdjustment checks the changes and separates the limits, which later updates may change.
func newAdjustment(adjust *api.ContainerAdjustment) (*Adjustment, Update, error) {
	// Strip removes the empty parts that the library leaves.
	adjust = proto.Clone(adjust).(*api.ContainerAdjustment).Strip()
	if err := Check(adjust); err != nil {
		return nil, Update{}, err
	}
	var own Update
	var err error
	if own.Resources, own.Limits, err = toCRI(adjust.GetLinux().GetResources()); err != nil {
		return nil, own, err
	}
	if resources := adjust.GetLinux().GetResources(); resources != nil {
		adjust.Linux.Resources = &api.LinuxResources{Devices: resources.Devices}
	}
	if adjust = adjust.Strip(); adjust == nil {
		return nil, own, nil
	}
	return &Adjustment{adjust}, own, nil
}

// MarshalJSON implements json.Marshaler.
func (a *Adjustment) MarshalJSON() ([]byte, error) {
	data, err := proto.Marshal(a.adjust)
	if err != nil {
		return nil, fmt.Errorf("encode NRI adjustment: %w", err)
	}
	return json.Marshal(base64.StdEncoding.EncodeToString(data))
}

// UnmarshalJSON implements json.Unmarshaler.
func (a *Adjustment) UnmarshalJSON(data []byte) error {
	var encoded []byte // base64, as written by MarshalJSON
	if err := json.Unmarshal(data, &encoded); err != nil {
		return fmt.Errorf("decode NRI adjustment: %w", err)
	}
	a.adjust = &api.ContainerAdjustment{}
	if err := proto.Unmarshal(encoded, a.adjust); err != nil {
		return fmt.Errorf("decode NRI adjustment: %w", err)
	}
	return nil
}

func (a *Adjustment) annotations() map[string]string {
	if a == nil {
		return nil
	}
	return a.adjust.GetAnnotations()
}

// Node provides the facts of the node and container that the spec lacks.
type Node struct {
	// Sysctl returns the dotted name of a sysctl, or the reason why the container may not set it to
	// value.
	Sysctl func(name, value string) (string, error)
	// CDI adds CDI devices to a spec. It is nil if CDI is not available.
	CDI func(spec *specs.Spec, names []string) error
}

// Apply changes spec as plugins requested. The result depends only on spec and node.
//
// Errors: InvalidArgument for an impossible change; FailedPrecondition for a mount source that does
// not propagate.
func (a *Adjustment) Apply(spec *specs.Spec, node Node) error {
	if a == nil {
		return nil
	}
	adjust, linux := a.adjust, a.adjust.GetLinux()
	applyEnv(spec, adjust.GetEnv())
	if args := adjust.GetArgs(); len(args) > 0 {
		spec.Process.Args = slices.Clone(args)
	}
	applyHooks(spec, adjust.GetHooks())
	applyRlimits(spec, adjust.GetRlimits())
	applyProcess(spec, linux)
	applyDevices(spec, linux.GetDevices())
	applyDeviceRules(spec, linux.GetResources().GetDevices())
	applyNetDevices(spec, linux.GetNetDevices())
	applyNamespaces(spec, linux.GetNamespaces())
	applySeccomp(spec, linux.GetSeccompPolicy())
	if policy := linux.GetMemoryPolicy(); policy != nil {
		spec.Linux.MemoryPolicy = policy.ToOCI()
	}
	if err := applySysctl(spec, linux.GetSysctl(), node); err != nil {
		return err
	}
	if err := applyCDI(spec, adjust.GetCDIDevices(), node); err != nil {
		return err
	}
	return applyMounts(spec, adjust.GetMounts())
}

// applyEnv replaces and removes variables in place and appends new ones.
func applyEnv(spec *specs.Spec, env []*api.KeyValue) {
	for _, e := range env {
		key, removed := e.IsMarkedForRemoval()
		at := slices.IndexFunc(spec.Process.Env, func(kv string) bool { return strings.HasPrefix(kv, key+"=") })
		switch {
		case removed && at >= 0:
			spec.Process.Env = slices.Delete(spec.Process.Env, at, at+1)
		case removed:
		case at >= 0:
			spec.Process.Env[at] = key + "=" + e.GetValue()
		default:
			spec.Process.Env = append(spec.Process.Env, key+"="+e.GetValue())
		}
	}
}

func applyHooks(spec *specs.Spec, hooks *api.Hooks) {
	if hooks.Hooks() == nil {
		return
	}
	if spec.Hooks == nil {
		spec.Hooks = &specs.Hooks{}
	}
	for _, list := range []struct {
		from []*api.Hook
		to   *[]specs.Hook
	}{
		{hooks.GetPrestart(), &spec.Hooks.Prestart}, //nolint:staticcheck // deprecated, but plugins use it
		{hooks.GetCreateRuntime(), &spec.Hooks.CreateRuntime},
		{hooks.GetCreateContainer(), &spec.Hooks.CreateContainer},
		{hooks.GetStartContainer(), &spec.Hooks.StartContainer},
		{hooks.GetPoststart(), &spec.Hooks.Poststart},
	} {
		for _, hook := range list.from {
			*list.to = append(*list.to, hook.ToOCI())
		}
	}
}

func applyRlimits(spec *specs.Spec, limits []*api.POSIXRlimit) {
	for _, l := range limits {
		limit := specs.POSIXRlimit{Type: l.GetType(), Hard: l.GetHard(), Soft: l.GetSoft()}
		at := slices.IndexFunc(spec.Process.Rlimits, func(have specs.POSIXRlimit) bool { return have.Type == limit.Type })
		if at >= 0 {
			spec.Process.Rlimits[at] = limit
		} else {
			spec.Process.Rlimits = append(spec.Process.Rlimits, limit)
		}
	}
}

// applyProcess sets the kernel attributes of the container's first process.
func applyProcess(spec *specs.Spec, linux *api.LinuxContainerAdjustment) {
	if score := linux.GetOomScoreAdj(); score != nil {
		value := int(score.GetValue())
		spec.Process.OOMScoreAdj = &value
	}
	if priority := linux.GetIoPriority(); priority != nil {
		spec.Process.IOPriority = nil
		if priority.GetClass() != api.IOPrioClass_IOPRIO_CLASS_NONE {
			spec.Process.IOPriority = priority.ToOCI()
		}
	}
	if scheduler := linux.GetScheduler(); scheduler != nil {
		spec.Process.Scheduler = scheduler.ToOCI()
	}
}

func applyDevices(spec *specs.Spec, devices []*api.LinuxDevice) {
	for _, d := range devices {
		name, removed := d.IsMarkedForRemoval()
		spec.Linux.Devices = slices.DeleteFunc(spec.Linux.Devices,
			func(have specs.LinuxDevice) bool { return have.Path == name })
		if removed {
			continue
		}
		spec.Linux.Devices = append(spec.Linux.Devices, d.ToOCI())
		applyDeviceRules(spec, []*api.LinuxDeviceCgroup{{
			Allow:  true,
			Type:   d.GetType(),
			Major:  api.Int64(d.GetMajor()),
			Minor:  api.Int64(d.GetMinor()),
			Access: d.AccessString(),
		}})
	}
}

func applyDeviceRules(spec *specs.Spec, rules []*api.LinuxDeviceCgroup) {
	for _, r := range rules {
		if spec.Linux.Resources == nil {
			spec.Linux.Resources = &specs.LinuxResources{}
		}
		spec.Linux.Resources.Devices = append(spec.Linux.Resources.Devices, specs.LinuxDeviceCgroup{
			Allow: r.GetAllow(), Type: r.GetType(), Major: r.GetMajor().Get(), Minor: r.GetMinor().Get(), Access: r.GetAccess()})
	}
}

// applyNetDevices moves network devices of the host into the container's network namespace, which
// must not be the host's.
func applyNetDevices(spec *specs.Spec, devices map[string]*api.LinuxNetDevice) {
	for name := range devices { // removals come first, because a plugin may add the device again
		if key, removed := api.IsMarkedForRemoval(name); removed {
			delete(spec.Linux.NetDevices, key)
		}
	}
	for name, d := range devices {
		if _, removed := api.IsMarkedForRemoval(name); removed {
			continue
		}
		if spec.Linux.NetDevices == nil {
			spec.Linux.NetDevices = make(map[string]specs.LinuxNetDevice)
		}
		spec.Linux.NetDevices[name] = d.ToOCI()
	}
}

func applyNamespaces(spec *specs.Spec, namespaces []*api.LinuxNamespace) {
	for _, n := range namespaces {
		kind, removed := n.IsMarkedForRemoval()
		spec.Linux.Namespaces = slices.DeleteFunc(spec.Linux.Namespaces,
			func(have specs.LinuxNamespace) bool { return string(have.Type) == kind })
		if !removed {
			spec.Linux.Namespaces = append(spec.Linux.Namespaces,
				specs.LinuxNamespace{Type: specs.LinuxNamespaceType(kind), Path: n.GetPath()})
		}
	}
}

func applySeccomp(spec *specs.Spec, policy *api.LinuxSeccomp) {
	if policy == nil {
		return
	}
	seccomp := &specs.LinuxSeccomp{DefaultAction: specs.LinuxSeccompAction(policy.GetDefaultAction()),
		Syscalls: api.ToOCILinuxSyscalls(policy.GetSyscalls())}
	if errno := policy.GetDefaultErrno(); errno != nil {
		value := uint(errno.GetValue())
		seccomp.DefaultErrnoRet = &value
	}
	for _, arch := range policy.GetArchitectures() {
		seccomp.Architectures = append(seccomp.Architectures, specs.Arch(arch))
	}
	for _, flag := range policy.GetFlags() {
		seccomp.Flags = append(seccomp.Flags, specs.LinuxSeccompFlag(flag))
	}
	spec.Linux.Seccomp = seccomp
}

func applySysctl(spec *specs.Spec, sysctl map[string]string, node Node) error {
	for name := range sysctl { // removals come first, because a plugin may set the sysctl again
		if key, removed := api.IsMarkedForRemoval(name); removed {
			if dotted, err := node.Sysctl(key, ""); err == nil { // otherwise the spec does not have the sysctl
				delete(spec.Linux.Sysctl, dotted)
			}
		}
	}
	for name, value := range sysctl {
		if _, removed := api.IsMarkedForRemoval(name); removed {
			continue
		}
		key, err := node.Sysctl(name, value)
		if err != nil {
			return fmt.Errorf("NRI adjustment: %w", err)
		}
		if spec.Linux.Sysctl == nil {
			spec.Linux.Sysctl = make(map[string]string)
		}
		spec.Linux.Sysctl[key] = value
	}
	return nil
}

func applyCDI(spec *specs.Spec, devices []*api.CDIDevice, node Node) error {
	if len(devices) == 0 {
		return nil
	}
	if node.CDI == nil {
		return refusal("CDI device %q", devices[0].GetName())
	}
	var names []string
	for _, d := range devices {
		names = append(names, d.GetName())
	}
	if err := node.CDI(spec, names); err != nil {
		return fmt.Errorf("NRI adjustment: %w", err)
	}
	return nil
}

// applyMounts replaces mounts with the same destination. It sorts each mount after the mounts that
// contain it.
func applyMounts(spec *specs.Spec, mounts []*api.Mount) error {
	for _, m := range mounts {
		destination, removed := m.IsMarkedForRemoval()
		destination = path.Clean(destination)
		spec.Mounts = slices.DeleteFunc(spec.Mounts, func(have specs.Mount) bool { return have.Destination == destination })
		if removed {
			continue
		}
		mount, err := newMount(m, destination, spec)
		if err != nil {
			return err
		}
		spec.Mounts = append(spec.Mounts, mount)
	}
	if len(mounts) > 0 {
		depth := func(m specs.Mount) int { return strings.Count(path.Clean(m.Destination), "/") }
		slices.SortStableFunc(spec.Mounts, func(a, b specs.Mount) int { return depth(a) - depth(b) })
	}
	return nil
}

func newMount(m *api.Mount, destination string, spec *specs.Spec) (specs.Mount, error) {
	var propagation string
	mount := m.ToOCI(&propagation)
	mount.Destination = destination
	if !isBind(m) {
		return mount, nil
	}
	source, err := host.Files{}.Resolve(mount.Source)
	if errors.Is(err, fs.ErrNotExist) {
		return mount, errdefs.InvalidArgument("NRI adjustment: mount of %s: source %s does not exist",
			destination, mount.Source)
	}
	if err != nil {
		return mount, fmt.Errorf("NRI adjustment: mount of %s: resolve source %s: %w", destination, mount.Source, err)
	}
	mount.Source = source
	if propagation == "rshared" || propagation == "rslave" {
		return mount, propagate(spec, mount, propagation)
	}
	return mount, nil
}

// propagate sets the propagation of the container's root that a mount requires, if the mount's
// source has this propagation.
func propagate(spec *specs.Spec, mount specs.Mount, propagation string) error {
	at, err := host.Files{}.Propagation(mount.Source)
	if err != nil {
		return fmt.Errorf("NRI adjustment: mount of %s: %w", mount.Destination, err)
	}
	if !at.Shared && !(at.Slave && propagation == "rslave") {
		return errdefs.FailedPrecondition(
			"NRI adjustment: mount of %s: propagation %s needs a shared mount, but source %s is on %s",
			mount.Destination, propagation, mount.Source, at.Mountpoint)
	}
	if spec.Linux.RootfsPropagation != "rshared" {
		spec.Linux.RootfsPropagation = propagation
	}
	return nil
}
