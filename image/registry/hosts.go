package registry

import (
	"bytes"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"os"
	"path"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"time"

	"github.com/pelletier/go-toml/v2"
	"github.com/pelletier/go-toml/v2/unstable"
	"golang.org/x/net/http/httpguts"

	"berth/internal/errdefs"
	"berth/internal/nearest"
)

// capability is a set of requests that a host serves.
type capability uint8

const (
	capPull      capability = 1 << iota // content by digest
	capResolve                          // the digest of a tag
	capPush                             // parsed, not used
	capReferrers                        // parsed, not used

	allCapabilities = capPull | capResolve | capPush | capReferrers
)

var capabilityNames = map[string]capability{
	"pull": capPull, "resolve": capResolve, "push": capPush, "referrers": capReferrers,
}

// hostConfig is one host that serves the images of a registry.
type hostConfig struct {
	Scheme string
	Host   string // with port if configured; empty: the registry's own
	Path   string // API root, "/v2" unless overridden
	Caps   capability

	caCerts     []string    // PEM files, added to the system's
	clientPairs [][2]string // certificate and key file; key "": in the same file
	skipVerify  *bool       // nil: not configured
	lenient     bool        // skipVerify is the default for loopback, and applies to no other host
	Header      http.Header
	DialTimeout time.Duration  // 0: default
	RedirectTo  []netip.Prefix // redirect_to: always allowed targets of redirects

	Home      bool // is the registry itself, not a mirror
	PlainNext bool // try https, then plain http

	unknown []string // of the server: messages about unknown keys in hosts.toml
}

// explicitTLS reports whether TLS is configured. For an http:// host with TLS options, https is
// tried first.
func (h *hostConfig) explicitTLS() bool {
	return h.caCerts != nil || h.clientPairs != nil || h.skipVerify != nil
}

// loadHosts returns the hosts that serve images of domain, in the order to try them. It reads
// hosts.toml in containerd's layout or Docker's certificate files, and applies the defaults if
// there are neither. It reads the files at each call, so changes need no restart. An invalid file
// is FailedPrecondition. The text names the file, but shows no URL, because it may contain a
// password.
func loadHosts(dirs []string, domain string) ([]hostConfig, error) {
	hosts := []hostConfig{{}}
	dir, own, err := findHostDir(dirs, domain)
	if err == nil && dir != "" {
		hosts, err = loadHostDir(dir)
	}
	if err != nil {
		return nil, errdefs.FailedPrecondition("configuration of registry host %s: %w", domain, err)
	}
	server := &hosts[len(hosts)-1]
	server.Home = own || server.Host == ""
	if server.Host == "" {
		server.setDefault(domain)
	}
	for i := range hosts {
		hosts[i].settle(domain)
	}
	return hosts, nil
}

// findHostDir returns the configuration directory of a host, or "", and whether it is the host's
// own and not the default.
func findHostDir(dirs []string, domain string) (dir string, own bool, err error) {
	for _, root := range dirs {
		for _, name := range hostDirNames(domain) {
			dir := filepath.Join(root, name)
			_, err := os.Stat(dir)
			if err == nil {
				return dir, name != defaultHostDir, nil
			}
			if !errors.Is(err, fs.ErrNotExist) {
				return "", false, err
			}
		}
	}
	return "", false, nil
}

const defaultHostDir = "_default"

// hostDirNames returns the directory names of a host in containerd's order. For a host with a port,
// "host_port_" comes first, for filesystems without colons in names.
func hostDirNames(domain string) []string {
	names := []string{domain, defaultHostDir}
	if i := strings.LastIndex(domain, ":"); i > 0 {
		names = append([]string{domain[:i] + "_" + domain[i+1:] + "_"}, names...)
	}
	return names
}

// loadHostDir reads hosts.toml, or Docker's certificate files if there is none. The last host is
// the server.
func loadHostDir(dir string) ([]hostConfig, error) {
	file := filepath.Join(dir, "hosts.toml")
	data, err := os.ReadFile(file)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	if len(data) == 0 {
		h, err := loadCertFiles(dir)
		return []hostConfig{h}, err
	}
	hosts, err := parseHosts(dir, data)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", file, err)
	}
	return hosts, nil
}

