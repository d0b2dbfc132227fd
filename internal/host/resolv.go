package host

import (
	"net/netip"
	"os"
	"path/filepath"
	"strings"
)

const (
	etcResolvConf = "/etc/resolv.conf"
	// resolvedConf is where systemd-resolved lists its upstream servers.
	resolvedConf = "/run/systemd/resolve/resolv.conf"
)

// stubServers are the addresses at which systemd-resolved serves local programs
// (systemd-resolved.service(8)).
var stubServers = []netip.Addr{netip.MustParseAddr("127.0.0.53"), netip.MustParseAddr("127.0.0.54")}

// ResolvConf returns the path of the resolv.conf whose servers a pod can reach: /etc/resolv.conf,
// or the file with the upstream servers if the former lists only systemd-resolved's stub. The stub
// listens on the host's loopback, which pods with their own network do not have. root is as for
// Detect.
func ResolvConf(root string) string {
	servers := nameservers(filepath.Join(root, etcResolvConf))
	for _, s := range servers {
		if s != stubServers[0] && s != stubServers[1] {
			return etcResolvConf
		}
	}
	if len(servers) == 0 || len(nameservers(filepath.Join(root, resolvedConf))) == 0 {
		return etcResolvConf
	}
	return resolvedConf
}

// nameservers returns the servers of a resolv.conf(5), or none if it cannot be read. A user of the
// file reports the error.
func nameservers(path string) []netip.Addr {
	content, err := os.ReadFile(path)
	if err != nil {
		return nil
	}
	var servers []netip.Addr
	for line := range strings.Lines(string(content)) {
		words := strings.Fields(line)
		if len(words) < 2 || words[0] != "nameserver" {
			continue
		}
		if addr, err := netip.ParseAddr(words[1]); err == nil {
			servers = append(servers, addr)
		}
	}
	return servers
}
