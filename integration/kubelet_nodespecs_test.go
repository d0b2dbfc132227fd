package integration

import (
	"fmt"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"berth/integration/harness"
)

// The tests below repeat checks of Kubernetes' node tests (test/e2e_node of its repository) with
// static pods.

// The hostname follows "Hostname of Pod": it is the pod's name, or the whole FQDN if the pod
// requests that. Without a cluster domain the FQDN ends with a dot.
func testKubeletHostname(t *testing.T, n *node) {
	const base = "fqdn"
	longest := strings.Repeat("l", 64-len("-"+kubeletNode+".t.default.svc.")) // the longest name that kernel and kubelet accept
	for _, tc := range []struct {
		name, spec string
		hostname   string
	}{
		{base + "-none", "", base + "-none-" + kubeletNode},
		{base + "-no-subdomain", "setHostnameAsFQDN: true", base + "-no-subdomain-" + kubeletNode},
		{base + "-short", "subdomain: t", base + "-short-" + kubeletNode},
		{base + "-full", "{subdomain: t, setHostnameAsFQDN: true}", base + "-full-" + kubeletNode + ".t.default.svc."},
		{base + "-named", "{hostname: h, subdomain: t, setHostnameAsFQDN: true}", "h.t.default.svc."},
		{longest, "{subdomain: t, setHostnameAsFQDN: true}", longest + "-" + kubeletNode + ".t.default.svc."},
	} {
		t.Run(tc.name, func(t *testing.T) {
			spec := "containers: [{}]\n" + strings.ReplaceAll(strings.Trim(tc.spec, "{}"), ", ", "\n") + "\n"
			p := n.apply(t, tc.name, spec)
			p.awaitReady(t)
			main := p.container(t, "main")
			harness.Equal(t, "hostname", main.Exec(t, "hostname"), tc.hostname)
			harness.Equal(t, "/etc/hostname", main.Exec(t, "cat", "/etc/hostname"), tc.hostname)
			harness.Equal(t, "kernel's hostname", main.Exec(t, "cat", "/proc/sys/kernel/hostname"), tc.hostname)
		})
	}
}

// "DefaultProcMount" and "ProcMount" count the mounts whose lines contain /proc. With Unmasked only
// one writable mount is left.
func testKubeletProcMount(t *testing.T, n *node) {
	t.Run("Default", func(t *testing.T) {
		p := n.apply(t, "proc-default", "containers: [{securityContext: {procMount: Default}}]")
		p.awaitReady(t)
		lines, readOnly := mountsWithProc(t, p.container(t, "main"))
		if len(lines) < 2 || readOnly == 0 {
			t.Errorf("%d read-only mounts in %q", readOnly, lines)
		}
	})
	t.Run("Unmasked", func(t *testing.T) {
		if !n.userNamespaces(t) {
			t.Skip("the runtime does not support user namespaces for pods here")
		}
		p := n.apply(t, "proc-unmasked", `
hostUsers: false
containers: [{securityContext: {procMount: Unmasked}}]`)
		p.awaitReady(t)
		lines, readOnly := mountsWithProc(t, p.container(t, "main"))
		if len(lines) != 1 || readOnly != 0 {
			t.Errorf("%d read-only mounts in %q, want one writable mount", readOnly, lines)
		}
	})
}

// "Summary API" expects these fields of a pod after a restart of its container. Fields of CPU,
// memory and disks must not be zero, because the container uses them.
func testKubeletSummary(t *testing.T, n *node) {
	p := n.apply(t, "summary", `
containers:
- command: [sh, -c, 'if [ -e /host/restarted ]; then head -c 2000000 /dev/zero >/test-empty-dir-mnt/file; ping -c 1 -w 5 127.0.0.1; echo hello; while :; do usleep 10000; done; fi; touch /host/restarted']
  resources: {limits: {memory: 80M}}
  volumeMounts: [{name: host, mountPath: /host}, {name: test-empty-dir, mountPath: /test-empty-dir-mnt}]
  readinessProbe: {exec: {command: [test, -e, /test-empty-dir-mnt/file]}, periodSeconds: 1, timeoutSeconds: 20}
volumes:
- name: test-empty-dir
  emptyDir: {}
`)
	p.await(t, "restarted", func(pod *corev1.Pod) error { return restarts(pod, "main", 1) })
	p.awaitReady(t)
	disk := []string{"availableBytes", "capacityBytes", "usedBytes", "inodesFree", "inodes", "inodesUsed"}
	used := map[string][]string{
		"cpu": {"usageNanoCores", "usageCoreNanoSeconds"}, "memory": {"availableBytes", "usageBytes", "workingSetBytes", "rssBytes"},
		"containers[main].cpu":    {"usageNanoCores", "usageCoreNanoSeconds"},
		"containers[main].memory": {"availableBytes", "usageBytes", "workingSetBytes", "rssBytes", "pageFaults"},
		"containers[main].rootfs": disk, "containers[main].logs": disk, "volume[test-empty-dir]": disk, "ephemeral-storage": disk,
		"network": {"rxBytes", "txBytes"}, "network.interfaces[eth0]": {"rxBytes", "txBytes"},
		"process_stats": {"process_count"},
	}
	present := map[string][]string{
		"network": {"time", "rxErrors", "txErrors"}, "network.interfaces[eth0]": {"name", "rxErrors", "txErrors"},
		"memory": {"time", "pageFaults", "majorPageFaults"}, "containers[main].memory": {"time", "majorPageFaults"},
		"cpu": {"time"}, "containers[main]": {"name", "startTime"},
	}
	n.kubelet.waitFor(t, "the summary has all fields", func() error {
		fields, err := n.summaryOf(p)
		if err != nil {
			return err
		}
		for where, names := range used {
			for _, name := range names {
				if value, ok := fields[where+"."+name].(float64); !ok || value == 0 {
					return fmt.Errorf("%s.%s is %v", where, name, fields[where+"."+name])
				}
			}
		}
		for where, names := range present {
			for _, name := range names {
				if fields[where+"."+name] == nil {
					return fmt.Errorf("%s.%s is missing", where, name)
				}
			}
		}
		for _, same := range []string{"name", "rxErrors", "txErrors"} {
			harness.Equal(t, "interfaces[eth0]."+same, fields["network.interfaces[eth0]."+same], fields["network."+same])
		}
		if name := fields["network.name"]; name != "eth0" {
			return harness.Unexpected("the network's name", name, "eth0")
		}
		return nil
	})
}

// summaryOf returns the pod's part of kubelet's summary, as values by path. Paths contain the names
// of list elements.
func (n *node) summaryOf(p *kubePod) (map[string]any, error) {
	var summary struct{ Pods []map[string]any }
	if err := n.read("/stats/summary", &summary); err != nil {
		return nil, err
	}
	fields := map[string]any{}
	for _, pod := range summary.Pods {
		if ref, ok := pod["podRef"].(map[string]any); ok && ref["name"] == p.name {
			flatten(fields, "", pod)
		}
	}
	if len(fields) == 0 {
		return nil, fmt.Errorf("%s is not in the summary of %d pods", p.name, len(summary.Pods))
	}
	return fields, nil
}

// flatten records each value of a JSON document by its path.
func flatten(values map[string]any, path string, value any) {
	switch value := value.(type) {
	case map[string]any:
		for key, field := range value {
			flatten(values, strings.TrimPrefix(path+"."+key, "."), field)
		}
	case []any:
		for _, element := range value {
			name := ""
			if named, ok := element.(map[string]any); ok {
				name, _ = named["name"].(string)
			}
			flatten(values, path+"["+name+"]", element)
		}
	default:
		values[path] = value
	}
}