// loadCertFiles reads Docker's layout: *.crt are CA certificates, *.cert are client certificates
// with the key in *.key or in the same file.
func loadCertFiles(dir string) (hostConfig, error) {
	var h hostConfig
	entries, err := os.ReadDir(dir)
	if err != nil {
		return h, err
	}
	for _, e := range entries {
		name := filepath.Join(dir, e.Name())
		switch {
		case e.IsDir():
		case strings.HasSuffix(name, ".crt"):
			h.caCerts = append(h.caCerts, name)
		case strings.HasSuffix(name, ".cert"):
			key := strings.TrimSuffix(name, ".cert") + ".key"
			if _, err := os.Stat(key); errors.Is(err, fs.ErrNotExist) {
				key = ""
			} else if err != nil {
				return h, err
			}
			h.clientPairs = append(h.clientPairs, [2]string{name, key})
		}
	}
	return h, nil
}

// hostTable is a host's table in hosts.toml, or its top level for the server. Other keys do not
// fail the pull, because they may be for a newer containerd. See unknownKeys.
type hostTable struct {
	Capabilities []string       `toml:"capabilities"`
	CA           any            `toml:"ca"`     // string or list
	Client       any            `toml:"client"` // string, list of strings, list of pairs
	SkipVerify   *bool          `toml:"skip_verify"`
	Header       map[string]any `toml:"header"` // values: string or list
	OverridePath bool           `toml:"override_path"`
	DialTimeout  string         `toml:"dial_timeout"`
	RedirectTo   any            `toml:"redirect_to"` // berth's own: an address or network, or a list
}

// parseHosts parses a hosts.toml in dir. It returns the host tables in the order of the file, then
// the server.
func parseHosts(dir string, data []byte) ([]hostConfig, error) {
	var doc hostsFile
	if err := toml.Unmarshal(data, &doc); err != nil {
		return nil, err
	}
	var hosts []hostConfig
	for i, name := range hostOrder(data, doc.Hosts) { // errors name tables by number, because a URL may contain a password
		if name == "" {
			return nil, errors.New("a host table without a name")
		}
		h, err := parseHost(name, dir, doc.Hosts[name])
		if err != nil {
			return nil, fmt.Errorf("host table %d: %w", i+1, err)
		}
		hosts = append(hosts, h)
	}
	server, err := parseHost(doc.Server, dir, doc.hostTable)
	if err != nil {
		return nil, fmt.Errorf("server: %w", err)
	}
	server.unknown = unknownKeys(data)
	return append(hosts, server), nil
}

// hostsFile is a hosts.toml.
type hostsFile struct {
	hostTable
	Server string               `toml:"server"`
	Hosts  map[string]hostTable `toml:"host"`
}

// unknownKeys returns a message for each unknown key of a valid hosts.toml, with its line and the
// known key with the nearest name. The messages do not show the names of host tables, because a URL
// may contain a password.
func unknownKeys(data []byte) (messages []string) {
	decoder := toml.NewDecoder(bytes.NewReader(data))
	var strict *toml.StrictMissingError
	if !errors.As(decoder.DisallowUnknownFields().Decode(new(hostsFile)), &strict) {
		return nil
	}
	for _, e := range strict.Errors {
		line, _ := e.Position()
		path := e.Key()
		key, known := path[0], topKeys
		if key == "host" && len(path) > 2 {
			key, known = path[2], hostKeys
		}
		messages = append(messages, fmt.Sprintf("line %d: unknown key %q, did you mean %q?",
			line, errdefs.Clip(key), nearest.Of(key, known)))
	}
	return messages
}

// hostKeys are the keys of a host's table, topKeys those outside of host tables.
var (
	hostKeys = keysOf(reflect.TypeFor[hostTable]())
	topKeys  = append([]string{"server", "host"}, hostKeys...)
)

