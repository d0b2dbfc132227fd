package integration

import (
	"cmp"
	"encoding/xml"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"

	"berth/integration/fixture"
	"berth/integration/harness"
	"berth/integration/pages"
)

const (
	// conformanceEnv selects TestConformance. Its value is the time after which the suite starts no
	// more specs, such as 3h.
	conformanceEnv = "BERTH_CONFORMANCE"
	// rootfsEnv names the archive that integration/conformance/rootfs makes.
	rootfsEnv = "BERTH_CONFORMANCE_ROOTFS"

	dnsService = "10.96.0.10" // kubeadm's default
	dnsPort    = "53"
)

// smokeSpecs are specs of each area in which kubelet, runtime and network work together.
var smokeSpecs = []string{
	"Pods should get a host IP",
	"Pods should be submitted and removed",
	"Pods should contain environment variables for services",
	"Pods should support remote command execution over websockets",
	"Pods should support retrieving logs from the container over websockets",
	"Probing container with readiness probe that fails should never be ready and never restart",
	"Container Lifecycle Hook when create a pod with lifecycle hook should execute prestop exec hook properly",
	"InitContainer should invoke init containers on a RestartAlways pod",
	"InitContainer should invoke init containers on a RestartNever pod",
	"Kubelet when scheduling a busybox command in a pod should print the output to logs",
	"Kubelet when scheduling an agnhost Pod with hostAliases should write entries to /etc/hosts",
	"Downward API should provide host IP as an env var",
	"EmptyDir volumes should support (root,0644,tmpfs)",
	"EmptyDir volumes pod should support shared volumes between containers",
	"Secrets should be consumable from pods in volume with mappings",
	"Projected downwardAPI should provide container's memory limit",
	"Subpath Atomic writer volumes should support subpaths with downward pod",
	"Networking Granular Checks: Pods should function for intra-pod communication: http",
	"Services should serve a basic endpoint from pods",
	"DNS should provide DNS for the cluster",
}

// TestConformanceSmoke runs specs of Kubernetes' conformance suite on two nodes.
func TestConformanceSmoke(t *testing.T) {
	c := newConformanceCluster(t)
	defer c.remove(t)
	focus := make([]string, len(smokeSpecs))
	for i, spec := range smokeSpecs {
		focus[i] = regexp.QuoteMeta(spec)
	}
	results := c.runSpecs(t, "--focus="+`(`+strings.Join(focus, "|")+`).*\[Conformance\]`, "--timeout=25m")
	if n := len(results["passed"]); n < len(smokeSpecs) {
		t.Errorf("%d specs passed, want at least %d", n, len(smokeSpecs))
	}
}

// TestConformance runs Kubernetes' conformance suite on two nodes: first the specs that can run
// beside others, then the serial ones. BERTH_CONFORMANCE_FOCUS selects specs by a regular
// expression instead. BERTH_CONFORMANCE_NETWORK is berth's option network.type: berth-net, the
// default, or cni for the CNI plugins bridge, host-local and portmap.
func TestConformance(t *testing.T) {
	limit := os.Getenv(conformanceEnv)
	if limit == "" {
		t.Skipf("takes hours: export %s=3h, or contrib/test -conformance", conformanceEnv)
	}
	c := newConformanceCluster(t)
	defer c.remove(t)
	if focus := os.Getenv(conformanceEnv + "_FOCUS"); focus != "" {
		c.runSpecs(t, "--procs=4", "--focus="+focus, "--timeout="+limit)
		return
	}
	skip := "--skip=" + strings.Join(impossibleSpecs, "|")
	t.Run("Parallel", func(t *testing.T) {
		c.runSpecs(t, "--procs=4", "--label-filter=Conformance && !Serial", skip, "--timeout="+limit)
	})
	t.Run("Serial", func(t *testing.T) {
		c.runSpecs(t, "--label-filter=Conformance && Serial", skip, "--timeout="+limit)
	})
}

// impossibleSpecs match the specs of the conformance suite that cannot pass with the images of this
// test.
var impossibleSpecs = []string{
	// It wants the text of busybox' shell. The image has bash, because other specs use variables
	// with names such as data-1, which Debian's busybox drops.
	"read only busybox container should not write to root filesystem",
}

