package registry

import (
	"os"
	"strconv"
	"strings"
	"sync/atomic"

	podmanref "go.podman.io/image/v5/docker/reference"
	"go.podman.io/image/v5/pkg/sysregistriesv2"
	"go.podman.io/image/v5/types"

	"berth/internal/errdefs"
)

// names is a registries.conf and the files of its directory, see containers-registries.conf(5):
// aliases of short names, search registries, mirrors, rewritten locations and blocked registries.
// A nil *names is empty.
//
// The library adds 180 KB to the program and no measurable memory, so it needs no process of its
// own.
type names struct{ system *types.SystemContext }

// generations numbers the configurations that this process has read.
var generations atomic.Int64

// loadNames reads a registries.conf and the directory beside it. An empty path is no configuration.
// A missing or invalid file is FailedPrecondition.
func loadNames(path string) (*names, error) {
	if path == "" {
		return nil, nil
	}
	if _, err := os.Stat(path); err != nil { // the library accepts a missing file
		return nil, errdefs.FailedPrecondition("read registries.conf: %w", err)
	}
	n := &names{&types.SystemContext{
		SystemRegistriesConfPath:    path,
		SystemRegistriesConfDirPath: path + ".d",
		// The aliases that podman's users chose interactively must have no effect.
		UserShortNameAliasConfPath: "/proc/self/no-such-file",
		// The library keeps the content of the files in a map with this key. The number makes the
		// key unique, so the old configuration stays in use until the new one is loaded.
		RootForImplicitAbsolutePaths: "/" + strconv.FormatInt(generations.Add(1), 10),
	}}
	if _, err := sysregistriesv2.TryUpdatingCache(n.system); err != nil {
		return nil, errdefs.FailedPrecondition("read registries.conf: %w", err)
	}
	return n, nil
}

// candidates returns the references that an image name may stand for, in the order to try them. A
// name with a registry is one reference. A short name is replaced by its alias, or else by the name
// in each search registry. If there are no search registries, it is a name at Docker Hub. Errors:
// InvalidArgument; FailedPrecondition if short-name-mode does not allow several registries.
func (n *names) candidates(name string) ([]Reference, error) {
	ref, err := ParseReference(name)
	if err != nil || n == nil || !isShort(name) {
		return []Reference{ref}, err
	}
	repository, suffix := name, ""
	if i := strings.IndexAny(name, ":@"); i >= 0 {
		repository, suffix = name[:i], name[i:]
	}
	alias, _, err := sysregistriesv2.ResolveShortNameAlias(n.system, repository)
	if err != nil {
		return nil, errdefs.FailedPrecondition("short name %q: %w", errdefs.Clip(name), err)
	}
	if alias != nil {
		ref, err := ParseReference(alias.Name() + suffix)
		return []Reference{ref}, err
	}
	registries, err := sysregistriesv2.UnqualifiedSearchRegistries(n.system)
	if err != nil {
		return nil, errdefs.FailedPrecondition("short name %q: %w", errdefs.Clip(name), err)
	}
	if len(registries) == 0 {
		return []Reference{ref}, nil
	}
	mode, err := sysregistriesv2.GetShortNameMode(n.system)
	if err != nil {
		return nil, errdefs.FailedPrecondition("short name %q: %w", errdefs.Clip(name), err)
	}
	if mode == types.ShortNameModeEnforcing && len(registries) > 1 {
		return nil, errdefs.FailedPrecondition("short name %q is ambiguous: name its registry, add an alias, or set short-name-mode "+
			"(search registries: %s)", errdefs.Clip(name), strings.Join(registries, ", "))
	}
	all := make([]Reference, 0, len(registries))
	for _, registry := range registries {
		ref, err := ParseReference(registry + "/" + name)
		if err != nil {
			return nil, err
		}
		all = append(all, ref)
	}
	return all, nil
}

// isShort reports whether a valid image name has no registry.
func isShort(name string) bool {
	first, _, ok := strings.Cut(name, "/")
	return !ok || !strings.ContainsAny(first, ".:") && first != "localhost" && strings.ToLower(first) == first
}

// source is a place that serves an image.
type source struct {
	Reference
	home     bool   // is the image's registry, perhaps at a rewritten location, and no mirror
	insecure bool   // certificates are not verified, and plain HTTP is tried
	proxy    string // namespace-proxy: the registry behind a proxy
}

// sources returns the places that serve an image, in the order to try them. registries.conf defines
// the mirrors and may rewrite the location. A blocked registry is FailedPrecondition.
func (n *names) sources(ref Reference) ([]source, error) {
	own := []source{{Reference: ref, home: true}}
	if n == nil {
		return own, nil
	}
	found, err := sysregistriesv2.FindRegistry(n.system, ref.String())
	if err != nil || found == nil {
		return own, err
	}
	if found.Blocked {
		return nil, errdefs.FailedPrecondition("registry %s is blocked by registries.conf", found.Prefix)
	}
	named, err := podmanref.ParseNormalizedNamed(ref.String())
	if err != nil {
		return nil, errdefs.InvalidArgument("image reference %q: %w", ref, err)
	}
	places, err := found.PullSourcesFromReference(named)
	if err != nil {
		return nil, errdefs.FailedPrecondition("registries.conf: %w", err)
	}
	all := make([]source, 0, len(places))
	for i, p := range places {
		at, err := ParseReference(p.Reference.String())
		if err != nil {
			return nil, errdefs.FailedPrecondition("registries.conf: %w", err)
		}
		all = append(all, source{
			Reference: at,
			home:      i == len(places)-1 || canonicalHost(at.Domain) == canonicalHost(ref.Domain),
			insecure:  p.Endpoint.Insecure,
			proxy:     p.Endpoint.NamespaceProxy,
		})
	}
	return all, nil
}

// places returns the hosts that serve a source. certs.d configures each of them. Mirrors of
// registries.conf get no credentials of the image's registry.
func (s source) places(dirs []string) ([]hostConfig, error) {
	hosts, err := loadHosts(dirs, s.Domain)
	if err != nil {
		return nil, err
	}
	server := &hosts[len(hosts)-1]
	if s.insecure && !server.explicitTLS() {
		insecure := true
		server.skipVerify, server.PlainNext = &insecure, server.Scheme == "https"
	}
	for i := range hosts {
		hosts[i].Home = hosts[i].Home && s.home
	}
	return hosts, nil
}

// loaded has sources and the registries.conf that was read for them.
type loaded struct {
	Sources
	names *names
}

// Check returns an error for sources that a client refuses.
func (s Sources) Check() error {
	_, err := s.load()
	return err
}

func (s Sources) load() (*loaded, error) {
	for _, file := range s.AuthFiles {
		if file != StandardAuthFiles && !strings.HasPrefix(file, "/") {
			return nil, errdefs.FailedPrecondition("credential file %q: neither an absolute path nor %q", file, StandardAuthFiles)
		}
	}
	n, err := loadNames(s.RegistriesConf)
	return &loaded{s, n}, err
}

// Candidates returns the references that an image name may stand for, in the order to try them. It
// does not read the disk. Errors: InvalidArgument; FailedPrecondition if the name is ambiguous.
func (c *Client) Candidates(name string) ([]Reference, error) {
	return c.sources.Load().names.candidates(name)
}
