package integration

import (
	"bytes"
	"encoding/json"
	"net"
	"net/http"
	"net/netip"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/nftables"
	"github.com/vishvananda/netlink"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/integration/harness"
	"berth/integration/machine"
	"berth/internal/netns"
)

// addressesOf returns the pod's IPv4 and IPv6 addresses.
func addressesOf(t *testing.T, pod *harness.Pod) (ip4, ip6 netip.Addr) {
	t.Helper()
	network := pod.Status(t).Network
	all := []string{network.Ip}
	for _, more := range network.AdditionalIps {
		all = append(all, more.Ip)
	}
	for _, text := range all {
		ip := harness.Get(netip.ParseAddr(text))(t)
		if ip.Is4() {
			ip4 = ip
		} else {
			ip6 = ip
		}
	}
	return ip4, ip6
}

func isIn(t *testing.T, what string, ip netip.Addr, subnet string) {
	t.Helper()
	if !netip.MustParsePrefix(subnet).Contains(ip) {
		t.Errorf("%s is %s, not in %s", what, ip, subnet)
	}
}

// With the built-in network, pods have addresses and host ports and reach each other. The network
// needs neither plugins nor configuration.
func TestBuiltInNetwork(t *testing.T) {
	d := harness.StartDaemon(t, harness.WithBuiltInNetwork())
	waitNetworkReady(t, d, true)
	server := d.RunPod(t, harness.HostPort(18080, 80, runtimeapi.Protocol_TCP))
	serveHTTP(t, server, "from-the-pod")
	ip4, ip6 := addressesOf(t, server)
	isIn(t, "the pod's address", ip4, "10.83.0.0/16")
	isIn(t, "the pod's IPv6 address", ip6, "fdb6:83e7:2d10::/64")
	client := d.RunPod(t).Run(t)
	for what, host := range map[string]string{"by IPv4": ip4.String(), "by IPv6": "[" + ip6.String() + "]", "by the host port": nodeAddress(t) + ":18080"} {
		harness.Equal(t, "page seen by another pod "+what, client.Exec(t, "wget", "-q", "-O-", "http://"+host+"/"), "from-the-pod")
		harness.Equal(t, "page seen by the node "+what, httpGet(t, "http://"+host+"/"), "from-the-pod\n")
	}
	harness.Equal(t, "page through the host port on loopback", httpGet(t, "http://127.0.0.1:18080/"), "from-the-pod\n")
	d.StateMatches(t)

	again := d.PodConfig(t, harness.HostPort(18080, 80, runtimeapi.Protocol_TCP))
	if id, err := d.Cri.RunPodSandbox(t.Context(), again, ""); err == nil || !strings.Contains(err.Error(), ip4.String()) {
		t.Errorf("a second pod has the same host port: %s, %v", id, err)
	}
	server.Remove(t)
	if _, err := net.Dial("tcp", nodeAddress(t)+":18080"); err == nil {
		t.Error("the host port is still open after the pod's removal")
	}
	pod := d.RunPodConfig(t, again)
	if next, _ := addressesOf(t, pod); next == ip4 {
		t.Errorf("the next pod has the same address %s", next)
	}
}

