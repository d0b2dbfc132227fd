package state

import (
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/internal/errdefs"
)

func TestCheckPod(t *testing.T) {
	named := func(change func(*runtimeapi.PodSandboxConfig)) *runtimeapi.PodSandboxConfig {
		config := &runtimeapi.PodSandboxConfig{Metadata: &runtimeapi.PodSandboxMetadata{Name: "web", Namespace: "default", Uid: "1"}}
		change(config)
		return config
	}
	name := func(n string) *runtimeapi.PodSandboxConfig {
		return named(func(c *runtimeapi.PodSandboxConfig) { c.Metadata.Name = n })
	}
	for what, test := range map[string]struct {
		config *runtimeapi.PodSandboxConfig
		ok     bool
	}{
		"usual":                {name("web-0.example"), true},
		"no metadata":          {&runtimeapi.PodSandboxConfig{}, false},
		"no config":            {nil, false},
		"no name":              {name(""), false},
		"no namespace, no uid": {named(func(c *runtimeapi.PodSandboxConfig) { c.Metadata.Namespace, c.Metadata.Uid = "", "" }), true},
		"path as name":         {name("../../etc"), false},
		"a dot":                {name("."), false},
		"two dots":             {named(func(c *runtimeapi.PodSandboxConfig) { c.Metadata.Uid = ".." }), false},
		"a line break":         {named(func(c *runtimeapi.PodSandboxConfig) { c.Metadata.Namespace = "a\nb" }), false},
		"a delete character":   {name("a\x7fb"), false},
		"the longest name":     {name(strings.Repeat("x", 253)), true},
		"name too long":        {name(strings.Repeat("x", 254)), false},
		"absolute logs":        {named(func(c *runtimeapi.PodSandboxConfig) { c.LogDirectory = "/var/log/pods/x" }), true},
		"relative logs":        {named(func(c *runtimeapi.PodSandboxConfig) { c.LogDirectory = "logs" }), false},
		"valid hostname":       {named(func(c *runtimeapi.PodSandboxConfig) { c.Hostname = "web-0" }), true},
		"invalid hostname":     {named(func(c *runtimeapi.PodSandboxConfig) { c.Hostname = "web 0\n127.0.0.1 evil" }), false},
	} {
		if err := CheckPod(test.config); test.ok != (err == nil) || !test.ok && errdefs.Code(err) != codes.InvalidArgument {
			t.Errorf("%s: %v", what, err)
		}
	}
}

// kubelet cuts a pod's hostname at 63 bytes. It rejects a fully qualified hostname of more than 64
// bytes (kubelet_pods.go, util.GetNodenameForKernel).
func TestCheckPodAcceptsHostnamesOfKubelet(t *testing.T) {
	label := func(n int) string { return strings.Repeat("n", n) }
	for what, test := range map[string]struct {
		hostname string
		ok       bool
	}{
		"none":                                 {"", true},
		"pod name":                             {"web-0", true},
		"truncated pod name":                   {label(63), true},
		"pod name that is a DNS subdomain":     {"web.v1.2", true},
		"fully qualified":                      {"web-0.shop.default.svc.cluster.local", true},
		"fully qualified, no cluster domain":   {"web-0.shop.default.svc.", true},
		"cluster domain that ends with a dot":  {"web-0.shop.default.svc.cluster.local.", true},
		"fully qualified, 64 bytes":            {label(43) + ".t.ns.svc.cluster.lan", true},
		"fully qualified, 64 bytes with a dot": {label(54) + ".t.ns.svc.", true},
		"65 bytes":                             {label(44) + ".t.ns.svc.cluster.lan", false},
		"65 bytes with a dot":                  {label(55) + ".t.ns.svc.", false},
		"label of 64 bytes":                    {label(64), false},
		"two dots at the end":                  {"web-0.shop..", false},
		"only a dot":                           {".", false},
	} {
		t.Run(what, func(t *testing.T) {
			config := &runtimeapi.PodSandboxConfig{Hostname: test.hostname, Metadata: &runtimeapi.PodSandboxMetadata{Name: "web-0"}}
			if err := CheckPod(config); test.ok != (err == nil) || !test.ok && errdefs.Code(err) != codes.InvalidArgument {
				t.Errorf("%q of %d bytes: %v", test.hostname, len(test.hostname), err)
			}
		})
	}
}