// newConformanceCluster makes a cluster with kubeadm as docs/kubeadm.md describes. It adds what a
// network of a cluster adds: routes to pods of other nodes, kube-proxy and DNS.
func newConformanceCluster(t *testing.T) *kubeadmCluster {
	t.Helper()
	for _, name := range append(controlPlanePrograms, "kubeadm", "kubectl", "kubelet", "kube-proxy", "coredns", "e2e.test", "ginkgo", "agnhost") {
		kubernetesProgram(t, name)
	}
	c := newKubeadmCluster(t, cmp.Or(os.Getenv(conformanceEnv+"_NETWORK"), builtIn))
	writeBelow(t, "/etc/cni/net.d", "10-pods.conflist", []byte(podsConflist))
	pushTestImages(t)
	c.create(t)
	c.routePods(t)
	config := c.first.page.dir + "/admin.conf" // the second machine has another /etc/kubernetes
	c.first.command(t, "cp", "/etc/kubernetes/admin.conf", config)
	for i, m := range []*kubeadm{c.first, c.second} {
		m.startProxy(t, []string{kubeletNode, secondNode}[i], config)
	}
	c.startDNS(t, config)
	return c
}

// podsConflist is the network of both nodes, unless they use the built-in one. The runtime passes
// the node's pod CIDR to host-local. Nothing is masqueraded, because the nodes have routes to all
// pods.
const podsConflist = `{"cniVersion": "1.0.0", "name": "pods", "plugins": [
	{"type": "bridge", "bridge": "berth0", "isGateway": true, "hairpinMode": true, "capabilities": {"ipRanges": true},
		"ipam": {"type": "host-local", "routes": [{"dst": "0.0.0.0/0"}]}},
	{"type": "portmap", "capabilities": {"portMappings": true}}]}`

// create runs the page's commands up to the join of the second node.
func (c *kubeadmCluster) create(t *testing.T) {
	t.Helper()
	for _, b := range harness.Get(pages.Read(checkoutDir))(t)["kubeadm.md"] {
		switch {
		case strings.Contains(b.Text, "kubeadm upgrade"):
			c.first.command(t, "kubectl", "delete", "deployment", "web")
			c.first.command(t, "kubectl", "taint", "node", kubeletNode, "node-role.kubernetes.io/control-plane-")
			return
		case b.RunsIn(pages.Kubeadm):
			c.run(t, c.first, b)
		case b.RunsIn(pages.KubeadmNode):
			c.run(t, c.second, b)
		}
	}
	t.Fatal("the page has no kubeadm upgrade")
}

// remove runs the page's commands that remove both nodes.
func (c *kubeadmCluster) remove(t *testing.T) {
	t.Helper()
	for _, b := range harness.Get(pages.Read(checkoutDir))(t)["kubeadm.md"] {
		switch {
		case !strings.Contains(b.Text, "kubeadm reset"):
		case b.RunsIn(pages.Kubeadm):
			c.run(t, c.first, b)
		case b.RunsIn(pages.KubeadmNode):
			c.run(t, c.second, b)
		}
	}
}

// routePods makes the pods of each node reachable from the other, as the network of a cloud does.
func (c *kubeadmCluster) routePods(t *testing.T) {
	t.Helper()
	for _, route := range []struct {
		on, to        *kubeadm
		name, address string
	}{{c.second, c.first, kubeletNode, kubeletAddress}, {c.first, c.second, secondNode, secondAddress}} {
		pods := c.first.command(t, "kubectl", "get", "node", route.name, "-o", "jsonpath={.spec.podCIDR}")
		route.on.command(t, "ip", "route", "add", pods, "via", route.address)
	}
}

