package registry

import (
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/http"
	"net/url"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/pelletier/go-toml/v2"
	"github.com/pelletier/go-toml/v2/unstable"
	"golang.org/x/net/http/httpguts"

	"berth/internal/errdefs"
)

// capability is what a host may be asked for.
type capability uint8

const (
	canPull    capability = 1 << iota // content by digest
	canResolve                        // a tag's digest: the host is trusted to name it
	canPush                           // parsed, not used
	canRefer                          // parsed, not used

	allCapabilities = canPull | canResolve | canPush | canRefer
)

var capabilityNames = map[string]capability{
	"pull": canPull, "resolve": canResolve, "push": canPush, "referrers": canRefer,
}

// hostConfig is one place to ask for the images of a registry.
type hostConfig struct {
	scheme string
	host   string // with port if one is given; empty: the registry's own
	path   string // API root, "/v2" unless overridden
	caps   capability

	caCerts     []string    // PEM files, added to the system's
	clientPairs [][2]string // certificate and key file; key "": in the same file
	skipVerify  *bool       // nil: not configured
	header      http.Header
	dialTimeout time.Duration // 0: default

	home      bool // stands for the registry itself, not for a mirror of it
	plainNext bool // try https, then plain http
}

// explicitTLS reports whether TLS was configured, which makes an http:// host one
// that is asked by https first.
func (h *hostConfig) explicitTLS() bool {
	return h.caCerts != nil || h.clientPairs != nil || h.skipVerify != nil
}

// loadHosts returns the hosts to ask for images of domain, in order.
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
	server.home = own || server.host == ""
	if server.host == "" {
		server.setDefault(domain)
	}
	for i := range hosts {
		hosts[i].settle(domain)
	}
	return hosts, nil
}

// findHostDir returns the configuration directory of a host, "" if there is none,
// and whether it is the host's own and not the default.
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

// hostDirNames returns the directory names of a host in containerd's order: with
// a port "host_port_" comes first, for file systems that have no colon.
func hostDirNames(domain string) []string {
	names := []string{domain, defaultHostDir}
	if i := strings.LastIndex(domain, ":"); i > 0 {
		names = append([]string{domain[:i] + "_" + domain[i+1:] + "_"}, names...)
	}
	return names
}

// loadHostDir reads hosts.toml, or Docker's certificate files where there is none.
// The last host returned is the server.
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

// loadCertFiles reads Docker's layout: *.crt are CA certificates, *.cert client
// certificates with their key in *.key or in the same file.
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

// hostTable is a host's table in hosts.toml, and its top level for the server.
// Other keys are ignored, as in containerd: the file may be written for a newer one.
type hostTable struct {
	Capabilities []string       `toml:"capabilities"`
	CA           any            `toml:"ca"`     // string or list
	Client       any            `toml:"client"` // string, list of strings, list of pairs
	SkipVerify   *bool          `toml:"skip_verify"`
	Header       map[string]any `toml:"header"` // values: string or list
	OverridePath bool           `toml:"override_path"`
	DialTimeout  string         `toml:"dial_timeout"`
}

// parseHosts parses a hosts.toml found in dir: the host tables in the order of
// the file, then the server.
func parseHosts(dir string, data []byte) ([]hostConfig, error) {
	var doc struct {
		hostTable
		Server string               `toml:"server"`
		Hosts  map[string]hostTable `toml:"host"`
	}
	if err := toml.Unmarshal(data, &doc); err != nil {
		return nil, err
	}
	var hosts []hostConfig
	for i, name := range hostOrder(data, doc.Hosts) { // errors count them: a URL may hold a password
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
	return append(hosts, server), nil
}

// hostOrder returns the names of the host tables as they appear in the file,
// which is the order they are tried in; a TOML decoder into a map loses it.
// Names that are not in table headers (inline tables) follow, sorted.
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

// parseHost converts one table. An empty name leaves scheme, host and path open.
func parseHost(name, dir string, t hostTable) (hostConfig, error) {
	h := hostConfig{skipVerify: t.SkipVerify}
	var err error
	if name != "" {
		if err := h.setURL(name, t.OverridePath); err != nil {
			return h, err
		}
	}
	if h.caps, err = parseCapabilities(t.Capabilities); err != nil {
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
	if h.header, err = parseHeader(t.Header); err != nil {
		return h, err
	}
	if t.DialTimeout != "" {
		if h.dialTimeout, err = time.ParseDuration(t.DialTimeout); err != nil || h.dialTimeout <= 0 {
			return h, fmt.Errorf("dial_timeout %q is not a positive duration", clip(t.DialTimeout))
		}
	}
	return h, nil
}

// setURL takes scheme, host and API root from a host's URL. The root is /v2 below
// the URL's path unless the path ends in it or override says it is the root.
func (h *hostConfig) setURL(raw string, override bool) error {
	if !strings.Contains(raw, "://") {
		raw = "https://" + raw
	}
	u, err := url.Parse(raw)
	if err != nil {
		return errors.New("is not a URL") // the parser's text would show a password
	}
	if u.Scheme != "http" && u.Scheme != "https" || u.Hostname() == "" {
		return errors.New("is not an http or https URL with a host")
	}
	if u.User != nil {
		return errors.New("credentials in the URL are not supported")
	}
	h.scheme, h.host = u.Scheme, apiHost(u.Host)
	if u.Path != "" {
		h.path = path.Clean(u.Path)
	}
	if !override && !strings.HasSuffix(h.path, "/v2") {
		h.path = path.Join("/", h.path, "v2")
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
			return 0, fmt.Errorf("unknown capability %q", clip(n))
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
		values, err := stringList("header "+clip(name), v)
		if err != nil {
			return nil, err
		}
		if !httpguts.ValidHeaderFieldName(name) {
			return nil, fmt.Errorf("header %q: not a header's name", clip(name))
		}
		for _, value := range values {
			if !httpguts.ValidHeaderFieldValue(value) { // which may be a secret
				return nil, fmt.Errorf("header %s: a value has characters that cannot be sent", clip(name))
			}
			h.Add(name, value)
		}
	}
	return h, nil
}

// absolute resolves a file name against the directory of its hosts.toml. Empty
// stays empty: a pair without a key file.
func absolute(dir, name string) string {
	if name == "" || filepath.IsAbs(name) {
		return name
	}
	return filepath.Join(dir, name)
}

// setDefault fills in the registry's own place. On loopback the scheme depends on
// the port, as in containerd: none or 443 means https, 80 http, and any other
// https first, without verification, then http.
func (h *hostConfig) setDefault(domain string) {
	h.scheme, h.host, h.path, h.caps = "https", apiHost(domain), "/v2", allCapabilities
	if !isLoopback(domain) {
		return
	}
	port := portOf(domain)
	if port != "" && port != "443" {
		h.scheme = "http"
	}
	if port != "80" {
		insecure := true
		h.skipVerify = &insecure
	}
}

// apiHost returns where a registry is asked. Docker Hub's name is that of a web
// site; many a hosts.toml has it as its server all the same.
func apiHost(host string) string {
	if host == dockerHub {
		return "registry-1.docker.io"
	}
	return host
}

// settle decides what depends on the whole: an http host with TLS options is
// asked by https first, and a host that is the registry by name is its home.
func (h *hostConfig) settle(domain string) {
	if h.scheme == "http" && h.explicitTLS() && portOf(h.host) != "80" {
		h.scheme, h.plainNext = "https", true
	}
	if canonicalHost(h.host) == canonicalHost(domain) {
		h.home = true
	}
}

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
