package conf

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/containernetworking/cni/pkg/types"

	"berth/internal/testutil"
)

func parse(body string) (*Net, error) {
	return Parse([]byte(`{"cniVersion": "1.1.0", "name": "n", "type": "berth-net"` + body + `}`))
}

func TestDefaults(t *testing.T) {
	t.Parallel()
	n, err := parse(`, "subnets": ["10.85.1.7/16", "fd00:85::/64"]`)
	testutil.Must(t, err)
	got := strings.TrimSpace(fmt.Sprintln(n.Bridge, n.MTU, n.Masquerades(), n.Hairpins(), n.Dir(), n.Ranges, n.Ports))
	want := `berth0 0 true true /var/lib/cni/berth-net/n [{10.85.0.0/16 10.85.0.1 10.85.255.254 10.85.0.1} {fd00:85::/64 fd00:85::1 fd00:85::ffff:ffff:ffff:ffff fd00:85::1}] []`
	if got != want {
		t.Errorf("defaults are\n%s\nwant\n%s", got, want)
	}
}

// The runtime's ranges replace the configured ones.
func TestRuntimeRangesReplaceSubnets(t *testing.T) {
	t.Parallel()
	n, err := parse(`, "subnets": ["10.85.0.0/16"], "masquerade": false, "hairpin": false, "runtimeConfig": {
		"ipRanges": [[{"subnet": "10.1.2.0/24", "rangeStart": "10.1.2.10", "rangeEnd": "10.1.2.20", "gateway": "10.1.2.254"}]],
		"portMappings": [{"hostPort": 80, "containerPort": 8080, "protocol": "TCP", "hostIP": "::ffff:192.0.2.1"}, {"hostPort": 0, "containerPort": 1}, {"hostPort": 9, "containerPort": 9, "hostIP": "::1"}, {"hostPort": 53, "containerPort": 53, "protocol": "udp"}]}`)
	testutil.Must(t, err)
	if got := fmt.Sprint(n.Ranges); got != "[{10.1.2.0/24 10.1.2.10 10.1.2.20 10.1.2.254}]" {
		t.Errorf("ranges are %s", got)
	}
	if got := fmt.Sprint(n.Ports); got != "[{6 192.0.2.1 80 8080} {17 invalid IP 53 53}]" {
		t.Errorf("ports are %s", got)
	}
	if n.Masquerades() || n.Hairpins() {
		t.Errorf("options are %+v", n)
	}
}

// The key depends on the name and the directory, so two daemons have different networks.
func TestKeyDependsOnDirectory(t *testing.T) {
	t.Parallel()
	keys := map[string]bool{}
	for _, body := range []string{``, `, "dataDir": "/a"`, `, "dataDir": "/a", "name": "m"`} {
		t.Run(body, func(t *testing.T) {
			n, err := parse(body)
			testutil.Must(t, err)
			same, err := ParseNames([]byte(`{"name": "n"` + body + `}`))
			if err != nil || same.Key() != n.Key() {
				t.Errorf("DEL finds %s, ADD %s; %v", same.Key(), n.Key(), err)
			}
			keys[n.Key()] = true
		})
	}
	if len(keys) != 3 {
		t.Errorf("keys are %v", keys)
	}
}

func TestGC(t *testing.T) {
	t.Parallel()
	const a, b = `{"containerID": "a", "ifname": "eth0"}`, `{"containerID": "b", "ifname": "eth0"}`
	for body, want := range map[string]int{
		``:                                     -1,
		`, "cni.dev/valid-attachments": "x"`:   -1,
		`, "cni.dev/valid-attachments": null`:  0,
		`, "cni.dev/valid-attachments": []`:    0,
		`, "cni.dev/attachments": [` + a + `]`: 1,
		`, "cni.dev/valid-attachments": [` + a + `], "cni.dev/attachments": [` + b + `]`: 2,
	} {
		t.Run(body, func(t *testing.T) {
			n, err := ParseGC([]byte(`{"name": "n"` + body + `}`))
			if want < 0 && err == nil || want >= 0 && (err != nil || len(n.Valid) != want) {
				t.Errorf("%s: %+v, %v", body, n, err)
			}
		})
	}
}