// startProxy starts kube-proxy. It leaves the kernel's limits of connections alone, which only the
// first network namespace can change.
func (k *kubeadm) startProxy(t *testing.T, name, kubeconfig string) {
	t.Helper()
	config := fmt.Sprintf(`apiVersion: kubeproxy.config.k8s.io/v1alpha1
kind: KubeProxyConfiguration
mode: nftables
clusterCIDR: %s
hostnameOverride: %s
clientConnection: {kubeconfig: %s}
conntrack: {maxPerCore: 0, min: 0, tcpEstablishedTimeout: 0s, tcpCloseWaitTimeout: 0s}
`, clusterPods, name, kubeconfig)
	file := filepath.Join(k.page.dir, "kube-proxy-"+name+".yaml")
	harness.Must(t, os.WriteFile(file, []byte(config), 0o600))
	p := startProgram(t, "kube-proxy", k.dir+"/kube-proxy.log", append(k.enter, kubernetesProgram(t, "kube-proxy"), "--config", file, "--v=2")...)
	t.Cleanup(func() { p.finish(t) })
	p.waitFor(t, "it has written its rules", func() error {
		_, err := k.try(t, "nft", "list", "chain", "ip", "kube-proxy", "services")
		return err
	})
}

// startDNS starts CoreDNS on the first node, and makes the service that kubelet names in pods.
func (c *kubeadmCluster) startDNS(t *testing.T, kubeconfig string) {
	t.Helper()
	m := c.first
	corefile := m.page.dir + "/Corefile"
	harness.Must(t, os.WriteFile(corefile, fmt.Appendf(nil, `.:%s {
	bind %s
	errors
	kubernetes cluster.local in-addr.arpa ip6.arpa {
		kubeconfig %s
		pods insecure
		ttl 5
	}
}
`, dnsPort, kubeletAddress, kubeconfig), 0o600))
	p := startProgram(t, "coredns", m.dir+"/coredns.log", kubernetesProgram(t, "coredns"), "-conf", corefile)
	t.Cleanup(func() { p.finish(t) })
	p.waitFor(t, "it accepts connections", func() error {
		conn, err := (&net.Dialer{}).DialContext(t.Context(), "tcp", net.JoinHostPort(kubeletAddress, dnsPort))
		if err == nil {
			err = conn.Close()
		}
		return err
	})
	manifest := m.page.dir + "/dns.yaml"
	harness.Must(t, os.WriteFile(manifest, fmt.Appendf(nil, `apiVersion: v1
kind: Service
metadata: {name: kube-dns, namespace: kube-system, labels: {k8s-app: kube-dns}}
spec:
  clusterIP: %[1]s
  ports: [{name: dns, port: %[3]s, protocol: UDP}, {name: dns-tcp, port: %[3]s, protocol: TCP}]
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: kube-dns, namespace: kube-system, labels: {kubernetes.io/service-name: kube-dns}}
addressType: IPv4
endpoints: [{addresses: [%[2]s]}]
ports: [{name: dns, port: %[3]s, protocol: UDP}, {name: dns-tcp, port: %[3]s, protocol: TCP}]
`, dnsService, kubeletAddress, dnsPort), 0o600))
	m.command(t, "kubectl", "create", "-f", manifest)
}

// --- images ---------------------------------------------------------------------