func keysOf(t reflect.Type) (keys []string) {
	for i := range t.NumField() {
		keys = append(keys, t.Field(i).Tag.Get("toml"))
	}
	return keys
}

// hostOrder returns the names of the host tables in the order of the file, which is the order of
// attempts. A decoded map has lost this order. Names of inline tables follow, sorted.
func hostOrder(data []byte, tables map[string]hostTable) []string {
	var order []string
	seen := map[string]bool{}
	add := func(name string) {
		if _, ok := tables[name]; ok && !seen[name] {
			seen[name] = true
			order = append(order, name)
		}
	}
	var p unstable.Parser
	p.Reset(data)
	for p.NextExpression() {
		e := p.Expression()
		if e.Kind != unstable.Table {
			continue
		}
		var key []string
		for it := e.Key(); it.Next(); {
			key = append(key, string(it.Node().Data))
		}
		if len(key) >= 2 && key[0] == "host" {
			add(key[1])
		}
	}
	rest := make([]string, 0, len(tables))
	for name := range tables {
		rest = append(rest, name)
	}
	slices.Sort(rest)
	for _, name := range rest {
		add(name)
	}
	return order
}

// parseHost converts one table. An empty name leaves scheme, host and path empty.
func parseHost(name, dir string, t hostTable) (hostConfig, error) {
	h := hostConfig{skipVerify: t.SkipVerify}
	var err error
	if name != "" {
		if err := h.setURL(name, t.OverridePath); err != nil {
			return h, err
		}
	}
	if h.Caps, err = parseCapabilities(t.Capabilities); err != nil {
		return h, err
	}
	if h.caCerts, err = stringList("ca", t.CA); err != nil {
		return h, err
	}
	for i, f := range h.caCerts {
		h.caCerts[i] = absolute(dir, f)
	}
	if h.clientPairs, err = parseClient(dir, t.Client); err != nil {
		return h, err
	}
	if h.Header, err = parseHeader(t.Header); err != nil {
		return h, err
	}
	if h.RedirectTo, err = parseNetworks("redirect_to", t.RedirectTo); err != nil {
		return h, err
	}
	if t.DialTimeout != "" {
		if h.DialTimeout, err = time.ParseDuration(t.DialTimeout); err != nil || h.DialTimeout <= 0 {
			return h, fmt.Errorf("dial_timeout %q is not a positive duration", errdefs.Clip(t.DialTimeout))
		}
	}
	return h, nil
}

// setURL sets scheme, host and API root from a host's URL. The root is /v2 below the URL's path,
// unless the path ends in /v2 or override is set.
func (h *hostConfig) setURL(raw string, override bool) error {
	if !strings.Contains(raw, "://") {
		raw = "https://" + raw
	}
	u, err := url.Parse(raw)
	if err != nil {
		return errors.New("is not a URL") // the parser's text would quote a password
	}
	if u.Scheme != "http" && u.Scheme != "https" || u.Hostname() == "" {
		return errors.New("is not an http or https URL with a host")
	}
	if u.User != nil {
		return errors.New("credentials in the URL are not supported")
	}
	h.Scheme, h.Host = u.Scheme, apiHost(u.Host)
	if u.Path != "" {
		h.Path = path.Clean(u.Path)
	}
	if !override && !strings.HasSuffix(h.Path, "/v2") {
		h.Path = path.Join("/", h.Path, "v2")
	}
	return nil
}

func parseCapabilities(names []string) (capability, error) {
	if len(names) == 0 {
		return allCapabilities, nil
	}
	var caps capability
	for _, n := range names {
		c, ok := capabilityNames[strings.ToLower(n)]
		if !ok {
			return 0, fmt.Errorf("unknown capability %q", errdefs.Clip(n))
		}
		caps |= c
	}
	return caps, nil
}

