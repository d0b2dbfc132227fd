package config

import (
	"errors"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode"
)

// validate checks every value and cleans paths. where returns the origin of a key's value, for
// error texts.
func (c *Config) validate(where func(key string) string) error {
	var all []error
	for _, o := range options() {
		if err := o.check(fields(c)); err != nil {
			all = append(all, fmt.Errorf("%s: %w", where(o.Key), err))
		}
	}
	for _, t := range tables() {
		all = append(all, t.check(c, where)...)
	}
	all = append(all, c.checkHandlers(where)...)
	all = append(all, c.checkDefaults(where)...)
	if len(all) == 0 && overlap(c.Root, c.State) {
		all = append(all,
			fmt.Errorf("root %s and state %s must be separate directories, neither inside the other", c.Root, c.State))
	}
	if err := checkEndpoint(c.TracingEndpoint); err != nil {
		all = append(all, fmt.Errorf("%s: %w", where("tracing.endpoint"), err))
	}
	if err := checkMetricsAddress(c.MetricsAddress); err != nil {
		all = append(all, fmt.Errorf("%s: %w", where("metrics.address"), err))
	}
	if len(all) == 0 {
		all = append(all, c.checkStream(), c.checkPeers())
	}
	return errors.Join(all...)
}

// checkEndpoint accepts a host and a port, or an empty string.
func checkEndpoint(endpoint string) error {
	if endpoint == "" {
		return nil
	}
	host, port, err := net.SplitHostPort(endpoint)
	if _, notPort := strconv.ParseUint(port, 10, 16); err != nil || host == "" || notPort != nil {
		return fmt.Errorf("%q is not a host and a port, such as 127.0.0.1:4317", endpoint)
	}
	return nil
}

// checkMetricsAddress accepts an IP address and a port, the unix:// URL of a socket, or an empty
// string.
func checkMetricsAddress(address string) error {
	if path, ok := strings.CutPrefix(address, "unix://"); ok {
		if !filepath.IsAbs(path) || len(path) > maxSocketPath {
			return fmt.Errorf("%q is not the absolute path of a socket", address)
		}
		return nil
	}
	if address == "" {
		return nil
	}
	if _, err := netip.ParseAddrPort(address); err != nil {
		return fmt.Errorf("%q is not an IP address and a port, like 127.0.0.1:9464, or a unix:// URL", address)
	}
	return nil
}

// handlerName matches a RuntimeClass's handler, a DNS label (k8s.io/api/node/v1,
// RuntimeClass.handler).
var handlerName = regexp.MustCompile(`^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$`)

// checkHandlers checks the names of handlers, and the options that refer to them.
func (c *Config) checkHandlers(where func(key string) string) []error {
	var all []error
	for _, name := range slices.Sorted(maps.Keys(c.Handlers)) {
		key := "handlers." + name
		switch h := c.Handlers[name]; {
		case name == BuiltinHandler:
			all = append(all, fmt.Errorf("%s: %s is the built-in handler", where(key), name))
		case !handlerName.MatchString(name):
			all = append(
				all,
				fmt.Errorf(
					"%s: %q is not a name that a RuntimeClass may have as its handler: lower case letters, digits and -, at most 63",
					where(key),
					name,
				),
			)
		case h.Path == "" && len(h.Args) > 0:
			all = append(all, fmt.Errorf("%s: the built-in runtime takes no options; is a path missing?", where(key+".args")))
		case h.Path == "" && (h.Type == "shim" || len(h.Options) > 0):
			all = append(all, fmt.Errorf("%s: a shim needs a path", where(key)))
		case h.Type == "shim" && len(h.Args) > 0:
			all = append(all, fmt.Errorf("%s: a shim takes no arguments, but options", where(key+".args")))
		case h.Type != "shim" && len(h.Options) > 0:
			all = append(all, fmt.Errorf("%s: only a shim has options; is type = \"shim\" missing?", where(key+".options")))
		case h.Path == "" && len(h.PodAnnotations)+len(h.ContainerAnnotations) > 0:
			all = append(all, fmt.Errorf("%s: the built-in runtime takes no annotations; is a path missing?", where(key)))
		}
	}
	if _, ok := c.Handlers[c.DefaultHandler]; !ok && c.DefaultHandler != BuiltinHandler {
		all = append(all, fmt.Errorf("%s: no handler %q", where("default_handler"), c.DefaultHandler))
	}
	return all
}

// check validates the option's value in a struct, and cleans it if it is a path.
func (o option) check(of reflect.Value) error {
	switch p := o.pointer(of).(type) {
	case *string:
		return o.checkText(p)
	case *[]string:
		for i := range *p {
			if err := o.checkText(&(*p)[i]); err != nil {
				return err
			}
			if (*p)[i] == "" {
				return fmt.Errorf("element %d of the list is empty", i+1)
			}
		}
	case *int:
		var least, most int
		if _, err := fmt.Sscan(o.min, &least); err == nil && *p < least {
			return fmt.Errorf("%d is less than %d", *p, least)
		}
		if _, err := fmt.Sscan(o.max, &most); err == nil && *p > most {
			return fmt.Errorf("%d is more than %d", *p, most)
		}
	case *Duration:
		if least, err := time.ParseDuration(o.min); err == nil && p.Duration < least {
			return fmt.Errorf("%s is shorter than %s", *p, Duration{least})
		}
	}
	return nil
}

func (o option) checkText(p *string) error {
	if strings.ContainsFunc(*p, unicode.IsControl) {
		return fmt.Errorf("%q contains a control character", *p)
	}
	if instead := removedValues[o.Key][*p]; instead != "" {
		return fmt.Errorf("%q is no longer a value: %s", *p, instead)
	}
	if len(o.oneof) > 0 && !slices.Contains(o.oneof, *p) {
		return fmt.Errorf("%q is not one of %s", *p, strings.Join(o.oneof, ", "))
	}
	switch {
	case o.path == "", o.path == "optional" && *p == "":
		return nil
	case o.path == "socket":
		return cleanSocket(p)
	default:
		return cleanPath(p)
	}
}

// cleanPath checks that *p is absolute, and cleans it.
func cleanPath(p *string) error {
	if *p == "" {
		return errors.New("the path is empty")
	}
	if !filepath.IsAbs(*p) {
		return fmt.Errorf("%q is not an absolute path", *p)
	}
	*p = filepath.Clean(*p)
	if *p == "/" {
		return errors.New("the path is the root directory")
	}
	return nil
}

// maxSocketPath is the size of sockaddr_un.sun_path without its final NUL.
const maxSocketPath = 107

// cleanSocket accepts a path or a unix URL (unix:///path, unix:/path) and stores the path in *p.
func cleanSocket(p *string) error {
	text := *p
	if rest, ok := strings.CutPrefix(text, "unix:"); ok {
		*p = rest
		if strings.HasPrefix(rest, "//") {
			*p = rest[2:]
		}
	} else if scheme, _, ok := strings.Cut(text, "://"); ok {
		return fmt.Errorf("%q: only unix sockets are served, not %q", text, scheme)
	}
	if err := cleanPath(p); err != nil {
		return err
	}
	if len(*p) > maxSocketPath {
		return fmt.Errorf("%q is longer than the %d bytes a unix socket's path may have", *p, maxSocketPath)
	}
	return nil
}

// overlap reports whether two clean paths are equal, or one contains the other.
func overlap(a, b string) bool {
	return a == b || strings.HasPrefix(a, b+"/") || strings.HasPrefix(b, a+"/")
}
