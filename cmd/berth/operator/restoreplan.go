package operator

import (
	"cmp"
	"fmt"
	"io"
	"path"
	"slices"
	"strings"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	"k8s.io/apimachinery/pkg/util/validation"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/checkpoint/process/archive"
	"berth/cmd/berth/podrun"
	"berth/cmd/berth/podyaml"
	"berth/internal/errdefs"
)

// restorePlan is a pod that an archive describes, with the user's changes. The archive may come
// from anyone, so the plan has no path of the archive's node, unless host access is permitted.
type restorePlan struct {
	manifest   *archive.Manifest
	signer     archive.Signer
	sandbox    *runtimeapi.PodSandboxConfig
	containers []*runtimeapi.ContainerConfig
	handler    string
}

// mapped reports whether the pod has a user namespace.
func (p *restorePlan) mapped() bool {
	users := p.sandbox.GetLinux().GetSecurityContext().GetNamespaceOptions().GetUsernsOptions()
	return users != nil && users.GetMode() == runtimeapi.NamespaceMode_POD
}

// podIdentity names a restored pod. Empty fields mean the values in the archive.
type podIdentity struct{ name, namespace string }

// newRestorePlan decodes the configurations in a manifest.
func newRestorePlan(m *archive.Manifest, identity podIdentity) (*restorePlan, error) {
	p := &restorePlan{manifest: m, sandbox: &runtimeapi.PodSandboxConfig{}}
	var name string
	namespace := "default"
	if m.Pod != nil {
		if err := decodeConfig(m.Pod.Config, p.sandbox); err != nil {
			return nil, fmt.Errorf("checkpoint: configuration of the pod: %w", err)
		}
		name, namespace, p.handler = m.Pod.Name, m.Pod.Namespace, m.Pod.Handler
	} else {
		name = m.Containers[0].Name
	}
	for i := range m.Containers {
		c, err := restoredConfig(&m.Containers[i])
		if err != nil {
			return nil, err
		}
		p.containers = append(p.containers, c)
	}
	if err := p.setIdentity(cmp.Or(identity.name, name), cmp.Or(identity.namespace, namespace)); err != nil {
		return nil, err
	}
	return p, nil
}

// permitPrivileged makes the pod privileged if one of its containers is. Such a container may have
// been added after the pod's creation.
func (p *restorePlan) permitPrivileged() {
	isPrivileged := func(c *runtimeapi.ContainerConfig) bool { return c.GetLinux().GetSecurityContext().GetPrivileged() }
	if !slices.ContainsFunc(p.containers, isPrivileged) {
		return
	}
	if p.sandbox.Linux.SecurityContext == nil {
		p.sandbox.Linux.SecurityContext = &runtimeapi.LinuxSandboxSecurityContext{}
	}
	p.sandbox.Linux.SecurityContext.Privileged = true
}

// decodeConfig decodes a message of the CRI without unknown fields. ReadManifest has limited its
// size and depth.
func decodeConfig(data []byte, into proto.Message) error {
	if len(data) == 0 {
		return errdefs.InvalidArgument("it is missing")
	}
	if err := protojson.Unmarshal(data, into); err != nil {
		return errdefs.InvalidArgument("%w", err)
	}
	return nil
}

// restoredConfig returns the configuration of a restored container. Its image is named by the
// image's ID, which is the same on every node.
func restoredConfig(c *archive.Container) (*runtimeapi.ContainerConfig, error) {
	config := &runtimeapi.ContainerConfig{}
	if err := decodeConfig(c.Config, config); err != nil {
		return nil, fmt.Errorf("checkpoint: configuration of container %s: %w", errdefs.Clip(c.Name), err)
	}
	if err := archive.CheckName(c.Name); err != nil {
		return nil, err
	}
	config.Metadata = &runtimeapi.ContainerMetadata{Name: c.Name}
	config.Image = &runtimeapi.ImageSpec{Image: c.Image.ID, UserSpecifiedImage: c.Image.Name}
	config.LogPath = path.Join(c.Name, "0.log")
	return config, nil
}