// pushTestImages pushes images under the names that the suite pulls. All have one layer of Debian's
// programs; the suite needs only some of them.
func pushTestImages(t *testing.T) {
	t.Helper()
	archive := os.Getenv(rootfsEnv)
	if archive == "" {
		t.Skipf("%s is not set: export %[1]s=$(integration/conformance/rootfs)", rootfsEnv)
	}
	base := harness.Get(fixture.NewLayer(harness.Get(os.ReadFile(archive))(t), fixture.Gzip))(t)
	// kubeadm's images have a pause that ends at once.
	pause := v1.Config{Entrypoint: []string{"/agnhost", "pause"}}
	program := func(name string) string { return string(harness.Get(os.ReadFile(kubernetesProgram(t, name)))(t)) }
	// One layer for all images: a user-mode kernel maps few pages into a process.
	agnhost := harness.PackLayer(t, append(registryFiles(t), fixture.File("agnhost", 0o755, program("agnhost")), fixture.Symlink("agnhost-2", "agnhost"),
		fixture.File("localhost.crt", 0o644, program("localhost.crt")), fixture.File("localhost.key", 0o644, program("localhost.key"))), fixture.Gzip)
	usesAgnhost := func(config v1.Config) bool { return slices.Contains(config.Entrypoint, "/agnhost") }
	entrypoint := func(name string) v1.Config { return v1.Config{Entrypoint: []string{"/" + name}} }
	for name, image := range map[string]struct {
		config v1.Config
		files  fixture.Tree
	}{
		"e2e-test-images/agnhost:2.66.1":   {v1.Config{Entrypoint: []string{"/agnhost"}, Cmd: []string{"pause"}}, nil},
		"pause:3.10.2":                     {pause, nil},
		"e2e-test-images/busybox:1.37.0-2": {v1.Config{Cmd: []string{"sh"}}, nil},
		"e2e-test-images/perl:5.26":        {v1.Config{Cmd: []string{"perl"}}, nil},
		"e2e-test-images/nginx:1.27.0-2":   {webServer, nginxFiles},
		"e2e-test-images/nginx:1.28.0-2":   {webServer, nginxFiles},
		"e2e-test-images/kitten:1.8":       {updateServer, serverFiles("kitten")},
		"e2e-test-images/nautilus:1.8":     {updateServer, serverFiles("nautilus")},
		"e2e-test-images/nonroot:1.5":      {v1.Config{Cmd: []string{"id", "-u"}, User: "1234"}, nil},
		"e2e-test-images/agnhost:2.55":     {v1.Config{Entrypoint: []string{"/agnhost"}, Cmd: []string{"pause"}}, nil},
		"e2e-test-images/nonewprivs:1.4":   {v1.Config{Cmd: []string{"nnp"}}, fixture.Tree{fixture.File("usr/local/bin/nnp", 0o4755, program("nonewprivs"))}},
		"e2e-test-images/regression-issue-74839:1.5": {
			entrypoint("regression-issue-74839"), fixture.Tree{fixture.File("regression-issue-74839", 0o755, program("regression-issue-74839"))}},
		"e2e-test-images/sample-apiserver:1.29.2": {
			entrypoint("sample-apiserver"), fixture.Tree{fixture.File("sample-apiserver", 0o755, program("sample-apiserver"))}},
		"etcd:3.7.0-0":                            {v1.Config{}, fixture.Tree{fixture.File("usr/local/bin/etcd", 0o755, program("etcd"))}},
		"e2e-test-images/ipc-utils:1.4":           {v1.Config{Cmd: []string{"sh"}}, nil},
		"e2e-test-images/glibc-dns-testing:2.1.1": {v1.Config{Cmd: []string{"sh"}}, nil},
	} {
		image.config.Env = []string{"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
		layers := []v1.Layer{base}
		if usesAgnhost(image.config) {
			layers = append(layers, agnhost)
		}
		if image.files != nil {
			layers = append(layers, harness.PackLayer(t, image.files, fixture.Gzip))
		}
		harness.Get(harness.Registry.Push(name, harness.Get(fixture.ImageOf(image.config, layers...))(t)))(t)
	}
}

// registryFiles are those of the image pause:testing that agnhost serves as a registry.
func registryFiles(t *testing.T) fixture.Tree {
	t.Helper()
	image := harness.Get(fixture.Image(v1.Config{Cmd: []string{"sleep", "100000"}}))(t)
	blob := func(kind string, digest v1.Hash, content []byte) fixture.Entry {
		return fixture.File(fmt.Sprintf("var/registry/pause/%s/sha256/%s/%s/data", kind, digest.Hex[:2], digest.Hex), 0o644, string(content))
	}
	manifest := harness.Get(image.Digest())(t)
	files := fixture.Tree{
		fixture.File("var/registry/pause/manifests/testing", 0o644, manifest.String()),
		blob("manifests", manifest, harness.Get(image.RawManifest())(t)),
		blob("blobs", harness.Get(image.ConfigName())(t), harness.Get(image.RawConfigFile())(t)),
	}
	for _, layer := range harness.Get(image.Layers())(t) {
		content := harness.Get(io.ReadAll(harness.Get(layer.Compressed())(t)))(t)
		files = append(files, blob("blobs", harness.Get(layer.Digest())(t), content))
	}
	return files
}

var (
	webServer  = v1.Config{Cmd: []string{"nginx", "-g", "daemon off;"}, ExposedPorts: map[string]struct{}{"80/tcp": {}}}
	nginxFiles = fixture.Tree{
		fixture.File("etc/nginx/nginx.conf", 0o644, `user www-data;
events { }
http {
	access_log /dev/stdout;
	error_log /dev/stderr;
	server { listen 80; root /var/www/html; }
}
`),
		fixture.File("var/www/html/index.html", 0o644, "<title>Welcome to nginx!</title>\n"),
	}
	updateServer = v1.Config{Entrypoint: []string{"/agnhost", "test-webserver"}, ExposedPorts: map[string]struct{}{"80/tcp": {}}}
)

// serverFiles are those of an image whose pods tell which image they run.
func serverFiles(name string) fixture.Tree {
	return fixture.Tree{
		fixture.File("etc/os-release", 0o644, `PRETTY_NAME="Alpine Linux"`+"\n"),
		fixture.File("data.json", 0o644, fmt.Sprintf(`{"image": %q}`+"\n", name+".jpg")),
	}
}

// --- specs ----------------------------------------------------------------------

// runSpecs runs e2e.test with options of ginkgo.
func (c *kubeadmCluster) runSpecs(t *testing.T, options ...string) map[string][]string {
	t.Helper()
	output := c.first.dir + "/e2e.log"
	args := slices.Concat([]string{"env", c.first.path(), kubernetesProgram(t, "ginkgo")}, ginkgoReport(c.first.page.dir), options,
		[]string{kubernetesProgram(t, "e2e.test"), "--", "--kubeconfig=/etc/kubernetes/admin.conf", "--disable-log-dump", "--num-nodes=2"})
	p := startProgram(t, "e2e.test", output, args...)
	t.Cleanup(func() { p.finish(t) })
	<-p.exited
	return specResults(t, p, c.first.page.dir)
}

// ginkgoReport returns options of ginkgo that write the report of a run to a directory.
func ginkgoReport(dir string) []string {
	return []string{"--no-color", "--junit-report=report.xml", "--output-dir=" + dir}
}

// specResults returns the names of specs by their result: passed, failed or skipped. It fails the
// test for each failed spec.
func specResults(t *testing.T, p *program, dir string) map[string][]string {
	t.Helper()
	keepOutput(t, p.logFile)
	keepOutput(t, dir+"/report.xml")
	results := readReport(t, dir+"/report.xml")
	for _, spec := range results["failed"] {
		t.Error(spec)
	}
	t.Logf("%d passed, %d failed, %d not selected in %v", len(results["passed"]), len(results["failed"]), len(results["skipped"]), p.cmd.ProcessState.UserTime().Round(time.Second))
	if len(results["passed"])+len(results["failed"]) == 0 {
		t.Error("no spec was selected")
	}
	if !p.cmd.ProcessState.Success() {
		t.Errorf("the suite ended with %v\n%s", p.cmd.ProcessState, p.tail())
	}
	return results
}

// keepOutput copies the suite's output to the directory in BERTH_CONFORMANCE_LOGS.
func keepOutput(t *testing.T, file string) {
	t.Helper()
	if dir := os.Getenv(conformanceEnv + "_LOGS"); dir != "" {
		out, err := exec.CommandContext(t.Context(), "cp", "--backup=numbered", file, dir).CombinedOutput()
		if err != nil {
			t.Errorf("keep the output: %v: %s", err, out)
		}
	}
}

// readReport reads a JUnit report. Nodes of ginkgo that are no specs, such as BeforeSuite, count
// only if they fail.
func readReport(t *testing.T, file string) map[string][]string {
	t.Helper()
	var report struct {
		Cases []struct {
			Name    string `xml:"name,attr"`
			Status  string `xml:"status,attr"`
			Failure string `xml:"failure"`
		} `xml:"testsuite>testcase"`
	}
	harness.Must(t, xml.Unmarshal(harness.Get(os.ReadFile(file))(t), &report))
	results := map[string][]string{}
	for _, spec := range report.Cases {
		switch {
		case spec.Status == "skipped" || spec.Status == "pending":
			results["skipped"] = append(results["skipped"], spec.Name)
		case spec.Status != "passed":
			results["failed"] = append(results["failed"], spec.Name+": "+spec.Status+": "+spec.Failure)
		case strings.HasPrefix(spec.Name, "[It] "):
			results["passed"] = append(results["passed"], spec.Name)
		}
	}
	return results
}
