package podyaml

import (
	"fmt"
	"maps"
	"path"
	"slices"
	"strings"

	"github.com/distribution/reference"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/validation"
)

// checker collects the errors in values of supported fields. It does not refuse every value that
// the API server refuses. It refuses values that would become part of a host path, and those whose
// error the runtime cannot see in its requests. The runtime refuses the others.
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
	if sc := spec.SecurityContext; sc != nil {
		c.profiles("spec.securityContext", sc.SeccompProfile, sc.AppArmorProfile)
	}
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
		c.env(ctr)
		c.resources(ctr)
		c.mounts(ctr)
		if sc := ctr.SecurityContext; sc != nil {
			c.profiles(ctr.Path+".securityContext", sc.SeccompProfile, sc.AppArmorProfile)
		}
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
	for _, list := range []struct {
		name   string
		values corev1.ResourceList
	}{{"limits", ctr.Resources.Limits}, {"requests", ctr.Resources.Requests}} {
		for _, name := range slices.Sorted(maps.Keys(list.values)) {
			where := fmt.Sprintf("%s.resources.%s.%s", ctr.Path, list.name, name)
			if !slices.Contains(honouredResources, name) {
				c.add(where, needsKubelet)
			}
			if q := list.values[name]; q.Sign() < 0 {
				c.add(where, "must not be negative")
			}
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

// ports checks one container's ports. taken has the host ports of earlier containers.
func (c *checker) ports(ctr Container, taken map[string]bool) {
	for i, p := range ctr.Ports {
		at := index(ctr.Path+".ports", i)
		if c.pod.Spec.HostNetwork && p.HostPort != p.ContainerPort {
			c.add(at+".hostPort", "must be the containerPort with hostNetwork")
		}
		oneOf(c, at+".protocol", p.Protocol, corev1.ProtocolTCP, corev1.ProtocolUDP, corev1.ProtocolSCTP)
		if p.HostPort != 0 {
			c.unique(at+".hostPort", fmt.Sprintf("%s/%s/%d", p.HostIP, p.Protocol, p.HostPort), taken)
		}
	}
}
