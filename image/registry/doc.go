// Package registry names images and fetches them from OCI distribution
// registries: references, per-host configuration, authentication, manifests and
// blobs.
//
// # Contract
//
// Everything this package returns has been checked against the digest and size
// by which it was asked for; a digest is validated before it becomes part of a
// URL. What a registry sends is capped (see the constants in manifest.go) and its
// text reaches an error only as the code and message of a registry error, cut
// short; URLs appear in errors as scheme and host only, since redirects carry
// tokens in their path and query.
//
// # Hosts
//
// The configuration of a registry host is containerd's: a directory
// <dir>/<host>/hosts.toml in the first of Config.Dirs that has one (then
// <dir>/_default), or the certificate files Docker keeps there. It is read anew
// for every pull. Hosts are tried in the order of the file, the server last; the
// error of the last host decides the code of a failure, the text names all.
// Unlike in containerd, a hosts.toml that cannot be read fails the pull instead
// of being ignored: what it configures may be what makes the pull trustworthy.
//
// # Credentials
//
// A credential goes to one host only: the one it names (server address), or the
// registry of the image it was given for. It never goes to a mirror with another
// host name, to the target of a redirect or to a URL that a manifest names
// (CVE-2020-15157). A mirror that wants authentication gets what docker's
// config.json has for the mirror's own host, or the header that hosts.toml
// configures for it. Headers from hosts.toml go to their host only, too.
//
// # Where a registry may send us
//
// Redirects and token servers are a registry's choice, and any pod may name a registry. They may lead to every
// other machine, but no nearer to this one than the registry is: not to loopback, unless the registry is there, nor
// to a link-local address, unless the registry has one or is on loopback, nor to the addresses that clouds tell their nodes'
// credentials at. A host's redirect_to in hosts.toml (berth's own key: an address or network, or a list) allows
// more. Each address is looked at when it is connected to; through a proxy, only one that the URL spells out.
// Private networks (RFC 1918, RFC 4193) count as other machines: there is where the storage and the token
// servers of private registries are. Client certificates are for the registry only, like other credentials.
//
// Errors carry gRPC codes: NotFound, Unauthenticated, PermissionDenied,
// InvalidArgument for references and credentials that cannot be parsed,
// FailedPrecondition for broken host configuration, for redirects that are not allowed and for images this node
// cannot run, DataLoss for content that fails its checks. A registry that cannot
// be reached or is failing is an *UnavailableError.
package registry
