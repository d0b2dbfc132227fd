package podyaml

import (
	"errors"
	"fmt"
	"path"

	corev1 "k8s.io/api/core/v1"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// MaskedPaths and ReadonlyPaths are masked or read-only in a container (kubelet's
// pkg/securitycontext/util.go).
var (
	MaskedPaths = []string{
		"/proc/acpi", "/proc/asound", "/proc/interrupts", "/proc/kcore", "/proc/keys", "/proc/latency_stats",
		"/proc/sched_debug", "/proc/scsi", "/proc/timer_list", "/proc/timer_stats",
		"/sys/devices/virtual/powercap", "/sys/firmware",
	}
	ReadonlyPaths = []string{"/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger"}
)

func (p *Plan) namespaces() *runtimeapi.NamespaceOption {
	out := &runtimeapi.NamespaceOption{Pid: runtimeapi.NamespaceMode_CONTAINER}
	if p.Pod.Spec.HostNetwork {
		out.Network = runtimeapi.NamespaceMode_NODE
	}
	return out
}

// podContext returns the pod's security context, or an empty one.
func (p *Plan) podContext() *corev1.PodSecurityContext {
	if sc := p.Pod.Spec.SecurityContext; sc != nil {
		return sc
	}
	return &corev1.PodSecurityContext{}
}

func (p *Plan) sandboxSecurity() *runtimeapi.LinuxSandboxSecurityContext {
	sc := p.podContext()
	out := &runtimeapi.LinuxSandboxSecurityContext{
		NamespaceOptions:   p.namespaces(),
		SelinuxOptions:     selinux(sc.SELinuxOptions),
		RunAsUser:          number(sc.RunAsUser),
		SupplementalGroups: p.groups(),
		Seccomp:            &runtimeapi.SecurityProfile{ProfileType: runtimeapi.SecurityProfile_RuntimeDefault},
	}
	if sc.RunAsUser != nil { // CRI accepts a group only with a user
		out.RunAsGroup = number(sc.RunAsGroup)
	}
	for _, c := range p.Containers() {
		out.Privileged = out.Privileged || privileged(c.Container)
	}
	return out
}

// groups returns the pod's supplementary groups, including its fsGroup.
func (p *Plan) groups() []int64 {
	sc := p.podContext()
	var out []int64
	if sc.FSGroup != nil {
		out = append(out, *sc.FSGroup)
	}
	return append(out, sc.SupplementalGroups...)
}

func number(n *int64) *runtimeapi.Int64Value {
	if n == nil {
		return nil
	}
	return &runtimeapi.Int64Value{Value: *n}
}

func selinux(o *corev1.SELinuxOptions) *runtimeapi.SELinuxOption {
	if o == nil {
		return nil
	}
	return &runtimeapi.SELinuxOption{User: o.User, Role: o.Role, Type: o.Type, Level: o.Level}
}

// effective returns the container's security context, with unset fields from the pod's
// (DetermineEffectiveSecurityContext).
func (p *Plan) effective(c *corev1.Container) *corev1.SecurityContext {
	out := &corev1.SecurityContext{}
	if c.SecurityContext != nil {
		out = c.SecurityContext.DeepCopy()
	}
	pod := p.podContext()
	inherit(&out.SELinuxOptions, pod.SELinuxOptions)
	inherit(&out.RunAsUser, pod.RunAsUser)
	inherit(&out.RunAsGroup, pod.RunAsGroup)
	inherit(&out.RunAsNonRoot, pod.RunAsNonRoot)
	inherit(&out.SeccompProfile, pod.SeccompProfile)
	inherit(&out.AppArmorProfile, pod.AppArmorProfile)
	return out
}

func inherit[T any](field **T, from *T) {
	if *field == nil {
		*field = from
	}
}

// containerSecurity translates the effective security context. runAsNonRoot needs the image's user,
// and so does runAsGroup if no user is set.
func (p *Plan) containerSecurity(c Container,
	image *runtimeapi.Image) (*runtimeapi.LinuxContainerSecurityContext, error) {
	sc := p.effective(c.Container)
	if value(sc.RunAsNonRoot) {
		if err := checkNonRoot(sc.RunAsUser, image); err != nil {
			return nil, err
		}
	}
	out := &runtimeapi.LinuxContainerSecurityContext{
		Capabilities:       capabilities(sc.Capabilities),
		Privileged:         value(sc.Privileged),
		NamespaceOptions:   p.namespaces(),
		SelinuxOptions:     selinux(sc.SELinuxOptions),
		RunAsUser:          number(sc.RunAsUser),
		RunAsGroup:         number(sc.RunAsGroup),
		ReadonlyRootfs:     value(sc.ReadOnlyRootFilesystem),
		SupplementalGroups: p.groups(),
		NoNewPrivs:         sc.AllowPrivilegeEscalation != nil && !*sc.AllowPrivilegeEscalation,
		Seccomp:            p.seccomp(sc),
		Apparmor:           apparmor(sc.AppArmorProfile),
	}
	if sc.RunAsUser == nil && sc.RunAsGroup != nil { // CRI accepts a group only with a user, so use the image's
		out.RunAsUser, out.RunAsUsername = image.GetUid(), image.GetUsername()
		if out.RunAsUser == nil && out.RunAsUsername == "" {
			out.RunAsUser = &runtimeapi.Int64Value{}
		}
	}
	out.MaskedPaths, out.ReadonlyPaths = MaskedPaths, ReadonlyPaths
	return out, nil
}

// checkNonRoot implements kubelet's verifyRunAsNonRoot.
func checkNonRoot(user *int64, image *runtimeapi.Image) error {
	switch {
	case user != nil && *user != 0:
		return nil
	case user != nil:
		return errors.New("runAsNonRoot and runAsUser 0 contradict each other")
	case image.GetUsername() != "":
		return fmt.Errorf(
			"runAsNonRoot: the image's user %q is a name, so berth cannot check that it is not root; set runAsUser",
			image.GetUsername())
	case image.GetUid() == nil || image.GetUid().GetValue() == 0:
		return errors.New("runAsNonRoot: the image runs as root; set runAsUser")
	}
	return nil
}

func capabilities(c *corev1.Capabilities) *runtimeapi.Capability {
	if c == nil {
		return nil
	}
	out := &runtimeapi.Capability{}
	for _, name := range c.Add {
		out.AddCapabilities = append(out.AddCapabilities, string(name))
	}
	for _, name := range c.Drop {
		out.DropCapabilities = append(out.DropCapabilities, string(name))
	}
	return out
}

// seccomp returns the container's profile, by default RuntimeDefault.
func (p *Plan) seccomp(sc *corev1.SecurityContext) *runtimeapi.SecurityProfile {
	if value(sc.Privileged) {
		return &runtimeapi.SecurityProfile{ProfileType: runtimeapi.SecurityProfile_Unconfined}
	}
	if sc.SeccompProfile == nil {
		return &runtimeapi.SecurityProfile{ProfileType: runtimeapi.SecurityProfile_RuntimeDefault}
	}
	out := profile(string(sc.SeccompProfile.Type), value(sc.SeccompProfile.LocalhostProfile))
	if out.LocalhostRef != "" {
		out.LocalhostRef = path.Join(p.Host.SeccompRoot, out.LocalhostRef)
	}
	return out
}

// apparmor returns the container's profile. nil leaves the choice to the runtime, which has
// detected whether the kernel has AppArmor.
func apparmor(a *corev1.AppArmorProfile) *runtimeapi.SecurityProfile {
	if a == nil {
		return nil
	}
	return profile(string(a.Type), value(a.LocalhostProfile))
}

// profile translates the three kinds of profiles, which have the same names in CRI and Kubernetes.
func profile(kind, localhost string) *runtimeapi.SecurityProfile {
	return &runtimeapi.SecurityProfile{
		ProfileType:  runtimeapi.SecurityProfile_ProfileType(runtimeapi.SecurityProfile_ProfileType_value[kind]),
		LocalhostRef: localhost,
	}
}

func privileged(c *corev1.Container) bool {
	return c.SecurityContext != nil && value(c.SecurityContext.Privileged)
}