// stringList accepts a string or a list of strings.
func stringList(key string, v any) ([]string, error) {
	switch v := v.(type) {
	case nil:
		return nil, nil
	case string:
		return []string{v}, nil
	case []any:
		list := make([]string, 0, len(v))
		for _, e := range v {
			s, ok := e.(string)
			if !ok {
				return nil, fmt.Errorf("%s: a list of strings is expected", key)
			}
			list = append(list, s)
		}
		return list, nil
	}
	return nil, fmt.Errorf("%s: a string or a list of strings is expected", key)
}

// parseNetworks accepts addresses and networks.
func parseNetworks(key string, v any) ([]netip.Prefix, error) {
	names, err := stringList(key, v)
	if err != nil {
		return nil, err
	}
	var list []netip.Prefix
	for _, name := range names {
		p, err := netip.ParsePrefix(name)
		if a, bad := netip.ParseAddr(name); bad == nil {
			p, err = netip.PrefixFrom(a, a.BitLen()), nil
		}
		if err != nil {
			return nil, fmt.Errorf("%s: %q is neither an IP address nor a network", key, errdefs.Clip(name))
		}
		list = append(list, p)
	}
	return list, nil
}

// parseClient accepts a file, a list of files, and a list of files and pairs.
func parseClient(dir string, v any) ([][2]string, error) {
	list, ok := v.([]any)
	if !ok && v != nil {
		list = []any{v}
	}
	var pairs [][2]string
	for _, e := range list {
		files, err := stringList("client", e)
		_, isList := e.([]any)
		switch {
		case err != nil:
			return nil, err
		case !isList:
			pairs = append(pairs, [2]string{absolute(dir, files[0])})
		case len(files) == 2:
			pairs = append(pairs, [2]string{absolute(dir, files[0]), absolute(dir, files[1])})
		default:
			return nil, errors.New("client: a pair is a certificate and a key")
		}
	}
	return pairs, nil
}

func parseHeader(m map[string]any) (http.Header, error) {
	if len(m) == 0 {
		return nil, nil
	}
	h := http.Header{}
	for name, v := range m {
		values, err := stringList("header "+errdefs.Clip(name), v)
		if err != nil {
			return nil, err
		}
		if !httpguts.ValidHeaderFieldName(name) {
			return nil, fmt.Errorf("header %q: not a header's name", errdefs.Clip(name))
		}
		for _, value := range values {
			if !httpguts.ValidHeaderFieldValue(value) { // not quoted, because it may be a secret
				return nil, fmt.Errorf("header %s: a value has characters that cannot be sent", errdefs.Clip(name))
			}
			h.Add(name, value)
		}
	}
	return h, nil
}

// absolute resolves a file name relative to the directory of its hosts.toml. An empty name stays
// empty. It means a pair without a key file.
func absolute(dir, name string) string {
	if name == "" || filepath.IsAbs(name) {
		return name
	}
	return filepath.Join(dir, name)
}

// setDefault sets the registry's own address. On loopback the scheme depends on the port, as in
// containerd. If there is no port, or port 443, it is https. For port 80 it is http. For other
// ports, https without verification is tried first, then http.
func (h *hostConfig) setDefault(domain string) {
	h.Scheme, h.Host, h.Path, h.Caps = "https", apiHost(domain), "/v2", allCapabilities
	if !isLoopback(domain) {
		return
	}
	port := portOf(domain)
	if port != "" && port != "443" {
		h.Scheme = "http"
	}
	if port != "80" {
		insecure := true
		h.skipVerify, h.lenient = &insecure, true
	}
}

// apiHost returns the host of the registry's API. "docker.io" is Docker Hub's web site, but many
// hosts.toml files name it as server.
func apiHost(host string) string {
	if host == dockerHub {
		return "registry-1.docker.io"
	}
	return host
}

// settle applies rules for combinations of options. For an http host with TLS options, https is
// tried first. A host with the registry's name is the registry itself.
func (h *hostConfig) settle(domain string) {
	if h.Scheme == "http" && h.explicitTLS() && portOf(h.Host) != "80" {
		h.Scheme, h.PlainNext = "https", true
	}
	if canonicalHost(h.Host) == canonicalHost(domain) {
		h.Home = true
	}
}

