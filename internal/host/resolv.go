package host

import (
	"net/netip"
	"path/filepath"
	"strings"

	"berth/internal/safefs"
)

const (
	etcResolvConf = "/etc/resolv.conf"
	// resolvedConf is the file in which systemd-resolved lists its upstream servers.
	resolvedConf = "/run/systemd/resolve/resolv.conf"

	maxResolvConf = 1 << 20 // bytes
)

// stubServers are the addresses at which systemd-resolved serves local programs
// (systemd-resolved.service(8)).
var stubServers = []netip.Addr{netip.MustParseAddr("127.0.0.53"), netip.MustParseAddr("127.0.0.54")}

// ResolvConf returns the path of the resolv.conf whose servers a pod can reach. That is
// /etc/resolv.conf, or the file with the upstream servers if /etc/resolv.conf lists only
// systemd-resolved's stub. The stub listens on the host's loopback, which pods with a network
// namespace cannot reach. root has the same meaning as in Detect.
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

// nameservers returns the servers of a resolv.conf(5). If it cannot read the file, it returns nil.
// A later user of the file reports the error.
func nameservers(path string) []netip.Addr {
	content, err := safefs.ReadHostFile(path, maxResolvConf)
	if err != nil {
		return nil
	}
	var servers []netip.Addr
	for line := range strings.Lines(string(content)) {
		words := strings.Fields(line)
		if len(words) < 2 || words[0] != "nameserver" {
			continue
		}
		word := words[1]
		if end := strings.IndexAny(word, ";#"); end >= 0 { // as in C libraries, a comment may follow
			word = word[:end]
		}
		if addr, err := netip.ParseAddr(word); err == nil {
			servers = append(servers, addr)
		}
	}
	return servers
}
