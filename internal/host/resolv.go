package host

import (
	"net/netip"
	"os"
	"path/filepath"
	"strings"
)

const (
	etcResolvConf = "/etc/resolv.conf"
	// resolvedConf is where systemd-resolved lists the servers it asks itself.
	resolvedConf = "/run/systemd/resolve/resolv.conf"
)

// stubServers are the addresses at which systemd-resolved answers this machine's
// own programs (systemd-resolved.service(8)).
var stubServers = []netip.Addr{netip.MustParseAddr("127.0.0.53"), netip.MustParseAddr("127.0.0.54")}

// ResolvConf returns the path of the resolv.conf whose servers a pod can use:
// /etc/resolv.conf or, where that names nothing but systemd-resolved's stub, the
// one with the servers behind it. The stub listens on the machine's loopback, which
// a pod with a network of its own does not see. The root argument is as of Detect.
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

// nameservers returns the servers of a resolv.conf(5), none if it cannot be read:
// who uses the file will say why.
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