// repository returns the host's name for a repository. A mirror with a path below the root of the
// registry API, such as /v2/proxies/hub, has its copies in repositories with that prefix. Token
// servers and credential files know only this name (containerd#13412).
func (h *hostConfig) repository(name string) string {
	_, prefix, _ := strings.Cut(path.Clean(h.Path)+"/", "/v2/")
	return path.Join(prefix, name)
}

// portOf returns the port of a host, or "".
func portOf(host string) string {
	_, port, err := net.SplitHostPort(host)
	if err != nil {
		return ""
	}
	return port
}

func isLoopback(domain string) bool {
	host, _, err := net.SplitHostPort(domain)
	if err != nil {
		host = strings.Trim(domain, "[]")
	}
	return host == "localhost" || net.ParseIP(host).IsLoopback()
}

// dockerHub is the name of Docker Hub in references.
const dockerHub = "docker.io"

// canonicalHost reduces the server address of credentials to a comparable host. It drops scheme and
// path, and unifies case and the names of Docker Hub.
func canonicalHost(address string) string {
	if _, rest, ok := strings.Cut(address, "://"); ok {
		address = rest
	}
	host, _, _ := strings.Cut(address, "/")
	host = strings.ToLower(strings.TrimSuffix(host, ":443"))
	switch host {
	case "index.docker.io", "registry-1.docker.io":
		return dockerHub
	}
	return host
}

// loadOther returns the configuration of a token server or of the target of a redirect. It is nil
// if the host has no own folder with TLS options. The host is part of a URL that a registry has
// sent.
func loadOther(dirs []string, host string) (*hostConfig, error) {
	host = strings.ToLower(host)
	if host == "" || host == defaultHostDir || strings.HasPrefix(host, ".") || strings.ContainsAny(host, "/\\") {
		return nil, nil
	}
	dir, own, err := findHostDir(dirs, host)
	if err != nil || !own {
		return nil, err
	}
	hosts, err := loadHostDir(dir)
	if err != nil {
		return nil, err
	}
	for _, h := range hosts {
		if h.explicitTLS() && (h.Host == "" || canonicalHost(h.Host) == canonicalHost(host)) {
			return &h, nil
		}
	}
	return nil, nil
}

// tlsConfigs reads the certificate files of a host. own is for the host itself, on any port, and
// for its token server. others is for the targets of redirects. It always verifies their
// certificates, also with the host's CA certificates, because they often belong to the same
// operator. It has no client certificate.
func (h *hostConfig) tlsConfigs() (own, others *tls.Config, err error) {
	others = &tls.Config{MinVersion: tls.VersionTLS12}
	if h.caCerts != nil {
		if others.RootCAs, err = x509.SystemCertPool(); err != nil {
			return nil, nil, fmt.Errorf("read the system's CA certificates: %w", err)
		}
	}
	for _, file := range h.caCerts {
		pem, err := os.ReadFile(file)
		if err != nil {
			return nil, nil, fmt.Errorf("read CA certificate: %w", err)
		}
		if !others.RootCAs.AppendCertsFromPEM(pem) {
			return nil, nil, fmt.Errorf("no CA certificate in %s", file)
		}
	}
	own = others.Clone()
	if h.skipVerify != nil {
		own.InsecureSkipVerify = *h.skipVerify
	}
	for _, pair := range h.clientPairs {
		cert, err := loadClientPair(pair)
		if err != nil {
			return nil, nil, err
		}
		own.Certificates = append(own.Certificates, cert)
	}
	return own, others, nil
}

func loadClientPair(pair [2]string) (tls.Certificate, error) {
	if pair[1] == "" {
		pair[1] = pair[0]
	}
	cert, err := tls.LoadX509KeyPair(pair[0], pair[1])
	if err != nil {
		return cert, fmt.Errorf("load client certificate %s: %w", pair[0], err)
	}
	return cert, nil
}
