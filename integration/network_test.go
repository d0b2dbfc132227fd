package integration

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/integration/fixture"
	"berth/integration/harness"
	"berth/integration/machine"
)

func networkReady(t *testing.T, d *harness.Daemon) *runtimeapi.RuntimeCondition {
	t.Helper()
	status := harness.Get(d.Cri.Status(t.Context(), false))(t)
	for _, c := range status.Status.Conditions {
		if c.Type == runtimeapi.NetworkReady {
			return c
		}
	}
	t.Fatalf("the condition NetworkReady is missing: %v", status)
	return nil
}

func waitNetworkReady(t *testing.T, d *harness.Daemon, want bool) *runtimeapi.RuntimeCondition {
	t.Helper()
	var condition *runtimeapi.RuntimeCondition
	harness.EventuallyGot(t, fmt.Sprintf("NetworkReady is %v", want), func() (bool, any) {
		condition = networkReady(t, d)
		return condition.Status == want, condition
	})
	return condition
}

func TestPodNetwork(t *testing.T) {
	d := harness.StartDaemon(t)
	pod := d.RunPod(t)
	ip := harness.Get(netip.ParseAddr(pod.Ip(t)))(t)
	if !netip.MustParsePrefix("10.88.0.0/24").Contains(ip) {
		t.Errorf("the pod's address is %s", ip)
	}
	c := pod.Run(t)
	if out := c.Exec(t, "ip", "-o", "addr"); !strings.Contains(out, "eth0") || !strings.Contains(out, ip.String()) || !strings.Contains(out, "127.0.0.1/8") {
		t.Errorf("addresses in the pod:\n%s", out)
	}
	harness.WantText(t, "state of lo", c.Exec(t, "ip", "link", "show", "lo"), ",UP")
}

func TestPodDualStack(t *testing.T) {
	t.Cleanup(func() { harness.Must(t, os.RemoveAll("/run/dual-stack")) }) // after the daemon's cleanup
	d := harness.StartDaemon(t, harness.WithNetwork(fixture.Conflist("dual", "/run/dual-stack", fixture.Range4, fixture.Range6)))
	network := d.RunPod(t).Status(t).Network
	if ip, err := netip.ParseAddr(network.Ip); err != nil || !ip.Is4() {
		t.Errorf("the first address is %q", network.Ip)
	}
	if len(network.AdditionalIps) != 1 || !strings.HasPrefix(network.AdditionalIps[0].Ip, "fd88::") {
		t.Errorf("further addresses are %v, want one of fd88::/64", network.AdditionalIps)
	}
}

// serveHTTP runs a container that serves a page on port 80.
func serveHTTP(t *testing.T, pod *harness.Pod, page string) *harness.Container {
	t.Helper()
	c := pod.Run(t, harness.Script("mkdir -p /srv && echo "+page+" >/srv/index.html && exec httpd -f -p 80 -h /srv"))
	harness.Eventually(t, "the server listens", func() error {
		_, _, err := pod.D.Cri.ExecSync(t.Context(), c.Id, []string{"wget", "-q", "-O-", "http://127.0.0.1/"}, 0)
		return err
	})
	return c
}

func httpGet(t *testing.T, url string) string {
	t.Helper()
	client := http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	response := harness.Get(client.Get(url))(t)
	defer response.Body.Close()
	body := harness.Get(io.ReadAll(response.Body))(t)
	return string(body)
}

func TestHTTPBetweenPodsAndThroughHostPort(t *testing.T) {
	d := harness.StartDaemon(t)
	server := d.RunPod(t, harness.HostPort(18080, 80, runtimeapi.Protocol_TCP))
	serveHTTP(t, server, "from-the-pod")
	client := d.RunPod(t).Run(t)
	harness.Equal(t, "page seen by another pod", client.Exec(t, "wget", "-q", "-O-", "http://"+server.Ip(t)+"/"), "from-the-pod")
	harness.Equal(t, "page seen by the node", httpGet(t, "http://"+server.Ip(t)+"/"), "from-the-pod\n")
	harness.Equal(t, "page through the host port", httpGet(t, "http://"+nodeAddress(t)+":18080/"), "from-the-pod\n")
	harness.Equal(t, "page through the host port on loopback", httpGet(t, "http://127.0.0.1:18080/"), "from-the-pod\n")
	harness.Equal(t, "page through the host port, from another pod", client.Exec(t, "wget", "-q", "-O-", "http://"+nodeAddress(t)+":18080/"), "from-the-pod")

	server.Remove(t)
	if _, err := net.Dial("tcp", nodeAddress(t)+":18080"); err == nil {
		t.Error("the host port is still open after the pod's removal")
	}
}