func TestInvalidConfigurationIsRefused(t *testing.T) {
	t.Parallel()
	mapping := func(m string) string { return `, "runtimeConfig": {"portMappings": [` + m + `]}` }
	for body, want := range map[string]string{
		`, "name": "a/b"`:                             "network name",
		`, "name": ""`:                                "network name",
		`, "bridge": "a/b"`:                           "not a valid interface name",
		`, "bridge": "br%d"`:                          "not a valid interface name",
		`, "bridge": "all"`:                           "not a valid interface name",
		`, "bridge": "sixteen-letters0"`:              "not a valid interface name",
		`, "mtu": 100`:                                "mtu: 100",
		`, "mtu": -1`:                                 "mtu: -1",
		`, "dataDir": "relative"`:                     "not an absolute path",
		`, "isolation": ["pods"]`:                     `isolation is no longer a key: remove it, and`,
		`, "checkSource": false`:                      `checkSource is no longer a key: remove it, and`,
		`, "Isolation": []`:                           `Isolation is no longer a key`,
		`, "routes": [{}]`:                            "no destination",
		`, "subnets": ["10.0.0.0/31"]`:                "no room",
		`, "subnets": ["fd00::/127"]`:                 "no room",
		`, "subnets": ["10.0.0.0/24", "10.0.1.0/24"]`: "second IPv4 subnet",
		`, "subnets": ["fd00::/64", "fd01::/64"]`:     "second IPv6 subnet",
		`, "subnets": ["127.0.0.0/8"]`:                "cannot be used for pods",
		`, "subnets": ["224.0.0.0/8"]`:                "cannot be used for pods",
		`, "subnets": ["fe80::/64"]`:                  "cannot be used for pods",
		`, "subnets": ["::ffff:10.0.0.0/120"]`:        "subnet",
		`, "runtimeConfig": {"ipRanges": [[]]}`:       "0 ranges",
		`, "runtimeConfig": {"ipRanges": [[{"subnet": "10.0.0.0/24", "rangeStart": "10.0.1.1"}]]}`:                         "rangeStart",
		`, "runtimeConfig": {"ipRanges": [[{"subnet": "10.0.0.0/24", "rangeStart": "10.0.0.9", "rangeEnd": "10.0.0.8"}]]}`: "free for pods",
		`, "runtimeConfig": {"ipRanges": [[{"subnet": "10.0.0.0/24", "rangeStart": "10.0.0.1", "rangeEnd": "10.0.0.1"}]]}`: "free for pods",
		`, "runtimeConfig": {"ipRanges": [[{"subnet": "10.0.0.0/24", "gateway": "10.0.0.255"}]]}`:                          "gateway",
		mapping(`{"hostPort": 70000, "containerPort": 1}`):                                                                 "from 1 to 65535",
		mapping(`{"hostPort": -1, "containerPort": 1}`):                                                                    "from 1 to 65535",
		mapping(`{"hostPort": 1, "containerPort": 0}`):                                                                     "from 1 to 65535",
		mapping(`{"hostPort": 1, "containerPort": 1, "protocol": "icmp"}`):                                                 "protocol",
		mapping(`{"hostPort": 1, "containerPort": 1, "hostIP": "here"}`):                                                   "hostIP",
		`, "runtimeConfig": {"bandwidth": {"ingressRate": 8000}}`:                                                          "must both be set",
		`, "runtimeConfig": {"bandwidth": {"egressRate": 1, "egressBurst": 8000}}`:                                         "out of range",
	} {
		t.Run(body, func(t *testing.T) {
			_, err := parse(body)
			e, ok := errors.AsType[*types.Error](err)
			if !ok || e.Code != types.ErrInvalidNetworkConfig || !strings.Contains(e.Details, want) {
				t.Errorf("%s: %v, want %q", body, err, want)
			}
		})
	}
	for _, text := range []string{``, `[]`, `{"mtu": "x"}`, `{"subnets": ["x"]}`} {
		t.Run(text, func(t *testing.T) {
			_, err := Parse([]byte(text))
			if e, ok := errors.AsType[*types.Error](err); !ok || e.Code != types.ErrDecodingFailure {
				t.Errorf("%s: %v", text, err)
			}
		})
	}
}

// FuzzParse checks that the kernel accepts each configuration that Parse accepts.
func FuzzParse(f *testing.F) {
	f.Add([]byte(`{"cniVersion": "1.1.0", "name": "n", "bridge": "b", "subnets": ["10.0.0.0/24", "fd00::/64"], "routes": [{"dst": "::/0"}]}`))
	f.Add([]byte(`{"name": "n", "runtimeConfig": {"ipRanges": [[{"subnet": "10.0.0.0/24", "rangeStart": "10.0.0.5"}]], "portMappings": [{"hostPort": 1, "containerPort": 2, "hostIP": "::"}]}}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		n, err := Parse(data)
		if err != nil {
			if _, ok := errors.AsType[*types.Error](err); !ok {
				t.Errorf("%v is no CNI error", err)
			}
			return
		}
		if n.Name == "" || n.Bridge == "" || len(n.Bridge) > 15 || len(n.Ranges) > 2 {
			t.Errorf("accepted: %+v", n)
		}
		for _, r := range n.Ranges {
			if !r.Subnet.Contains(r.First) || !r.Subnet.Contains(r.Last) || !r.Subnet.Contains(r.Gateway) || r.Last.Less(r.First) {
				t.Errorf("accepted the range %+v", r)
			}
		}
		for _, p := range n.Ports {
			if p.HostPort == 0 || p.PodPort == 0 || p.Protocol == 0 {
				t.Errorf("accepted the port %+v", p)
			}
		}
	})
}
