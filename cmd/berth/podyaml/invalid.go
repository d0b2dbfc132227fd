package podyaml

import (
	"fmt"
	"net/netip"
	"path"
	"regexp"
	"slices"
	"strings"

	"github.com/distribution/reference"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/validation"
)

// checker collects the errors in values of supported fields. It does not refuse every value that
// the API server refuses. It refuses values that would fail only after the pod has started, and
// values that would become part of a host path.
type checker struct {
	pod      *corev1.Pod
	objects  *Objects
	problems []Problem
}

// all checks the whole pod.
func (c *checker) all() {
	meta, spec := c.pod.ObjectMeta, &c.pod.Spec
	c.addAll("metadata.name", meta.Name, validation.IsDNS1123Subdomain(meta.Name))
	c.addAll("metadata.namespace", meta.Namespace, validation.IsDNS1123Label(meta.Namespace))
	if spec.RestartPolicy != corev1.RestartPolicyNever {
		c.add("spec.restartPolicy", "%s: containers do not restart; want Never or nothing, or a kubelet: see docs/standalone.md",
			spec.RestartPolicy)
	}
	if *spec.TerminationGracePeriodSeconds < 0 {
		c.add("spec.terminationGracePeriodSeconds", "must not be negative")
	}
	if spec.Hostname != "" {
		c.addAll("spec.hostname", spec.Hostname, validation.IsDNS1123Label(spec.Hostname))
		if spec.HostNetwork {
			c.add("spec.hostname", "the pod has the host's name with hostNetwork")
		}
	}
	c.podSecurity()
	c.volumes()
	c.containers()
}

func (c *checker) add(path, format string, args ...any) {
	c.problems = append(c.problems, Problem{path, fmt.Sprintf(format, args...)})
}

// addAll adds the messages of a validator of apimachinery.
func (c *checker) addAll(path, value string, messages []string) {
	for _, m := range messages {
		c.add(path, "%q: %s", value, m)
	}
}

// unique adds a problem if a name is in seen already.
func (c *checker) unique(path, name string, seen map[string]bool) {
	if seen[name] {
		c.add(path, "%q is there twice", name)
	}
	seen[name] = true
}

// sysctlName is the API server's pattern, with dots or slashes.
var sysctlName = regexp.MustCompile(`^([a-z0-9][-_a-z0-9]*[./])*[a-z0-9][-_a-z0-9]*$`)

func (c *checker) podSecurity() {
	sc := c.pod.Spec.SecurityContext
	if sc == nil {
		return
	}
	const at = "spec.securityContext"
	c.id(at+".runAsUser", sc.RunAsUser)
	c.id(at+".runAsGroup", sc.RunAsGroup)
	c.id(at+".fsGroup", sc.FSGroup)
	for i := range sc.SupplementalGroups {
		c.id(index(at+".supplementalGroups", i), &sc.SupplementalGroups[i])
	}
	for i, s := range sc.Sysctls {
		if !sysctlName.MatchString(s.Name) {
			c.add(index(at+".sysctls", i)+".name", "%q is not the name of a sysctl", s.Name)
		}
	}
	c.profiles(at, sc.SeccompProfile, sc.AppArmorProfile)
}

// id checks a user or group number. The limit is the API server's. It also excludes the kernel's
// all-ones value, which means "no change".
func (c *checker) id(path string, id *int64) {
	const most = 1<<31 - 1
	if id != nil && (*id < 0 || *id > most) {
		c.add(path, "%d is not between 0 and %d", *id, most)
	}
}

func (c *checker) profiles(at string, seccomp *corev1.SeccompProfile, apparmor *corev1.AppArmorProfile) {
	if seccomp != nil {
		c.profile(at+".seccompProfile", string(seccomp.Type), seccomp.LocalhostProfile)
		if name := value(seccomp.LocalhostProfile); path.IsAbs(name) || hasDotDot(name) {
			c.add(at+".seccompProfile.localhostProfile", "%q must be a relative path without ..", name)
		}
	}
	if apparmor != nil {
		c.profile(at+".appArmorProfile", string(apparmor.Type), apparmor.LocalhostProfile)
	}
}