// nodeAddress returns the bridge's address, which is the machine's only address besides loopback.
func nodeAddress(t *testing.T) string {
	t.Helper()
	link := harness.Get(net.InterfaceByName("berth0"))(t)
	addresses, err := link.Addrs()
	harness.Must(t, err)
	for _, a := range addresses {
		if prefix, err := netip.ParsePrefix(a.String()); err == nil && prefix.Addr().Is4() {
			return prefix.Addr().String()
		}
	}
	t.Fatalf("the bridge has no address: %v", addresses)
	return ""
}

// NetworkReady follows the configuration directory without a restart.
func TestNetworkConfigHotPlug(t *testing.T) {
	d := harness.StartDaemon(t, harness.WithNetwork(""))
	condition := waitNetworkReady(t, d, false)
	if condition.Reason == "" || !strings.Contains(condition.Message, d.ConfDir) {
		t.Errorf("the condition does not name the missing configuration and its directory: %v", condition)
	}
	config := d.PodConfig(t)
	_, err := d.Cri.RunPodSandbox(t.Context(), config, "")
	if err == nil {
		t.Fatal("a pod runs without a network configuration")
	}
	if code := harness.CodeOf(err); code != codes.Unavailable && code != codes.FailedPrecondition {
		t.Errorf("gRPC code is %s: %v", code, err)
	}
	d.RunPod(t, harness.HostNetwork).Remove(t) // needs no network configuration

	harness.WithNetwork(fixture.Conflist("test", d.DataDir, fixture.Range4))(t, d)
	waitNetworkReady(t, d, true)
	pod := d.RunPodConfig(t, config) // the same identity, after the failure
	if pod.Ip(t) == "" {
		t.Error("the pod has no address")
	}

	// The daemon names the broken file that is first in order. It removes an old pod with the
	// configuration that the pod was created with.
	harness.WithNetwork("")(t, d)
	broken := filepath.Join(d.ConfDir, "05-broken.conflist")
	harness.Must(t, os.WriteFile(broken, []byte("{not json"), 0o600))
	harness.Eventually(t, "the broken file is named", func() error {
		if c := networkReady(t, d); c.Status || !strings.Contains(c.Message, "05-broken.conflist") {
			return harness.Unexpected("NetworkReady", c, "false, naming 05-broken.conflist")
		}
		return nil
	})
	pod.Remove(t)
	harness.Must(t, os.Remove(broken))
}

// The first valid file in lexical order is used. A plain .conf file works, too.
func TestNetworkConfigOrder(t *testing.T) {
	d := harness.StartDaemon(t)
	t.Cleanup(func() { harness.RemoveLink(t, "berth1") })
	conf := fmt.Sprintf(`{"cniVersion": "0.4.0", "name": "first", "type": "bridge", "bridge": "berth1", "isGateway": true,
		"ipam": {"type": "host-local", "dataDir": %q, "ranges": [[{"subnet": "10.99.0.0/24"}]]}}`, d.DataDir)
	harness.Must(t, os.WriteFile(filepath.Join(d.ConfDir, "05-first.conf"), []byte(conf), 0o600))
	harness.Eventually(t, "a pod gets an address of the first network", func() error {
		pod := d.RunPod(t)
		defer pod.Remove(t)
		if ip := pod.Ip(t); !strings.HasPrefix(ip, "10.99.0.") {
			return harness.Unexpected("the address", ip, "one of 10.99.0.0/24")
		}
		return nil
	})
}

// fakePlugin is a CNI plugin that records its calls.
type fakePlugin struct {
	t   *testing.T
	dir string
}

// newFakePlugin installs the plugin as NAME next to the distribution's. script runs for ADD, after
// the call was recorded.
func newFakePlugin(t *testing.T, name, script string) *fakePlugin {
	t.Helper()
	p := &fakePlugin{t: t, dir: t.TempDir()}
	harness.Must(t, os.WriteFile(filepath.Join(p.dir, name), []byte(fmt.Sprintf(`#!/bin/bash
stdin=$(cat)
if [ "$CNI_COMMAND" = VERSION ]; then
	echo '{"cniVersion": "1.0.0", "supportedVersions": ["0.4.0", "1.0.0", "1.1.0"]}'
	exit
fi
printf '%%s\t%%s\t%%s\t%%s\t%%s\n' "$CNI_COMMAND" "$CNI_CONTAINERID" "$CNI_NETNS" "$CNI_ARGS" "$(echo "$stdin" | tr -d '\n\t')" >>%[1]s/calls
if [ "$CNI_COMMAND" = STATUS ] && [ -e %[1]s/broken ]; then
	echo '{"cniVersion": "1.1.0", "code": 50, "msg": "out of order"}'
	exit 1
fi
if [ "$CNI_COMMAND" = ADD ]; then
%[2]s
fi
`, p.dir, script)), 0o700))
	return p
}

