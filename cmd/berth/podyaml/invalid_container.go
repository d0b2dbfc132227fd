package podyaml

import (
	"fmt"
	"path"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/validation"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

func (c *checker) containers() {
	if len(c.pod.Spec.Containers) == 0 {
		c.add("spec.containers", "at least one is needed")
	}
	names, ports := map[string]bool{}, map[string]bool{}
	for _, ctr := range containers(c.pod) {
		c.addAll(ctr.Path+".name", ctr.Name, validation.IsDNS1123Label(ctr.Name))
		if names[ctr.Name] {
			c.add(ctr.Path+".name", "%q is there twice", ctr.Name)
		}
		names[ctr.Name] = true
		c.container(ctr)
		c.ports(ctr, ports)
	}
}

func (c *checker) container(ctr Container) {
	if err := checkImage(ctr.Image); err != nil {
		c.add(ctr.Path+".image", "%q: %v", ctr.Image, err)
	}
	oneOf(c, ctr.Path+".imagePullPolicy", ctr.ImagePullPolicy,
		corev1.PullAlways, corev1.PullIfNotPresent, corev1.PullNever)
	if ctr.Init {
		oneOf(c, ctr.Path+".restartPolicy", value(ctr.RestartPolicy), corev1.ContainerRestartPolicyAlways)
	}
	if ctr.WorkingDir != "" && !path.IsAbs(ctr.WorkingDir) {
		c.add(ctr.Path+".workingDir", "%q is not an absolute path", ctr.WorkingDir)
	}
	c.env(ctr)
	c.probes(ctr)
	c.resources(ctr)
	c.mounts(ctr)
	c.lifecycle(ctr)
	c.containerSecurity(ctr)
}

func (c *checker) env(ctr Container) {
	c.envFrom(ctr)
	for i := range ctr.Env {
		e := &ctr.Env[i]
		at := index(ctr.Path+".env", i)
		c.addAll(at+".name", e.Name, validation.IsRelaxedEnvVarName(e.Name))
		if e.ValueFrom == nil {
			continue
		}
		field, resource := e.ValueFrom.FieldRef, e.ValueFrom.ResourceFieldRef
		if e.Value != "" || sources(e.ValueFrom) > 1 {
			c.add(at, "has more than one source")
		}
		c.envKeyRef(at, e)
		if field != nil {
			if err := checkFieldRef(field); err != nil {
				c.add(at+".valueFrom.fieldRef", "%v", err)
			}
		}
		if resource != nil {
			if err := checkResourceRef(c.pod, ctr.Container, resource); err != nil {
				c.add(at+".valueFrom.resourceFieldRef", "%v", err)
			}
		}
	}
}

// envKeyRef checks that the ConfigMap or Secret of a variable exists.
func (c *checker) envKeyRef(at string, e *corev1.EnvVar) {
	plan := &Plan{Pod: c.pod, Objects: c.objects}
	var err error
	if ref := e.ValueFrom.ConfigMapKeyRef; ref != nil {
		at += ".valueFrom.configMapKeyRef"
		_, _, err = plan.keyValue(configMapKind, ref.Name, ref.Key, ref.Optional)
	} else if ref := e.ValueFrom.SecretKeyRef; ref != nil {
		at += ".valueFrom.secretKeyRef"
		_, _, err = plan.keyValue(secretKind, ref.Name, ref.Key, ref.Optional)
	}
	if err != nil {
		c.add(at, "%v", err)
	}
}

func (c *checker) envFrom(ctr Container) {
	for i := range ctr.EnvFrom {
		from := &ctr.EnvFrom[i]
		at := index(ctr.Path+".envFrom", i)
		if (from.ConfigMapRef == nil) == (from.SecretRef == nil) {
			c.add(at, "needs configMapRef or secretRef")
			continue
		}
		kind, name, optional := envFromSource(from)
		if _, ok := c.objects.lookup(kind, c.pod.Namespace, name); !ok && !optional {
			c.add(at, "%v", missingObject(kind, name))
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
				c.add(where, "only cpu, memory and hugepages-<size> can be limited")
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

func sortedNames(list corev1.ResourceList) []corev1.ResourceName {
	names := make([]corev1.ResourceName, 0, len(list))
	for name := range list {
		names = append(names, name)
	}
	slices.Sort(names)
	return names
}

func (c *checker) mounts(ctr Container) {
	targets := map[string]bool{}
	for i := range ctr.VolumeMounts {
		m := &ctr.VolumeMounts[i]
		at := index(ctr.Path+".volumeMounts", i)
		if !slices.ContainsFunc(c.pod.Spec.Volumes, func(v corev1.Volume) bool { return v.Name == m.Name }) {
			c.add(at+".name", "there is no volume %q", m.Name)
		}
		if !path.IsAbs(m.MountPath) || slices.Contains(strings.Split(m.MountPath, "/"), "..") {
			c.add(at+".mountPath", "%q must be an absolute path without ..", m.MountPath)
		}
		if targets[path.Clean(m.MountPath)] {
			c.add(at+".mountPath", "%q is there twice", m.MountPath)
		}
		targets[path.Clean(m.MountPath)] = true
		c.mountOptions(ctr, at, m)
	}
}

func (c *checker) mountOptions(ctr Container, at string, m *corev1.VolumeMount) {
	c.within(at+".subPath", m.SubPath)
	c.within(at+".subPathExpr", m.SubPathExpr)
	if m.SubPath != "" && m.SubPathExpr != "" {
		c.add(at+".subPathExpr", "cannot be set with subPath")
	}
	propagation := value(m.MountPropagation)
	oneOf(c, at+".mountPropagation", propagation,
		corev1.MountPropagationNone, corev1.MountPropagationHostToContainer, corev1.MountPropagationBidirectional)
	if propagation == corev1.MountPropagationBidirectional && !privileged(ctr.Container) {
		c.add(at+".mountPropagation", "Bidirectional needs a privileged container")
	}
	recursive := value(m.RecursiveReadOnly)
	oneOf(c, at+".recursiveReadOnly", recursive,
		corev1.RecursiveReadOnlyDisabled, corev1.RecursiveReadOnlyIfPossible, corev1.RecursiveReadOnlyEnabled)
	if recursive != "" && recursive != corev1.RecursiveReadOnlyDisabled {
		if !m.ReadOnly {
			c.add(at+".recursiveReadOnly", "needs readOnly")
		}
		if propagation != "" && propagation != corev1.MountPropagationNone {
			c.add(at+".recursiveReadOnly", "cannot be set with mountPropagation %s", propagation)
		}
	}
	for i, option := range m.BindMountOptions {
		oneOf(c, index(at+".bindMountOptions", i), option, "noexec", "nodev", "nosuid")
	}
}

func (c *checker) lifecycle(ctr Container) {
	if ctr.Lifecycle == nil {
		return
	}
	if ctr.Init && !ctr.Sidecar() {
		c.add(ctr.Path+".lifecycle", "only a container that keeps running can have it")
	}
	c.handler(ctr, ctr.Path+".lifecycle.postStart", ctr.Lifecycle.PostStart)
	c.handler(ctr, ctr.Path+".lifecycle.preStop", ctr.Lifecycle.PreStop)
	if s := ctr.Lifecycle.StopSignal; s != nil {
		if _, ok := stopSignal(*s); !ok {
			c.add(ctr.Path+".lifecycle.stopSignal", "%q is not a signal", *s)
		}
	}
}

func (c *checker) handler(ctr Container, at string, h *corev1.LifecycleHandler) {
	switch {
	case h == nil:
	case sources(h) > 1:
		c.add(at, "has two actions")
	case h.HTTPGet != nil:
		c.port(ctr, at+".httpGet.port", h.HTTPGet.Port)
	case h.Exec != nil && len(h.Exec.Command) == 0:
		c.add(at+".exec.command", "is needed")
	case h.Sleep != nil && h.Sleep.Seconds < 0:
		c.add(at+".sleep.seconds", "must not be negative")
	}
}

// stopSignal translates a signal's name. CRI's names are Kubernetes' names with a prefix.
func stopSignal(s corev1.Signal) (runtimeapi.Signal, bool) {
	n, ok := runtimeapi.Signal_value["SIGNAL_"+string(s)]
	return runtimeapi.Signal(n), ok && n != 0
}

func (c *checker) containerSecurity(ctr Container) {
	sc := ctr.SecurityContext
	if sc == nil {
		return
	}
	at := ctr.Path + ".securityContext"
	c.id(at+".runAsUser", sc.RunAsUser)
	c.id(at+".runAsGroup", sc.RunAsGroup)
	oneOf(c, at+".procMount", value(sc.ProcMount), corev1.DefaultProcMount, corev1.UnmaskedProcMount)
	escalation := sc.AllowPrivilegeEscalation == nil || *sc.AllowPrivilegeEscalation
	if !escalation && value(sc.Privileged) {
		c.add(at+".allowPrivilegeEscalation", "cannot be false in a privileged container")
	}
	if !escalation && sc.Capabilities != nil && slices.Contains(sc.Capabilities.Add, "SYS_ADMIN") {
		c.add(at+".allowPrivilegeEscalation", "cannot be false with the capability SYS_ADMIN")
	}
	c.profiles(at, sc.SeccompProfile, sc.AppArmorProfile)
}

func privileged(c *corev1.Container) bool {
	return c.SecurityContext != nil && value(c.SecurityContext.Privileged)
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
		if p.HostIP != "" {
			c.ip(at+".hostIP", p.HostIP)
		}
		key := fmt.Sprintf("%s/%s/%d", p.HostIP, p.Protocol, p.HostPort)
		if p.HostPort != 0 && taken[key] {
			c.add(at+".hostPort", "%d is there twice", p.HostPort)
		}
		taken[key] = true
	}
}
