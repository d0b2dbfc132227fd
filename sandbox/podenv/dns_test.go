package podenv

import (
	"bytes"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/internal/errdefs"
)

const hostFile = "# the host's\nnameserver 192.0.2.1\n"

func TestResolvConf(t *testing.T) {
	t.Parallel()
	tests := []struct {
		name string
		dns  *runtimeapi.DNSConfig
		want string
	}{
		{"no config", nil, hostFile},
		{"empty config", &runtimeapi.DNSConfig{}, hostFile},
		{"kubelet's", &runtimeapi.DNSConfig{
			Servers:  []string{"10.96.0.10", "fd00::a"},
			Searches: []string{"shop.svc.cluster.local", "svc.cluster.local", "."},
			Options:  []string{"ndots:5", "edns0"},
		}, "search shop.svc.cluster.local svc.cluster.local .\nnameserver 10.96.0.10\nnameserver fd00::a\noptions ndots:5 edns0\n"},
		{"servers only", &runtimeapi.DNSConfig{Servers: []string{"192.0.2.1"}}, "nameserver 192.0.2.1\n"},
		{"options only", &runtimeapi.DNSConfig{Options: []string{"rotate"}}, "options rotate\n"},
		{"link-local server", &runtimeapi.DNSConfig{Servers: []string{"fe80::1%eth0"}}, "nameserver fe80::1%eth0\n"},
		{"underscore and trailing dot", &runtimeapi.DNSConfig{Searches: []string{"_tcp.example.com."}}, "search _tcp.example.com.\n"},
		{"as many domains as possible", &runtimeapi.DNSConfig{Searches: repeat("a", 32)}, "search" + strings.Repeat(" a", 32) + "\n"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			got, err := formatResolvConf(tt.dns, []byte(hostFile))
			if err != nil || string(got) != tt.want {
				t.Errorf("got %q, %v, want %q", got, err, tt.want)
			}
		})
	}
}

func repeat(s string, n int) []string { return slices.Repeat([]string{s}, n) }

func TestResolvConfRefuses(t *testing.T) {
	t.Parallel()
	for name, dns := range map[string]*runtimeapi.DNSConfig{
		"name as server":      {Servers: []string{"dns.example.com"}},
		"newline in server":   {Servers: []string{"192.0.2.1\noptions debug"}},
		"newline in zone":     {Servers: []string{"fe80::1%eth0\noptions debug"}},
		"space in zone":       {Servers: []string{"fe80::1%eth0 x"}},
		"empty server":        {Servers: []string{""}},
		"four servers":        {Servers: repeat("192.0.2.1", 4)},
		"newline in domain":   {Searches: []string{"a\nnameserver 198.51.100.1"}},
		"return in domain":    {Searches: []string{"a\rb"}},
		"space in domain":     {Searches: []string{"a b"}},
		"line separator":      {Searches: []string{"a\u2028b"}},
		"NUL in domain":       {Searches: []string{"a\x00"}},
		"not UTF-8":           {Searches: []string{"a\xff"}},
		"empty domain":        {Searches: []string{""}},
		"33 domains":          {Searches: repeat("a", 33)},
		"2049 characters":     {Searches: repeat(strings.Repeat("a", 99)+"."+strings.Repeat("b", 5), 20)},
		"newline in option":   {Options: []string{"ndots:5\nnameserver 198.51.100.1"}},
		"tab in option":       {Options: []string{"ndots:5\trotate"}},
		"empty option":        {Options: []string{""}},
		"long option":         {Options: []string{strings.Repeat("a", 256)}},
		"very many options":   {Options: repeat("a", 65)},
		"good and bad server": {Servers: []string{"192.0.2.1", "192.0.2.300"}},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := formatResolvConf(dns, []byte(hostFile))
			if errdefs.Code(err) != codes.InvalidArgument || got != nil {
				t.Errorf("%q, %v", got, err)
			}
		})
	}
	if _, err := formatResolvConf(nil, make([]byte, maxHostFile+1)); errdefs.Code(err) != codes.InvalidArgument {
		t.Errorf("huge file of the host: %v", err)
	}
	if _, err := formatResolvConf(nil, make([]byte, maxHostFile)); err != nil {
		t.Errorf("large file of the host: %v", err)
	}
}