// setIdentity gives the pod and its containers their names, also in the labels that name a
// container's pod.
func (p *restorePlan) setIdentity(name, namespace string) error {
	problems := slices.Concat(validation.IsDNS1123Subdomain(name), validation.IsDNS1123Label(namespace))
	if len(problems) > 0 {
		return fmt.Errorf("pod %q in namespace %q: %s; set --name and --namespace",
			errdefs.Clip(name), errdefs.Clip(namespace), strings.Join(problems, "; "))
	}
	p.sandbox.Metadata = &runtimeapi.PodSandboxMetadata{Name: name, Namespace: namespace}
	if p.sandbox.GetLinux() == nil {
		p.sandbox.Linux = &runtimeapi.LinuxPodSandboxConfig{}
	}
	p.sandbox.Linux.CgroupParent = ""
	p.sandbox.Labels = p.labels(p.sandbox.GetLabels())
	for _, c := range p.containers {
		c.Labels = p.labels(c.GetLabels())
	}
	return nil
}

func (p *restorePlan) labels(labels map[string]string) map[string]string {
	if labels == nil {
		labels = map[string]string{}
	}
	meta := p.sandbox.GetMetadata()
	labels["io.kubernetes.pod.name"], labels["io.kubernetes.pod.namespace"] = meta.GetName(), meta.GetNamespace()
	labels["io.kubernetes.pod.uid"] = meta.GetUid()
	return labels
}

// names returns the names of the containers.
func (p *restorePlan) names() (names []string) {
	for _, c := range p.containers {
		names = append(names, c.GetMetadata().GetName())
	}
	return names
}

// hostsPath is the file that berth run and kubelet mount into each container.
const hostsPath = "/etc/hosts"

// use makes the pod use files of this node.
func (p *restorePlan) use(files *podrun.Restored) {
	p.sandbox.Metadata.Uid, p.sandbox.LogDirectory = files.UID, files.LogDir
	p.sandbox.Labels = p.labels(p.sandbox.GetLabels())
	for _, c := range p.containers {
		c.Labels = p.labels(c.GetLabels())
		for _, m := range c.GetMounts() {
			if m.GetContainerPath() == hostsPath {
				m.HostPath = files.Hosts
			}
		}
	}
}

// withoutAnnotations removes what could make a plugin of this node act.
func (p *restorePlan) withoutAnnotations() {
	p.sandbox.Annotations = nil
	for _, c := range p.containers {
		c.Annotations = nil
	}
}

// hostAccess lists the node's resources that the pod would use, and every weakened restriction.
func (p *restorePlan) hostAccess() []string {
	linux := p.sandbox.GetLinux()
	security := linux.GetSecurityContext()
	list := namespacesOfHost(security.GetNamespaceOptions())
	if security.GetPrivileged() {
		list = append(list, "privileged")
	}
	list = append(list, selinuxLabel(security.GetSelinuxOptions())...)
	for name, value := range linux.GetSysctls() {
		list = append(list, "sysctl "+name+"="+value)
	}
	for _, port := range p.sandbox.GetPortMappings() {
		if port.GetHostPort() != 0 {
			list = append(list, fmt.Sprintf("host port %d", port.GetHostPort()))
		}
	}
	for _, c := range p.containers {
		for _, access := range containerAccess(c) {
			list = append(list, fmt.Sprintf("container %s: %s", c.GetMetadata().GetName(), access))
		}
	}
	slices.Sort(list)
	return list
}

func namespacesOfHost(o *runtimeapi.NamespaceOption) (list []string) {
	modes := map[string]runtimeapi.NamespaceMode{"network": o.GetNetwork(), "PID": o.GetPid(), "IPC": o.GetIpc()}
	for name, mode := range modes {
		if mode == runtimeapi.NamespaceMode_NODE {
			list = append(list, name+" namespace of the node")
		}
	}
	return list
}