// An obstacle makes the network not ready, with the reason, until the obstacle is removed.
func TestBuiltInNetworkNotReady(t *testing.T) {
	harness.Must(t, netlink.LinkAdd(&netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: "berth0"}}))
	bridge, err := netlink.LinkByName("berth0")
	harness.Must(t, err)
	harness.Must(t, netlink.LinkSetAlias(bridge, "mine"))
	d := harness.StartDaemon(t, harness.WithBuiltInNetwork())
	const why = `berth0 has the alias "mine"`
	says := func(why string) {
		t.Helper()
		harness.Eventually(t, "the condition says "+why, func() error {
			if c := networkReady(t, d); c.Status || c.Reason != "NetworkPluginNotReady" || !strings.Contains(c.Message, why) {
				return harness.Unexpected("NetworkReady", c, why)
			}
			return nil
		})
	}
	says(why)
	config := d.PodConfig(t)
	if _, err := d.Cri.RunPodSandbox(t.Context(), config, ""); err == nil || !strings.Contains(err.Error(), why) {
		t.Errorf("RunPodSandbox: %v", err)
	}
	harness.RemoveLink(t, "berth0")
	waitNetworkReady(t, d, true)
	d.RunPodConfig(t, config).Remove(t)

	// A pod CIDR overrides the subnets in the options.
	setCIDR := func(cidr string) {
		harness.Must(t, d.Cri.UpdateRuntimeConfig(t.Context(), &runtimeapi.RuntimeConfig{NetworkConfig: &runtimeapi.NetworkConfig{PodCidr: cidr}}))
	}
	harness.Must(t, netlink.LinkAdd(&netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: "other0"}}))
	t.Cleanup(func() { harness.RemoveLink(t, "other0") })
	other := harness.Get(netlink.LinkByName("other0"))(t)
	address := harness.Get(netlink.ParseAddr("192.0.2.1/24"))(t)
	harness.Must(t, netlink.AddrAdd(other, address))
	setCIDR("192.0.2.0/24")
	says("192.0.2.1/24 of interface other0")
	setCIDR("10.200.3.0/24")
	waitNetworkReady(t, d, true)
}

// Pods keep addresses and host ports while the daemon is restarted or killed. The next daemon
// assigns their addresses to no other pod.
func TestBuiltInNetworkSurvivesDaemonRestart(t *testing.T) {
	d := harness.StartDaemon(t, harness.WithBuiltInNetwork())
	pod := d.RunPod(t, harness.HostPort(18080, 80, runtimeapi.Protocol_TCP))
	serveHTTP(t, pod, "still-there")
	ip4, ip6 := addressesOf(t, pod)
	for what, restart := range map[string]func(){
		"stopped": func() { d.Restart(t) },
		"killed":  func() { d.Kill(t); d.Start(t) },
	} {
		restart()
		harness.Equal(t, "page after the daemon was "+what, httpGet(t, "http://127.0.0.1:18080/"), "still-there\n")
		new4, new6 := addressesOf(t, d.RunPod(t))
		if new4 == ip4 || new6 == ip6 {
			t.Errorf("after the daemon was %s, %s and %s are assigned twice", what, ip4, ip6)
		}
		d.StateMatches(t)
	}
}

// A flush of all packet filter rules, as by a reload of nftables.service, closes host ports only
// until kubelet asks for the status.
func TestBuiltInNetworkOutlivesFlush(t *testing.T) {
	d := harness.StartDaemon(t, harness.WithBuiltInNetwork())
	pod := d.RunPod(t, harness.HostPort(18080, 80, runtimeapi.Protocol_TCP))
	serveHTTP(t, pod, "still-there")
	harness.Equal(t, "page", httpGet(t, "http://127.0.0.1:18080/"), "still-there\n")
	conn, err := nftables.New()
	harness.Must(t, err)
	conn.FlushRuleset()
	harness.Must(t, conn.Flush())
	client := http.Client{Timeout: time.Second, Transport: &http.Transport{DisableKeepAlives: true}} // each request needs a new connection
	harness.Eventually(t, "the host port is open again", func() error {
		harness.Get(d.Cri.Status(t.Context(), false))(t)
		answer, err := client.Get("http://127.0.0.1:18080/")
		if err != nil {
			return err
		}
		return answer.Body.Close()
	})
	d.StateMatches(t)
}

// After a reboot only the network's files are left. The daemon releases the addresses in them.
func TestBuiltInNetworkAfterReboot(t *testing.T) {
	d := harness.StartDaemon(t, harness.WithBuiltInNetwork())
	before := d.RunPod(t, harness.HostPort(18080, 80, runtimeapi.Protocol_TCP))
	d.LosePower(t)
	d.Boot(t)
	harness.Equal(t, "state after the reboot", before.Status(t).State, runtimeapi.PodSandboxState_SANDBOX_NOTREADY)
	kept := func() []string { return recordedAddresses(d) }
	harness.EventuallyGot(t, "the address is released", func() (bool, any) { all := kept(); return len(all) == 0, all })
	pod := d.RunPod(t, harness.HostPort(18080, 80, runtimeapi.Protocol_TCP))
	serveHTTP(t, pod, "after-the-reboot")
	harness.Equal(t, "page after the reboot", httpGet(t, "http://127.0.0.1:18080/"), "after-the-reboot\n")
	pod.Remove(t) // the state check at the test's end would see two boot IDs
}

