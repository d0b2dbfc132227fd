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

// checker collects the errors in values of supported fields. It refuses unsupported values. Of the
// values that the API server refuses, it refuses those that would fail only after the pod has
// started, or would become part of a host path.
type checker struct {
	pod      *corev1.Pod
	objects  *Objects // of the manifest
	problems []Problem
	ignored  []Problem
}

// all checks the whole pod.
func (c *checker) all() {
	c.metadata()
	c.spec()
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

// oneOf adds a problem unless value is zero or one of allowed.
func oneOf[T ~string](c *checker, path string, value T, allowed ...T) {
	if value == "" || slices.Contains(allowed, value) {
		return
	}
	names := make([]string, len(allowed))
	for i, a := range allowed {
		names[i] = string(a)
	}
	c.add(path, "%q is not possible here, want %s", value, strings.Join(names, " or "))
}

func index(path string, i int) string { return fmt.Sprintf("%s[%d]", path, i) }

func value[T any](p *T) T {
	var zero T
	if p == nil {
		return zero
	}
	return *p
}

func (c *checker) metadata() {
	meta := c.pod.ObjectMeta
	c.addAll("metadata.name", meta.Name, validation.IsDNS1123Subdomain(meta.Name))
	c.addAll("metadata.namespace", meta.Namespace, validation.IsDNS1123Label(meta.Namespace))
}

func (c *checker) spec() {
	spec := &c.pod.Spec
	oneOf(c, "spec.restartPolicy", spec.RestartPolicy,
		corev1.RestartPolicyAlways, corev1.RestartPolicyOnFailure, corev1.RestartPolicyNever)
	if *spec.TerminationGracePeriodSeconds < 0 {
		c.add("spec.terminationGracePeriodSeconds", "must not be negative")
	}
	if spec.OS != nil {
		oneOf(c, "spec.os.name", spec.OS.Name, corev1.Linux)
	}
	if d := spec.ActiveDeadlineSeconds; d != nil && *d < 1 {
		c.add("spec.activeDeadlineSeconds", "must be positive")
	}
	c.userNamespace()
	if spec.HostPID && value(spec.ShareProcessNamespace) {
		c.add("spec.shareProcessNamespace", "cannot be set with hostPID")
	}
	if spec.Hostname != "" {
		c.addAll("spec.hostname", spec.Hostname, validation.IsDNS1123Label(spec.Hostname))
		if spec.HostNetwork {
			c.add("spec.hostname", "the pod has the host's name with hostNetwork")
		}
	}
	c.dns()
	for i, alias := range spec.HostAliases {
		at := index("spec.hostAliases", i)
		c.ip(at+".ip", alias.IP)
		for k, name := range alias.Hostnames {
			c.addAll(index(at+".hostnames", k), name, validation.IsDNS1123Subdomain(name))
		}
	}
}

func (c *checker) ip(path, value string) {
	if _, err := netip.ParseAddr(value); err != nil {
		c.add(path, "%q is not an IP address", value)
	}
}

func (c *checker) dns() {
	spec := &c.pod.Spec
	oneOf(c, "spec.dnsPolicy", spec.DNSPolicy, corev1.DNSDefault, corev1.DNSNone)
	config := spec.DNSConfig
	if spec.DNSPolicy == corev1.DNSNone && (config == nil || len(config.Nameservers) == 0) {
		c.add("spec.dnsConfig.nameservers", "at least one is needed with dnsPolicy None")
	}
	if config == nil {
		return
	}
	if len(config.Nameservers) > maxNameservers {
		c.add("spec.dnsConfig.nameservers", "more than %d", maxNameservers)
	}
	for i, server := range config.Nameservers {
		c.ip(index("spec.dnsConfig.nameservers", i), server)
	}
	for i, domain := range config.Searches {
		if domain != "." {
			c.addAll(index("spec.dnsConfig.searches", i), domain, validation.IsDNS1123Subdomain(strings.TrimSuffix(domain, ".")))
		}
	}
	for i, option := range config.Options {
		if option.Name == "" || strings.ContainsAny(option.Name+value(option.Value), " \t\r\n") {
			c.add(index("spec.dnsConfig.options", i), "name must not be empty, and name and value must not contain white space")
		}
	}
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
	oneOf(c, at+".supplementalGroupsPolicy", value(sc.SupplementalGroupsPolicy),
		corev1.SupplementalGroupsPolicyMerge, corev1.SupplementalGroupsPolicyStrict)
	oneOf(c, at+".fsGroupChangePolicy", value(sc.FSGroupChangePolicy),
		corev1.FSGroupChangeAlways, corev1.FSGroupChangeOnRootMismatch)
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
		if name := value(seccomp.LocalhostProfile); name != "" {
			c.within(at+".seccompProfile.localhostProfile", name)
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

// within checks a path that must stay below a directory.
func (c *checker) within(at, relative string) {
	if path.IsAbs(relative) || slices.Contains(strings.Split(relative, "/"), "..") {
		c.add(at, "%q must be a relative path without ..", relative)
	}
}

func (c *checker) volumes() {
	seen := map[string]bool{}
	for i := range c.pod.Spec.Volumes {
		v := &c.pod.Spec.Volumes[i]
		at := index("spec.volumes", i)
		c.addAll(at+".name", v.Name, validation.IsDNS1123Label(v.Name))
		if seen[v.Name] {
			c.add(at+".name", "%q is there twice", v.Name)
		}
		seen[v.Name] = true
		switch sources(v) {
		case 0:
			c.add(at, "has no source")
		case 1:
			c.volume(at, v)
		default:
			c.add(at, "has two sources")
		}
	}
}

func (c *checker) emptyDir(at string, e *corev1.EmptyDirVolumeSource) {
	oneOf(c, at+".medium", e.Medium, corev1.StorageMediumMemory)
	const mostMode = 0o1777
	if e.Mode != nil && (*e.Mode < 0 || *e.Mode > mostMode) {
		c.add(at+".mode", "%#o is not between 0 and %#o", *e.Mode, mostMode)
	}
	switch {
	case e.SizeLimit == nil:
	case e.SizeLimit.Sign() < 0:
		c.add(at+".sizeLimit", "must not be negative")
	case e.Medium != corev1.StorageMediumMemory && !e.SizeLimit.IsZero():
		c.ignored = append(c.ignored, Problem{at + ".sizeLimit", notEnforced + " without medium Memory"})
	}
}

func (c *checker) hostPath(at string, h *corev1.HostPathVolumeSource) {
	if !path.IsAbs(h.Path) || slices.Contains(strings.Split(h.Path, "/"), "..") {
		c.add(at+".path", "%q must be an absolute path without ..", h.Path)
	}
	oneOf(c, at+".type", value(h.Type), corev1.HostPathDirectoryOrCreate, corev1.HostPathDirectory,
		corev1.HostPathFileOrCreate, corev1.HostPathFile, corev1.HostPathSocket, corev1.HostPathCharDev,
		corev1.HostPathBlockDev)
}

// checkImage parses a reference as the runtime does.
func checkImage(image string) error {
	_, err := reference.ParseDockerRef(image)
	return err
}
