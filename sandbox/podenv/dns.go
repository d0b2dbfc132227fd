package podenv

import (
	"bytes"
	"fmt"
	"net/netip"
	"slices"
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
// returns the host's content unchanged, up to 64 KiB. It leaves out words that a reader of
// resolv.conf(5) would ignore or misread, and returns them in dropped. One bad name server of a
// network must not fail every pod. The error is InvalidArgument.
func formatResolvConf(dns *runtimeapi.DNSConfig, host []byte) (file []byte, dropped []string, err error) {
	if usesHostDNS(dns) {
		if len(host) > maxHostFile {
			return nil, nil, errdefs.InvalidArgument("the host's resolv.conf has %d bytes, more than %d", len(host), maxHostFile)
		}
		return host, nil, nil
	}
	servers, badServers := keep(dns.GetServers(), maxServers, address)
	searches, badSearches := keep(dns.GetSearches(), maxSearches, searchDomain())
	options, badOptions := keep(dns.GetOptions(), maxOptions, option)
	return writeResolvConf(servers, searches, options), slices.Concat(badServers, badSearches, badOptions), nil
}

// usesHostDNS reports whether a pod with this DNS config gets the host's resolv.conf.
func usesHostDNS(dns *runtimeapi.DNSConfig) bool {
	return len(dns.GetServers())+len(dns.GetSearches())+len(dns.GetOptions()) == 0
}

func writeResolvConf(servers, searches, options []string) []byte {
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

// keep returns the results of parse for the first words that it accepts, at most limit. bad has the
// other words.
func keep(words []string, limit int, parse func(string) (string, bool)) (good, bad []string) {
	for _, w := range words {
		if word, ok := parse(w); ok && len(good) < limit {
			good = append(good, word)
		} else {
			bad = append(bad, w)
		}
	}
	return good, bad
}

// address parses a name server. As in C libraries, a comment may follow it ("10.0.0.2;").
func address(s string) (string, bool) {
	if i := strings.IndexAny(s, ";#"); i >= 0 {
		s = s[:i]
	}
	addr, err := netip.ParseAddr(s)
	if err != nil || addr.Zone() != "" && !isWord(addr.Zone()) { // ParseAddr accepts any zone
		return "", false
	}
	return addr.String(), true
}

// searchDomain returns a function that accepts search domains until their line is full.
func searchDomain() func(string) (string, bool) {
	left := maxSearchChars + 1
	return func(s string) (string, bool) {
		if !isWord(s) || len(s)+1 > left {
			return "", false
		}
		left -= len(s) + 1
		return s, true
	}
}

func option(s string) (string, bool) { return s, isWord(s) && len(s) <= maxOptionChars }

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
// the pod with its hostname. If there is no hostname, it has no such lines. In most containers
// kubelet mounts its own file over this file. All errors are InvalidArgument.
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