// recordedAddresses returns the names of the address files of the built-in network.
func recordedAddresses(d *harness.Daemon) (all []string) {
	for _, name := range machine.ReadDir(filepath.Join(d.Root, "network/berth-net")) {
		if strings.Contains(name, "@") {
			all = append(all, name)
		}
	}
	return all
}

// The plugin program and the daemon share a network. A starting daemon releases attachments that
// the plugin program made.
func TestBuiltInNetworkCollectsGarbage(t *testing.T) {
	d := harness.StartDaemon(t, harness.WithBuiltInNetwork())
	pod := d.RunPod(t, harness.HostPort(18080, 80, runtimeapi.Protocol_TCP))
	const orphan = "/run/netns/orphan"
	harness.Must(t, netns.New(orphan))
	t.Cleanup(func() { harness.Must(t, netns.Remove(orphan)) })

	config, err := json.Marshal(map[string]any{"cniVersion": "1.1.0", "name": "berth-net", "type": "berth-net", "subnets": []string{"10.83.0.0/16", "fdb6:83e7:2d10::/64"},
		"dataDir": filepath.Join(d.Root, "network"), "runtimeConfig": map[string]any{"portMappings": []map[string]any{{"hostPort": 18081, "containerPort": 80}}}})
	harness.Must(t, err)
	cmd := exec.Command(filepath.Join(harness.BinDir, "berth-net"))
	cmd.Env = []string{"CNI_COMMAND=ADD", "CNI_CONTAINERID=orphan", "CNI_NETNS=" + orphan, "CNI_IFNAME=eth0", "CNI_PATH=/nowhere"}
	cmd.Stdin = bytes.NewReader(config)
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	harness.Equal(t, "addresses kept", len(recordedAddresses(d)), 2)
	if found := d.StateCheck(t); len(found) < 3 {
		t.Errorf("check --state does not name address, port of the bridge and host port of the orphan: %v", found)
	}
	d.Restart(t)
	harness.Equal(t, "addresses kept after GC", len(recordedAddresses(d)), 1)
	ip4, _ := addressesOf(t, pod)
	harness.Equal(t, "the pod's address is kept", strings.HasPrefix(recordedAddresses(d)[0], ip4.String()+","), true)
}

// New pods get addresses from the node's pod CIDR, which kubelet sends. Older pods keep their
// addresses, and all pods reach each other.
func TestBuiltInNetworkFollowsPodCIDR(t *testing.T) {
	d := harness.StartDaemon(t, harness.WithBuiltInNetwork())
	old := d.RunPod(t)
	serveHTTP(t, old, "old")
	setCIDR := func(cidr string) {
		harness.Must(t, d.Cri.UpdateRuntimeConfig(t.Context(), &runtimeapi.RuntimeConfig{NetworkConfig: &runtimeapi.NetworkConfig{PodCidr: cidr}}))
	}
	setCIDR("10.200.3.0/24,fd77::/64")
	check := func(when string) {
		pod := d.RunPod(t, harness.HostPort(18080, 80, runtimeapi.Protocol_TCP))
		ip4, ip6 := addressesOf(t, pod)
		isIn(t, "the address of a new pod "+when, ip4, "10.200.3.0/24")
		isIn(t, "the IPv6 address of a new pod "+when, ip6, "fd77::/64")
		serveHTTP(t, pod, "new")
		c := pod.Run(t)
		old4, old6 := addressesOf(t, old)
		harness.Equal(t, "old page seen by a new pod "+when, c.Exec(t, "wget", "-q", "-O-", "http://"+old4.String()+"/"), "old")
		harness.Equal(t, "old page seen by a new pod by IPv6 "+when, c.Exec(t, "wget", "-q", "-O-", "http://["+old6.String()+"]/"), "old")
		harness.Equal(t, "new page by the host port "+when, httpGet(t, "http://127.0.0.1:18080/"), "new\n")
		d.StateMatches(t)
		pod.Remove(t)
	}
	check("with a pod CIDR")
	d.Restart(t)
	check("after a restart")
}