func TestHosts(t *testing.T) {
	t.Parallel()
	ips := []netip.Addr{netip.MustParseAddr("192.0.2.5"), netip.MustParseAddr("fd00::5"), netip.MustParseAddr("::ffff:192.0.2.6"), netip.MustParseAddr("fe80::1%eth0")}
	got, err := formatHosts("web-0", ips)
	want := localHosts + "192.0.2.5\tweb-0\nfd00::5\tweb-0\n192.0.2.6\tweb-0\nfe80::1\tweb-0\n"
	if err != nil || string(got) != want {
		t.Errorf("got %q, %v, want %q", got, err, want)
	}
	got, err = formatHosts("web-0.shop.example", ips[:1])
	if want := localHosts + "192.0.2.5\tweb-0.shop.example\tweb-0\n"; err != nil || string(got) != want {
		t.Errorf("got %q, %v, want %q", got, err, want)
	}
	got, err = formatHosts("web-0.shop.default.svc.", ips[:1])
	if want := localHosts + "192.0.2.5\tweb-0.shop.default.svc.\tweb-0\n"; err != nil || string(got) != want {
		t.Errorf("got %q, %v, want %q", got, err, want)
	}
	if got, err = formatHosts("", ips); err != nil || string(got) != localHosts {
		t.Errorf("without hostname: %q, %v", got, err)
	}
	for _, line := range strings.Split(strings.TrimSpace(localHosts), "\n") {
		addr, _, _ := strings.Cut(line, "\t")
		if _, err := netip.ParseAddr(addr); err != nil {
			t.Errorf("line %q: %v", line, err)
		}
	}
	if _, err = formatHosts("web", []netip.Addr{{}}); errdefs.Code(err) != codes.InvalidArgument {
		t.Errorf("invalid address: %v", err)
	}
	if _, err = formatHosts("a b", ips); errdefs.Code(err) != codes.InvalidArgument {
		t.Errorf("invalid hostname: %v", err)
	}
}

func TestHostname(t *testing.T) {
	t.Parallel()
	for _, name := range []string{"a", "web-0", "Web_0", "1", "node1.example.com", strings.Repeat("a", 63), strings.Repeat("a", 32) + "." + strings.Repeat("b", 31),
		"a.", "web-0.shop.default.svc.", strings.Repeat("a", 63) + "."} {
		t.Run(name, func(t *testing.T) {
			got, err := formatHostname(name)
			if err != nil || string(got) != name+"\n" {
				t.Errorf("%q, %v", got, err)
			}
		})
	}
	for _, name := range []string{"", ".", "..", "a..", ".a", "a..b", "a-.", "-a", "a-", "a.-b", "a b", "a\n", "a\x00", "ä", "a/b", "a#b",
		strings.Repeat("a", 64), strings.Repeat("a", 33) + "." + strings.Repeat("b", 31), strings.Repeat("a", 32) + "." + strings.Repeat("b", 31) + "."} {
		if got, err := formatHostname(name); errdefs.Code(err) != codes.InvalidArgument {
			t.Errorf("%q, %v", got, err)
		}
	}
}

// For any values the file has exactly one line per setting, and each line has one word per value.
func FuzzResolvConf(f *testing.F) {
	f.Add("192.0.2.1", "a.example", "ndots:5")
	f.Add("fe80::1%eth0", ".", "rotate")
	f.Add("192.0.2.1\nx", "a\u0085b", "o\v")
	f.Fuzz(func(t *testing.T, server, search, option string) {
		got, err := formatResolvConf(&runtimeapi.DNSConfig{Servers: []string{server}, Searches: []string{search, search}, Options: []string{option}}, nil)
		if err != nil {
			return
		}
		lines := bytes.Split(got, []byte("\n"))
		if len(lines) != 4 || len(bytes.Fields(lines[0])) != 3 || len(bytes.Fields(lines[1])) != 2 || len(bytes.Fields(lines[2])) != 2 || len(lines[3]) != 0 {
			t.Errorf("resolv.conf %q", got)
		}
	})
}

func FuzzHosts(f *testing.F) {
	f.Add("web-0", "192.0.2.5")
	f.Add("a.b", "fe80::1%e\n0")
	f.Add("a\n192.0.2.1 b", "::1")
	f.Fuzz(func(t *testing.T, hostname, ip string) {
		addr, err := netip.ParseAddr(ip)
		if err != nil || hostname == "" {
			return
		}
		got, err := formatHosts(hostname, []netip.Addr{addr})
		if err != nil {
			return
		}
		own := bytes.TrimPrefix(got, []byte(localHosts))
		if n := len(bytes.Fields(own)); bytes.Count(own, []byte("\n")) != 1 || n < 2 || n > 3 {
			t.Errorf("own line %q", own)
		}
		if name, err := formatHostname(hostname); err != nil || bytes.Count(name, []byte("\n")) != 1 {
			t.Errorf("hostname file %q, %v", name, err)
		}
	})
}