func (c *checker) profile(at, kind string, localhost *string) {
	if kind == "" {
		c.add(at+".type", "is needed")
	}
	oneOf(c, at+".type", kind, "RuntimeDefault", "Unconfined", "Localhost")
	if (kind == "Localhost") != (value(localhost) != "") {
		c.add(at+".localhostProfile", "is required with type Localhost and not allowed otherwise")
	}
}

func hasDotDot(name string) bool { return slices.Contains(strings.Split(name, "/"), "..") }

func (c *checker) volumes() {
	seen := map[string]bool{}
	for i := range c.pod.Spec.Volumes {
		v := &c.pod.Spec.Volumes[i]
		at := index("spec.volumes", i)
		c.addAll(at+".name", v.Name, validation.IsDNS1123Label(v.Name))
		c.unique(at+".name", v.Name, seen)
		if (v.EmptyDir != nil) && (v.HostPath != nil) {
			c.add(at, "has two sources")
		}
		if v.VolumeSource == (corev1.VolumeSource{}) {
			c.add(at, "has no source")
		}
		if e := v.EmptyDir; e != nil {
			oneOf(c, at+".emptyDir.medium", e.Medium, corev1.StorageMediumMemory)
			if e.SizeLimit != nil && (e.SizeLimit.Sign() < 0 || e.Medium != corev1.StorageMediumMemory) {
				c.add(at+".emptyDir.sizeLimit", "without medium Memory it "+needsKubelet)
			}
		}
		if h := v.HostPath; h != nil {
			c.absolute(at+".hostPath.path", h.Path)
			oneOf(c, at+".hostPath.type", value(h.Type), corev1.HostPathDirectoryOrCreate, corev1.HostPathDirectory,
				corev1.HostPathFileOrCreate, corev1.HostPathFile, corev1.HostPathSocket, corev1.HostPathCharDev, corev1.HostPathBlockDev)
		}
	}
}

func (c *checker) absolute(at, name string) {
	if !path.IsAbs(name) || hasDotDot(name) {
		c.add(at, "%q must be an absolute path without ..", name)
	}
}

func (c *checker) containers() {
	if len(c.pod.Spec.Containers) == 0 {
		c.add("spec.containers", "at least one is needed")
	}
	names, ports := map[string]bool{}, map[string]bool{}
	for _, ctr := range containers(c.pod) {
		c.addAll(ctr.Path+".name", ctr.Name, validation.IsDNS1123Label(ctr.Name))
		c.unique(ctr.Path+".name", ctr.Name, names)
		if _, err := reference.ParseDockerRef(ctr.Image); err != nil {
			c.add(ctr.Path+".image", "%q: %v", ctr.Image, err)
		}
		oneOf(c, ctr.Path+".imagePullPolicy", ctr.ImagePullPolicy,
			corev1.PullAlways, corev1.PullIfNotPresent, corev1.PullNever)
		if ctr.WorkingDir != "" && !path.IsAbs(ctr.WorkingDir) {
			c.add(ctr.Path+".workingDir", "%q is not an absolute path", ctr.WorkingDir)
		}
		c.env(ctr)
		c.resources(ctr)
		c.mounts(ctr)
		c.containerSecurity(ctr)
		c.ports(ctr, ports)
	}
}

// env checks the names of variables, and that ConfigMaps and Secrets exist.
func (c *checker) env(ctr Container) {
	plan := &Plan{Pod: c.pod, Objects: c.objects}
	for i := range ctr.EnvFrom {
		if _, err := plan.fromObject(&ctr.EnvFrom[i]); err != nil {
			c.add(index(ctr.Path+".envFrom", i), "%v", err)
		}
	}
	for i := range ctr.Env {
		e := &ctr.Env[i]
		at := index(ctr.Path+".env", i)
		c.addAll(at+".name", e.Name, validation.IsRelaxedEnvVarName(e.Name))
		if e.ValueFrom == nil {
			continue
		}
		if e.Value != "" || (e.ValueFrom.ConfigMapKeyRef != nil && e.ValueFrom.SecretKeyRef != nil) {
			c.add(at, "has more than one source")
		}
		if _, _, err := plan.fromKey(e.ValueFrom); err != nil {
			c.add(at+".valueFrom", "%v", err)
		}
	}
}