type call struct{ command, id, netns, args, config string }

func (p *fakePlugin) calls(command string) []call {
	var out []call
	for _, line := range machine.ReadLines(filepath.Join(p.dir, "calls")) {
		f := strings.SplitN(line, "\t", 5)
		if len(f) == 5 && f[0] == command {
			out = append(out, call{f[0], f[1], f[2], f[3], f[4]})
		}
	}
	return out
}

// withBinDir makes the daemon look for plugins in dir first.
func withBinDir(dir string) harness.DaemonOption {
	return func(_ *testing.T, d *harness.Daemon) { d.BinDirs = append([]string{dir}, d.BinDirs...) }
}

const fakeResult = `echo '{"cniVersion": "1.0.0", "interfaces": [], "ips": [{"address": "10.77.0.5/24"}], "dns": {}}'`

func TestPluginArgumentsAndCapabilities(t *testing.T) {
	plugin := newFakePlugin(t, "fake", fakeResult)
	d := harness.StartDaemon(t, withBinDir(plugin.dir), harness.WithNetwork(`{"cniVersion": "1.0.0", "name": "fake", "plugins": [{"type": "fake",
		"capabilities": {"portMappings": true, "bandwidth": true, "dns": true, "ipRanges": true}}]}`))
	harness.Must(t, d.Cri.UpdateRuntimeConfig(t.Context(), &runtimeapi.RuntimeConfig{NetworkConfig: &runtimeapi.NetworkConfig{PodCidr: "10.77.0.0/24"}}))
	pod := d.RunPod(t, harness.HostPort(18081, 80, runtimeapi.Protocol_UDP), func(c *runtimeapi.PodSandboxConfig) {
		c.Annotations["kubernetes.io/ingress-bandwidth"] = "1M"
		c.DnsConfig = &runtimeapi.DNSConfig{Servers: []string{"10.0.0.10"}, Searches: []string{"cluster.local"}}
	})
	harness.Equal(t, "pod IP", pod.Ip(t), "10.77.0.5")
	pod.Remove(t)
	adds, dels := plugin.calls("ADD"), plugin.calls("DEL")
	if len(adds) != 1 || len(dels) == 0 {
		t.Fatalf("ADD was called %d times and DEL %d times", len(adds), len(dels))
	}
	add := adds[0]
	harness.Equal(t, "container ID", add.id, pod.Id)
	harness.WantText(t, "network namespace", add.netns, pod.Id)
	meta := pod.Config.Metadata
	harness.WantText(t, "CNI_ARGS", add.args, "K8S_POD_NAMESPACE="+meta.Namespace, "K8S_POD_NAME="+meta.Name, "K8S_POD_INFRA_CONTAINER_ID="+pod.Id, "K8S_POD_UID="+meta.Uid)
	var config struct {
		RuntimeConfig struct {
			PortMappings []struct {
				HostPort, ContainerPort int
				Protocol                string
			}
			Bandwidth struct{ IngressRate int }
			DNS       struct{ Servers, Searches []string }
			IPRanges  [][]struct{ Subnet string }
		}
	}
	harness.Must(t, json.Unmarshal([]byte(add.config), &config))
	harness.Equal(t, "runtimeConfig", fmt.Sprintf("%+v", config.RuntimeConfig),
		"{PortMappings:[{HostPort:18081 ContainerPort:80 Protocol:udp}] Bandwidth:{IngressRate:1000000} DNS:{Servers:[10.0.0.10] Searches:[cluster.local]} IPRanges:[[{Subnet:10.77.0.0/24}]]}")
}

// DEL gets ADD's configuration, even if the file has changed since.
func TestDelUsesConfigurationOfAdd(t *testing.T) {
	plugin := newFakePlugin(t, "fake", fakeResult)
	conflist := `{"cniVersion": "1.0.0", "name": "fake", "plugins": [{"type": "fake", "mark": "%s"}]}`
	d := harness.StartDaemon(t, withBinDir(plugin.dir), harness.WithNetwork(fmt.Sprintf(conflist, "old")))
	pod := d.RunPod(t)
	harness.WithNetwork(fmt.Sprintf(conflist, "new"))(t, d)
	d.Restart(t)
	pod.Remove(t)
	for _, del := range plugin.calls("DEL") {
		if del.id == pod.Id && !strings.Contains(del.config, "old") {
			t.Errorf("DEL got the configuration %s", del.config)
		}
	}
	if len(plugin.calls("DEL")) == 0 {
		t.Error("DEL was not called")
	}
}