// containerAccess is hostAccess of one container.
func containerAccess(c *runtimeapi.ContainerConfig) (list []string) {
	for _, m := range c.GetMounts() {
		if m.GetHostPath() != "" && m.GetContainerPath() != hostsPath {
			list = append(list, "mount of "+m.GetHostPath())
		}
	}
	for _, d := range c.GetDevices() {
		list = append(list, "device "+d.GetHostPath())
	}
	for _, d := range c.GetCDIDevices() {
		list = append(list, "device "+d.GetName())
	}
	security := c.GetLinux().GetSecurityContext()
	list = append(list, namespacesOfHost(security.GetNamespaceOptions())...)
	if security.GetPrivileged() {
		list = append(list, "privileged")
	}
	capabilities := security.GetCapabilities()
	for _, name := range slices.Concat(capabilities.GetAddCapabilities(), capabilities.GetAddAmbientCapabilities()) {
		list = append(list, "capability "+name)
	}
	if !security.GetPrivileged() {
		list = append(list, missing("not masked: ", podyaml.MaskedPaths, security.GetMaskedPaths())...)
		list = append(list, missing("not read-only: ", podyaml.ReadonlyPaths, security.GetReadonlyPaths())...)
	}
	list = append(list, selinuxLabel(security.GetSelinuxOptions())...)
	//nolint:staticcheck // the deprecated fields decide where the new ones are missing
	list = append(list, weakProfile("seccomp", security.GetSeccomp(), security.GetSeccompProfilePath(), unconfined)...)
	//nolint:staticcheck // as above
	return append(list, weakProfile("AppArmor", security.GetApparmor(), security.GetApparmorProfile(), runtimeDefault)...)
}

// missing describes the default paths that a container does not protect.
func missing(kind string, defaults, have []string) []string {
	rest := slices.DeleteFunc(slices.Clone(defaults), func(p string) bool { return slices.Contains(have, p) })
	if len(rest) == 0 {
		return nil
	}
	return []string{kind + strings.Join(rest, ", ")}
}

// selinuxLabel describes a label that replaces the runtime's label. A type such as spc_t confines
// nothing.
func selinuxLabel(o *runtimeapi.SELinuxOption) []string {
	if proto.Size(o) == 0 {
		return nil
	}
	return []string{"SELinux label " + strings.Join([]string{o.GetUser(), o.GetRole(), o.GetType(), o.GetLevel()}, ":")}
}

// weakProfile describes a profile that restricts nothing or is a file of the node. It returns
// nothing for the runtime's default. missing is the text for a container without a profile.
func weakProfile(kind string, p *runtimeapi.SecurityProfile, deprecated, missing string) []string {
	name := cmp.Or(deprecated, missing)
	if p != nil {
		name = map[runtimeapi.SecurityProfile_ProfileType]string{
			runtimeapi.SecurityProfile_RuntimeDefault: runtimeDefault,
			runtimeapi.SecurityProfile_Localhost:      p.GetLocalhostRef(),
		}[p.GetProfileType()]
	}
	if name == runtimeDefault {
		return nil
	}
	return []string{kind + " profile " + cmp.Or(name, unconfined)}
}

// Names of profiles, as in the CRI's deprecated fields.
const (
	runtimeDefault = "runtime/default"
	unconfined     = "unconfined"
)

// print describes the pod before it is restored. Texts of the archive are quoted, so they cannot
// control a terminal.
func (p *restorePlan) print(w io.Writer, access []string) error {
	m, meta := p.manifest, p.sandbox.GetMetadata()
	var out strings.Builder
	fmt.Fprintf(&out, "pod %s/%s, saved by %s at %s on Linux %s (%s)\n", meta.GetNamespace(), meta.GetName(), p.signer,
		m.CreatedAt.UTC().Format("2006-01-02 15:04:05 MST"), errdefs.Clip(m.Node.Kernel), errdefs.Clip(m.Node.Architecture))
	for i, c := range p.containers {
		user := c.GetLinux().GetSecurityContext()
		fmt.Fprintf(&out, "  container %s\n    image    %s\n    command  %s\n", c.GetMetadata().GetName(),
			errdefs.Clip(cmp.Or(m.Containers[i].Image.Ref, m.Containers[i].Image.Name, c.GetImage().GetImage())),
			errdefs.Clip(strings.Join(append(slices.Clone(c.GetCommand()), c.GetArgs()...), " ")))
		if user.GetRunAsUser() != nil || user.GetRunAsUsername() != "" {
			name := cmp.Or(user.GetRunAsUsername(), fmt.Sprint(user.GetRunAsUser().GetValue()))
			fmt.Fprintf(&out, "    user     %s\n", errdefs.Clip(name))
		}
	}
	for _, a := range access {
		fmt.Fprintf(&out, "  uses the node: %s\n", errdefs.Clip(a))
	}
	_, err := io.WriteString(w, out.String())
	return err
}
