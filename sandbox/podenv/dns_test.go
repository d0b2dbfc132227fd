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
			got, dropped, err := formatResolvConf(tt.dns, []byte(hostFile))
			if err != nil || string(got) != tt.want || dropped != nil {
				t.Errorf("got %q, %q, %v, want %q", got, dropped, err, tt.want)
			}
		})
	}
}

func repeat(s string, n int) []string { return slices.Repeat([]string{s}, n) }

// A bad word is left out and reported, and the others stay (moby#35669).
func TestResolvConfDropsBadWords(t *testing.T) {
	t.Parallel()
	servers := func(s ...string) *runtimeapi.DNSConfig { return &runtimeapi.DNSConfig{Servers: s} }
	searches := func(s ...string) *runtimeapi.DNSConfig { return &runtimeapi.DNSConfig{Searches: s} }
	options := func(s ...string) *runtimeapi.DNSConfig { return &runtimeapi.DNSConfig{Options: s} }
	const good = "192.0.2.1"
	for name, tt := range map[string]struct {
		dns     *runtimeapi.DNSConfig
		want    string
		dropped []string
	}{
		"name as server":    {servers("dns.example.com"), "", []string{"dns.example.com"}},
		"port":              {servers(good, "10.0.0.3:53"), "nameserver 192.0.2.1\n", []string{"10.0.0.3:53"}},
		"short address":     {servers("10.1", good), "nameserver 192.0.2.1\n", []string{"10.1"}},
		"bad number":        {servers(good, "192.0.2.300"), "nameserver 192.0.2.1\n", []string{"192.0.2.300"}},
		"newline in server": {servers("192.0.2.1\noptions debug"), "", []string{"192.0.2.1\noptions debug"}},
		"newline in zone":   {servers("fe80::1%eth0\noptions debug"), "", []string{"fe80::1%eth0\noptions debug"}},
		"space in zone":     {servers("fe80::1%eth0 x"), "", []string{"fe80::1%eth0 x"}},
		"empty server":      {servers("", good), "nameserver 192.0.2.1\n", []string{""}},
		"four servers":      {servers(good, "b", good, good, "192.0.2.4"), strings.Repeat("nameserver 192.0.2.1\n", 3), []string{"b", "192.0.2.4"}},
		"comment":           {servers("10.0.0.2;", "10.0.0.3#x"), "nameserver 10.0.0.2\nnameserver 10.0.0.3\n", nil},
		"newline in domain": {searches("a\nnameserver 198.51.100.1", "b"), "search b\n", []string{"a\nnameserver 198.51.100.1"}},
		"return in domain":  {searches("a\rb"), "", []string{"a\rb"}},
		"space in domain":   {searches("c", "a b"), "search c\n", []string{"a b"}},
		"line separator":    {searches("a\u2028b"), "", []string{"a\u2028b"}},
		"NUL in domain":     {searches("a\x00"), "", []string{"a\x00"}},
		"not UTF-8":         {searches("a\xff"), "", []string{"a\xff"}},
		"empty domain":      {searches("", "a"), "search a\n", []string{""}},
		"33 domains":        {searches(append(repeat("a", 32), "b")...), "search" + strings.Repeat(" a", 32) + "\n", []string{"b"}},
		"2049 characters":   {searches(strings.Repeat("a", 2047), "b", "c"), "search " + strings.Repeat("a", 2047) + "\n", []string{"b", "c"}},
		"2048 characters":   {searches(strings.Repeat("a", 2046), "b", "c"), "search " + strings.Repeat("a", 2046) + " b\n", []string{"c"}},
		"newline in option": {options("ndots:5\nnameserver 198.51.100.1", "rotate"), "options rotate\n", []string{"ndots:5\nnameserver 198.51.100.1"}},
		"tab in option":     {options("ndots:5\trotate"), "", []string{"ndots:5\trotate"}},
		"empty option":      {options(""), "", []string{""}},
		"long option":       {options(strings.Repeat("a", 256), "b"), "options b\n", []string{strings.Repeat("a", 256)}},
		"very many options": {options(append(repeat("a", 64), "b")...), "options" + strings.Repeat(" a", 64) + "\n", []string{"b"}},
	} {
		t.Run(name, func(t *testing.T) {
			got, dropped, err := formatResolvConf(tt.dns, []byte(hostFile))
			if err != nil || string(got) != tt.want || !slices.Equal(dropped, tt.dropped) {
				t.Errorf("got %q, %q, %v, want %q, %q", got, dropped, err, tt.want, tt.dropped)
			}
		})
	}
}

func TestHugeResolvConfOfTheHost(t *testing.T) {
	t.Parallel()
	if _, _, err := formatResolvConf(nil, make([]byte, maxHostFile+1)); errdefs.Code(err) != codes.InvalidArgument {
		t.Errorf("huge file of the host: %v", err)
	}
	if _, _, err := formatResolvConf(nil, make([]byte, maxHostFile)); err != nil {
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
		config := &runtimeapi.DNSConfig{Servers: []string{server}, Searches: []string{search, search}, Options: []string{option}}
		got, dropped, err := formatResolvConf(config, nil)
		if err != nil {
			t.Fatal(err)
		}
		if len(dropped) > 0 {
			if n := len(bytes.Fields(got)) + len(dropped); n > 4+3 || bytes.Count(got, []byte("\n")) > 3 {
				t.Errorf("resolv.conf %q without %q", got, dropped)
			}
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