// After a failed ADD the plugins get a DEL, and nothing of the pod is left. An ADD without an
// address has failed, too.
func TestPluginFailure(t *testing.T) {
	t.Run("error", func(t *testing.T) {
		pluginFails(t, `echo '{"cniVersion": "1.0.0", "code": 100, "msg": "no room in the inn"}'; exit 1`,
			codes.Internal, "no room in the inn", "failing")
	})
	t.Run("no address", func(t *testing.T) {
		pluginFails(t, `echo '{"cniVersion": "1.0.0"}'`, codes.FailedPrecondition, `CNI ADD of network "test" returned no address`)
	})
}

func pluginFails(t *testing.T, script string, code codes.Code, texts ...string) {
	plugin := newFakePlugin(t, "failing", script)
	d := harness.StartDaemon(t, withBinDir(plugin.dir), func(t *testing.T, d *harness.Daemon) {
		// The failing plugin is last, so that the bridge and an address exist when it fails.
		var list struct {
			CNIVersion string `json:"cniVersion"`
			Name       string `json:"name"`
			Plugins    []any  `json:"plugins"`
		}
		harness.Must(t, json.Unmarshal([]byte(fixture.Conflist("test", d.DataDir, fixture.Range4)), &list))
		list.Plugins = append(list.Plugins, map[string]string{"type": "failing"})
		var b bytes.Buffer
		harness.Must(t, json.NewEncoder(&b).Encode(list))
		harness.WithNetwork(b.String())(t, d)
	})
	_, err := d.Cri.RunPodSandbox(t.Context(), d.PodConfig(t), "")
	harness.WantCode(t, err, code, texts...)
	if len(plugin.calls("DEL")) == 0 {
		t.Error("DEL was not called")
	}
	harness.Equal(t, "number of pods", len(harness.Get(d.Cri.ListPodSandbox(t.Context(), nil))(t)), 0)
}

// With networks of specification 1.1, STATUS decides whether the network is ready. At the daemon's
// start GC passes the existing pods to the plugins.
func TestPluginStatusAndGC(t *testing.T) {
	plugin := newFakePlugin(t, "fake", strings.Replace(fakeResult, "1.0.0", "1.1.0", 1))
	network := `{"cniVersion": "1.1.0", "name": "fake", "plugins": [{"type": "fake"}]}`
	d := harness.StartDaemon(t, withBinDir(plugin.dir), harness.WithNetwork(network))
	waitNetworkReady(t, d, true)
	pod := d.RunPod(t)
	gone := len(plugin.calls("GC"))
	d.Restart(t)
	harness.Eventually(t, "GC is called", func() error {
		calls := plugin.calls("GC")
		if len(calls) <= gone {
			return harness.Unexpected("number of GC calls", len(calls), gone+1)
		}
		if last := calls[len(calls)-1]; !strings.Contains(last.config, pod.Id) {
			return fmt.Errorf("GC does not list the pod as valid: %s", last.config)
		}
		return nil
	})
	plugin.breakStatus(t)
	harness.WithNetwork(network+" ")(t, d) // a change makes berth check again at once
	harness.Eventually(t, "the condition contains the plugin's message", func() error {
		if c := networkReady(t, d); c.Status || !strings.Contains(c.Message, "out of order") {
			return harness.Unexpected("NetworkReady", c, "false, with the plugin's message")
		}
		return nil
	})
}

// Pods start in parallel, each with a different address.
func TestManyPodsAtOnce(t *testing.T) {
	d := harness.StartDaemon(t)
	d.Pull(t, harness.BaseImage)
	const n = 12
	pods := make([]*harness.Pod, n)
	configs := make([]*runtimeapi.PodSandboxConfig, n)
	errs := make(chan error, n)
	for i := range n {
		configs[i] = d.PodConfig(t)
		go func() {
			id, err := d.Cri.RunPodSandbox(t.Context(), configs[i], "")
			pods[i] = &harness.Pod{D: d, Id: id, Config: configs[i]}
			errs <- err
		}()
	}
	for range n {
		harness.Must(t, <-errs)
	}
	ips := map[string]bool{}
	for _, p := range pods {
		d.Objects = append(d.Objects, p.Id)
		ips[p.Ip(t)] = true
		p.Run(t)
	}
	harness.Equal(t, "number of different addresses", len(ips), n)
}

// release creates the file "go", for which the plugin waits.
func (p *fakePlugin) release(t *testing.T) {
	t.Helper()
	harness.Must(t, os.WriteFile(filepath.Join(p.dir, "go"), nil, 0o600))
}

// breakStatus makes the plugin's STATUS fail.
func (p *fakePlugin) breakStatus(t *testing.T) {
	t.Helper()
	harness.Must(t, os.WriteFile(filepath.Join(p.dir, "broken"), nil, 0o600))
}