func TestCheckContainer(t *testing.T) {
	logged, unlogged := &runtimeapi.PodSandboxConfig{LogDirectory: "/logs"}, &runtimeapi.PodSandboxConfig{}
	for what, test := range map[string]struct {
		name, logPath string
		pod           *runtimeapi.PodSandboxConfig
		ok            bool
	}{
		"usual":                   {"main", "main/0.log", logged, true},
		"no log":                  {"main", "", logged, true},
		"no name":                 {"", "main/0.log", logged, false},
		"a slash in its name":     {"a/b", "", logged, false},
		"log outside":             {"main", "../other/0.log", logged, false},
		"absolute log":            {"main", "/etc/passwd", logged, false},
		"log path with .. inside": {"main", "main/../0.log", logged, true},
		"no log directory":        {"main", "../0.log", unlogged, true}, // no log is kept
	} {
		config := &runtimeapi.ContainerConfig{Metadata: &runtimeapi.ContainerMetadata{Name: test.name}, LogPath: test.logPath}
		if err := CheckContainer(config, test.pod, nil); test.ok != (err == nil) || !test.ok && errdefs.Code(err) != codes.InvalidArgument {
			t.Errorf("%s: %v", what, err)
		}
	}
	if err := CheckContainer(&runtimeapi.ContainerConfig{}, logged, nil); errdefs.Code(err) != codes.InvalidArgument {
		t.Errorf("without metadata: %v", err)
	}
}

// A privileged container needs a privileged pod. A pod becomes privileged when a privileged
// ephemeral container is added to it.
func TestCheckPrivilegedContainer(t *testing.T) {
	pod := func(privileged bool) *runtimeapi.PodSandboxConfig {
		return &runtimeapi.PodSandboxConfig{Linux: &runtimeapi.LinuxPodSandboxConfig{
			SecurityContext: &runtimeapi.LinuxSandboxSecurityContext{Privileged: privileged}}}
	}
	config := &runtimeapi.ContainerConfig{
		Metadata: &runtimeapi.ContainerMetadata{Name: "debugger"},
		Linux:    &runtimeapi.LinuxContainerConfig{SecurityContext: &runtimeapi.LinuxContainerSecurityContext{Privileged: true}},
	}
	for what, test := range map[string]struct {
		pod, current *runtimeapi.PodSandboxConfig
		ok           bool
	}{
		"privileged pod":                     {pod(true), pod(true), true},
		"privileged pod, without a second":   {pod(true), nil, true},
		"pod that has become privileged":     {pod(false), pod(true), true},
		"pod that is not privileged":         {pod(false), pod(false), false},
		"unprivileged pod, without a second": {pod(false), nil, false},
		"unprivileged pod, an empty second":  {pod(false), &runtimeapi.PodSandboxConfig{}, false},
		"pod that was created as privileged": {pod(true), pod(false), true},
	} {
		if err := CheckContainer(config, test.pod, test.current); test.ok != (err == nil) || !test.ok && errdefs.Code(err) != codes.InvalidArgument {
			t.Errorf("%s: %v", what, err)
		}
	}
}

// Different pods have different identities, even with misleading names.
func TestIdentitiesAreUnique(t *testing.T) {
	pods := map[string]bool{}
	all := []*runtimeapi.PodSandboxMetadata{
		{Name: "a", Namespace: "b", Uid: "c", Attempt: 1}, {Name: "a", Namespace: "b", Uid: "c", Attempt: 2}, {Name: "a", Namespace: "b", Uid: "d", Attempt: 1},
		{Name: "a", Namespace: "c", Uid: "c", Attempt: 1}, {Name: `a" in namespace "b`, Uid: "c", Attempt: 1}, {Name: "a", Namespace: `b" (uid "c`, Attempt: 1},
	}
	for _, md := range all {
		pods[PodIdentity(md)] = true
	}
	if len(pods) != len(all) {
		t.Errorf("%d identities of %d pods: %v", len(pods), len(all), pods)
	}
	one, other := &runtimeapi.ContainerMetadata{Name: "a"}, &runtimeapi.ContainerMetadata{Name: "a", Attempt: 1}
	if ContainerIdentity("p", one) == ContainerIdentity("p", other) || ContainerIdentity("p", one) == ContainerIdentity("q", one) {
		t.Error("different containers have the same identity")
	}
}
