package podenv

import (
	"bytes"
	"fmt"
	"net/netip"
	"strings"
	"unicode"
	"unicode/utf8"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/internal/errdefs"
	"berth/oci"
)

// Limits of a resolv.conf. The first three are the limits of Kubernetes' API validation and of C
// libraries.
const (
	maxServers     = 3
	maxSearches    = 32
	maxSearchChars = 2048 // all search domains, with the spaces between them
	maxOptions     = 64
	maxOptionChars = 255
	maxHostFile    = 64 << 10 // bytes of the host's file
)

// formatResolvConf returns the resolv.conf for a pod's DNS config. For a nil or empty config it
// returns the host's content unchanged, up to 64 KiB. All errors are InvalidArgument.
func formatResolvConf(dns *runtimeapi.DNSConfig, host []byte) ([]byte, error) {
	servers, searches, options := dns.GetServers(), dns.GetSearches(), dns.GetOptions()
	if usesHostDNS(dns) {
		if len(host) > maxHostFile {
			return nil, errdefs.InvalidArgument("the host's resolv.conf has %d bytes, more than %d", len(host), maxHostFile)
		}
		return host, nil
	}
	addrs, err := checkServers(servers)
	if err != nil {
		return nil, err
	}
	if err := checkSearches(searches); err != nil {
		return nil, err
	}
	if err := checkOptions(options); err != nil {
		return nil, err
	}
	return writeResolvConf(addrs, searches, options), nil
}

// usesHostDNS reports whether a pod with this DNS config gets the host's resolv.conf.
func usesHostDNS(dns *runtimeapi.DNSConfig) bool {
	return len(dns.GetServers())+len(dns.GetSearches())+len(dns.GetOptions()) == 0
}

func writeResolvConf(servers []netip.Addr, searches, options []string) []byte {
	var b bytes.Buffer
	if len(searches) > 0 {
		fmt.Fprintf(&b, "search %s\n", strings.Join(searches, " "))
	}
	for _, s := range servers {
		fmt.Fprintf(&b, "nameserver %s\n", s)
	}
	if len(options) > 0 {
		fmt.Fprintf(&b, "options %s\n", strings.Join(options, " "))
	}
	return b.Bytes()
}

func checkServers(servers []string) ([]netip.Addr, error) {
	if len(servers) > maxServers {
		return nil, errdefs.InvalidArgument("DNS config: %d servers, at most %d are possible", len(servers), maxServers)
	}
	addrs := make([]netip.Addr, len(servers))
	for i, s := range servers {
		addr, err := netip.ParseAddr(s)
		if err != nil {
			return nil, errdefs.InvalidArgument("DNS config: server %q is not an IP address", s)
		}
		if addr.Zone() != "" && !isWord(addr.Zone()) { // ParseAddr accepts any zone
			return nil, errdefs.InvalidArgument("DNS config: server %q has an invalid zone", s)
		}
		addrs[i] = addr
	}
	return addrs, nil
}

func checkSearches(searches []string) error {
	if len(searches) > maxSearches {
		return errdefs.InvalidArgument("DNS config: %d search domains, at most %d are possible", len(searches), maxSearches)
	}
	for _, s := range searches {
		if !isWord(s) {
			return errdefs.InvalidArgument("DNS config: search domain %q is not one word", s)
		}
	}
	if n := len(strings.Join(searches, " ")); n > maxSearchChars {
		return errdefs.InvalidArgument("DNS config: search domains have %d characters, at most %d are possible",
			n, maxSearchChars)
	}
	return nil
}

func checkOptions(options []string) error {
	if len(options) > maxOptions {
		return errdefs.InvalidArgument("DNS config: %d options, at most %d are possible", len(options), maxOptions)
	}
	for _, o := range options {
		if !isWord(o) || len(o) > maxOptionChars {
			return errdefs.InvalidArgument("DNS config: option %q is not one word of at most %d characters",
				o, maxOptionChars)
		}
	}
	return nil
}

// isWord reports whether every reader of a space-separated line reads s as exactly one word.
func isWord(s string) bool {
	return s != "" && utf8.ValidString(s) && !strings.ContainsFunc(s, func(r rune) bool {
		return unicode.IsSpace(r) || !unicode.IsPrint(r)
	})
}

// localHosts are the entries of every pod. RFC 4291 defines the IPv6 addresses.
const localHosts = `127.0.0.1	localhost
::1	localhost ip6-localhost ip6-loopback
fe00::	ip6-localnet
ff00::	ip6-mcastprefix
ff02::1	ip6-allnodes
ff02::2	ip6-allrouters
`

// formatHosts returns a default hosts file: localhost, the IPv6 names, and one line per address of
// the pod with its hostname. Without a hostname it has no such lines. kubelet mounts a file of its
// own over it in most containers. All errors are InvalidArgument.
func formatHosts(hostname string, ips []netip.Addr) ([]byte, error) {
	if hostname == "" {
		return []byte(localHosts), nil
	}
	if err := oci.CheckHostname(hostname); err != nil {
		return nil, err
	}
	b := bytes.NewBufferString(localHosts)
	for _, ip := range ips {
		if !ip.IsValid() {
			return nil, errdefs.InvalidArgument("hosts file: invalid address of %s", hostname)
		}
		fmt.Fprintf(b, "%s\t%s\n", ip.Unmap().WithZone(""), names(hostname))
	}
	return b.Bytes(), nil
}

// names returns the names of a host for a hosts file. A fully qualified hostname is followed by its
// first label, because hostname(1) -f needs both.
func names(hostname string) string {
	short, _, qualified := strings.Cut(hostname, ".")
	if qualified {
		return hostname + "\t" + short
	}
	return hostname
}

// formatHostname returns the content of /etc/hostname. Errors are InvalidArgument.
func formatHostname(hostname string) ([]byte, error) {
	if err := oci.CheckHostname(hostname); err != nil {
		return nil, err
	}
	return []byte(hostname + "\n"), nil
}