func (c *checker) resources(ctr Container) {
	at := ctr.Path + ".resources"
	for _, list := range []struct {
		name   string
		values corev1.ResourceList
	}{{"limits", ctr.Resources.Limits}, {"requests", ctr.Resources.Requests}} {
		for _, name := range sortedNames(list.values) {
			q := list.values[name]
			where := fmt.Sprintf("%s.%s.%s", at, list.name, name)
			if !knownResource(name) {
				c.add(where, needsKubelet)
			}
			if q.Sign() < 0 {
				c.add(where, "must not be negative")
			}
		}
	}
	for _, name := range sortedNames(ctr.Resources.Limits) {
		limit, request := ctr.Resources.Limits[name], ctr.Resources.Requests[name]
		if request.Cmp(limit) > 0 {
			c.add(fmt.Sprintf("%s.requests.%s", at, name), "%s is more than the limit %s", request.String(), limit.String())
		}
	}
}

func (c *checker) mounts(ctr Container) {
	targets := map[string]bool{}
	for i := range ctr.VolumeMounts {
		m := &ctr.VolumeMounts[i]
		at := index(ctr.Path+".volumeMounts", i)
		if !slices.ContainsFunc(c.pod.Spec.Volumes, func(v corev1.Volume) bool { return v.Name == m.Name }) {
			c.add(at+".name", "there is no volume %q", m.Name)
		}
		c.absolute(at+".mountPath", m.MountPath)
		c.unique(at+".mountPath", path.Clean(m.MountPath), targets)
	}
}

func (c *checker) containerSecurity(ctr Container) {
	sc := ctr.SecurityContext
	if sc == nil {
		return
	}
	at := ctr.Path + ".securityContext"
	c.id(at+".runAsUser", sc.RunAsUser)
	c.id(at+".runAsGroup", sc.RunAsGroup)
	escalation := sc.AllowPrivilegeEscalation == nil || *sc.AllowPrivilegeEscalation
	if !escalation && value(sc.Privileged) {
		c.add(at+".allowPrivilegeEscalation", "cannot be false in a privileged container")
	}
	if !escalation && sc.Capabilities != nil && slices.Contains(sc.Capabilities.Add, "SYS_ADMIN") {
		c.add(at+".allowPrivilegeEscalation", "cannot be false with the capability SYS_ADMIN")
	}
	c.profiles(at, sc.SeccompProfile, sc.AppArmorProfile)
}

// ports checks one container's ports. taken has the host ports of earlier containers.
func (c *checker) ports(ctr Container, taken map[string]bool) {
	const most = 65535
	for i, p := range ctr.Ports {
		at := index(ctr.Path+".ports", i)
		if p.ContainerPort < 1 || p.ContainerPort > most {
			c.add(at+".containerPort", "%d is not between 1 and %d", p.ContainerPort, most)
		}
		if p.HostPort < 0 || p.HostPort > most {
			c.add(at+".hostPort", "%d is not between 1 and %d", p.HostPort, most)
		}
		if c.pod.Spec.HostNetwork && p.HostPort != p.ContainerPort {
			c.add(at+".hostPort", "must be the containerPort with hostNetwork")
		}
		oneOf(c, at+".protocol", p.Protocol, corev1.ProtocolTCP, corev1.ProtocolUDP, corev1.ProtocolSCTP)
		if _, err := netip.ParseAddr(p.HostIP); p.HostIP != "" && err != nil {
			c.add(at+".hostIP", "%q is not an IP address", p.HostIP)
		}
		if p.HostPort != 0 {
			c.unique(at+".hostPort", fmt.Sprintf("%s/%s/%d", p.HostIP, p.Protocol, p.HostPort), taken)
		}
	}
}
