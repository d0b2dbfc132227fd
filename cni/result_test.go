package cni

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"unicode"

	"github.com/containernetworking/cni/libcni"
	"github.com/containernetworking/cni/pkg/version"

	"berth/internal/testutil"
)

// printer is a fake plugin that prints the same bytes at each call, and passes them through the
// same code as runner.
type printer struct {
	version.PluginDecoder
	stdout []byte
}

func (p *printer) FindInPath(string, []string) (string, error) { return "/fake", nil }

func (p *printer) ExecPlugin(context.Context, string, []byte, []string) ([]byte, error) {
	run := &pluginRun{path: "/fake", verb: "ADD", stdout: p.stdout, printed: len(p.stdout)}
	return run.outcome(context.Background(), nil)
}

// addPrinted runs ADD with a chain of two plugins that both print stdout.
func addPrinted(t testing.TB, cache, confVersion string, stdout []byte) (Result, error) {
	list, err := parseConf([]byte(conflist(confVersion, "n", "a", "b")), true)
	testutil.Must(t, err)
	lib := libcni.NewCNIConfigWithCacheDir([]string{"/"}, cache, &printer{stdout: stdout})
	r, err := lib.AddNetworkList(context.Background(), list, testPod("p1").runtimeConf(IfName))
	if err != nil {
		return Result{}, err
	}
	return newResult(r, IfName)
}

func TestResultIPs(t *testing.T) {
	t.Parallel()
	tests := []struct{ name, version, stdout, want string }{
		{"dual stack, IPv6 first", "1.0.0",
			`{"cniVersion":"1.0.0","interfaces":[{"name":"cni0"},{"name":"veth1"},{"name":"eth0","sandbox":"/ns"}],
			"ips":[{"interface":2,"address":"fd00::5/64"},{"interface":2,"address":"192.0.2.5/24"}]}`, "[fd00::5 192.0.2.5]"},
		{"loopback does not count", "1.0.0",
			`{"cniVersion":"1.0.0","interfaces":[{"name":"lo","sandbox":"/ns"},{"name":"eth0","sandbox":"/ns"}],
			"ips":[{"interface":0,"address":"127.0.0.1/8"},{"interface":0,"address":"192.0.2.9/32"},{"interface":1,"address":"192.0.2.5/24"}]}`, "[192.0.2.5]"},
		{"loopback address without interface", "1.0.0", `{"cniVersion":"1.0.0","ips":[{"address":"::1/128"},{"address":"192.0.2.5/24"}]}`, "[192.0.2.5]"},
		{"no interfaces", "1.0.0", `{"cniVersion":"1.0.0","ips":[{"address":"192.0.2.5/24"}]}`, "[192.0.2.5]"},
		{"only the pod's interface of several", "1.0.0",
			`{"cniVersion":"1.0.0","interfaces":[{"name":"net1","sandbox":"/ns"},{"name":"eth0","sandbox":"/ns"}],
			"ips":[{"interface":0,"address":"198.51.100.1/24"},{"interface":1,"address":"192.0.2.5/24"}]}`, "[192.0.2.5]"},
		{"host interface only", "1.0.0",
			`{"cniVersion":"1.0.0","interfaces":[{"name":"cali1"}],"ips":[{"interface":0,"address":"192.0.2.5/32"}]}`, "[192.0.2.5]"},
		{"an address twice", "1.0.0", `{"cniVersion":"1.0.0","ips":[{"address":"192.0.2.5/24"},{"address":"192.0.2.5/32"}]}`, "[192.0.2.5]"},
		{"no addresses", "1.0.0", `{"cniVersion":"1.0.0"}`, "[]"},
		{"version of the configuration where none is given", "1.1.0", `{"ips":[{"address":"192.0.2.5/24"}]}`, "[192.0.2.5]"},
		{"1.1.0", "1.1.0", `{"cniVersion":"1.1.0","interfaces":[{"name":"eth0","mtu":1500}],"ips":[{"interface":0,"address":"192.0.2.5/24"}],"routes":[{"dst":"0.0.0.0/0","mtu":1400}]}`, "[192.0.2.5]"},
		{"0.4.0", "0.4.0", `{"cniVersion":"0.4.0","ips":[{"version":"6","address":"fd00::5/64"},{"version":"4","address":"192.0.2.5/24"}]}`, "[fd00::5 192.0.2.5]"},
		{"0.3.1", "0.3.1", `{"cniVersion":"0.3.1","interfaces":[{"name":"eth0"}],"ips":[{"version":"4","interface":0,"address":"192.0.2.5/24"}]}`, "[192.0.2.5]"},
		{"0.2.0", "0.2.0", `{"cniVersion":"0.2.0","ip4":{"ip":"192.0.2.5/24"},"ip6":{"ip":"fd00::5/64"}}`, "[192.0.2.5 fd00::5]"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			r, err := addPrinted(t, t.TempDir(), tt.version, []byte(tt.stdout))
			testutil.Must(t, err)
			if got := fmt.Sprint(r.IPs); got != tt.want {
				t.Errorf("addresses %s, want %s", got, tt.want)
			}
		})
	}
}

func FuzzResult(f *testing.F) {
	f.Add("1.1.0", []byte(`{"cniVersion":"1.1.0","interfaces":[{"name":"eth0","mtu":1500}],"ips":[{"interface":0,"address":"192.0.2.5/24","gateway":"192.0.2.1"}],"routes":[{"dst":"0.0.0.0/0"}],"dns":{}}`))
	f.Add("0.4.0", []byte(`{"cniVersion":"0.4.0","interfaces":[null],"ips":[{"version":"4","address":"192.0.2.5/24"}]}`))
	f.Add("0.2.0", []byte(`{"ip4":{"ip":"192.0.2.5/24"},"ip6":null}`))
	f.Add("1.0.0", []byte(`{"ips":[null],"IPS":[{}],"routes":[{"dst":null}]}`))
	f.Add("0.3.1", []byte(`null`))
	f.Add("1.0.0", []byte(`{"ips":[{"interface":-1,"address":"::ffff:1.2.3.4/120"}]}`))
	cache := f.TempDir()
	f.Fuzz(func(t *testing.T, confVersion string, stdout []byte) {
		if _, err := parseConf([]byte(conflist(confVersion, "n", "a", "b")), true); err != nil {
			return
		}
		r, err := addPrinted(t, cache, confVersion, stdout)
		if err != nil {
			if text := err.Error(); len(text) > 4*maxExcerpt+500 || strings.ContainsFunc(text, func(r rune) bool { return !unicode.IsPrint(r) }) {
				t.Fatalf("%d bytes: %q", len(text), text)
			}
			return
		}
		for i, ip := range r.IPs {
			if !ip.IsValid() || ip.IsLoopback() || ip.Is4In6() {
				t.Errorf("address %d of %s is %v", i, stdout, ip)
			}
		}
	})
}
