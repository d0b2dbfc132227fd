package registry

import (
	"fmt"
	"regexp"
	"strings"

	"github.com/distribution/reference"
	"github.com/opencontainers/go-digest"

	"berth/internal/errdefs"
)

// Reference is a normalized image reference: short names of Docker Hub are expanded and a missing
// tag is "latest". Exactly one of Tag and Digest is set. [ParseReference] returns it.
type Reference struct {
	Domain     string // registry host as written, "docker.io" for Docker Hub
	Repository string // path below the host
	Tag        string
	Digest     digest.Digest
}

// ParseReference parses a reference as the Docker CLI and containerd do. If it has both a tag and a
// digest, it drops the tag, because nothing checks that they belong together. Errors have
// codes.InvalidArgument.
func ParseReference(s string) (Reference, error) {
	if fault := registryFault(s); fault != "" {
		return Reference{}, errdefs.InvalidArgument("image reference %q: %s", s, fault)
	}
	named, err := reference.ParseDockerRef(s)
	if err != nil {
		return Reference{}, errdefs.InvalidArgument("image reference %q: %w", s, err)
	}
	r := Reference{Domain: reference.Domain(named), Repository: reference.Path(named)}
	switch n := named.(type) {
	case reference.Canonical:
		r.Digest = n.Digest()
		if err := checkDigest(r.Digest); err != nil {
			return Reference{}, errdefs.InvalidArgument("image reference %q: %w", s, err)
		}
	case reference.Tagged:
		r.Tag = n.Tag()
	}
	return r, nil
}

var registryName = regexp.MustCompile("^(?:" + reference.DomainRegexp.String() + ")$")

// registryFault says what is wrong with the registry in a reference, or returns "". The library
// gives no reason for its errors, and takes some of these names for a path.
func registryFault(s string) string {
	host, _, ok := strings.Cut(s, "/")
	switch isRegistry := ok && (strings.ContainsAny(host, ".:") || strings.ToLower(host) != host); {
	case strings.Contains(s, "://"):
		return "it is a URL, not a name"
	case !isRegistry || registryName.MatchString(host):
		return ""
	case strings.Contains(host, "_"):
		return fmt.Sprintf("registry name %q: host names have no underscore", errdefs.Clip(host))
	default:
		return fmt.Sprintf("registry name %q is not valid", errdefs.Clip(host))
	}
}

// Name returns host and path, without tag or digest.
func (r Reference) Name() string { return r.Domain + "/" + r.Repository }

// String returns the normalized reference.
func (r Reference) String() string {
	if r.Digest != "" {
		return r.WithDigest(r.Digest)
	}
	return r.Name() + ":" + r.Tag
}

// WithDigest returns the reference's name at a digest, as in CRI's repo_digests.
func (r Reference) WithDigest(d digest.Digest) string { return r.Name() + "@" + d.String() }

// identifier returns the <reference> of the registry API.
func (r Reference) identifier() string {
	if r.Digest != "" {
		return r.Digest.String()
	}
	return r.Tag
}

// checkDigest returns an error unless a digest is well-formed and of a supported algorithm. It must
// pass before the digest is used in a URL or path.
func checkDigest(d digest.Digest) error {
	if err := d.Validate(); err != nil {
		return errdefs.InvalidArgument("digest %q: %w", errdefs.Clip(string(d)), err)
	}
	if a := d.Algorithm(); a != digest.SHA256 && a != digest.SHA512 {
		return errdefs.InvalidArgument("digest %q: algorithm is neither sha256 nor sha512", errdefs.Clip(string(d)))
	}
	return nil
}
