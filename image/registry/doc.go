// Package registry parses image references and fetches images from OCI distribution registries:
// host configuration, authentication, manifests and blobs.
//
// # Contract
//
// A [Client] opens the [Repository] of a [Reference]. [Repository.Resolve] finds the image, and
// [Repository.Blob] reads its layers. Everything this package returns matches the digest and size
// that it was requested by. A digest is validated before it becomes part of a URL. What a registry
// sends is limited in size (see the constants in manifest.go). Its text appears in an error only as
// the code and message of a registry error, shortened. URLs appear in errors as scheme and host
// only, because the path and query of a redirect may contain tokens.
//
// # Hosts
//
// The configuration of a registry host is containerd's: <dir>/<host>/hosts.toml in the first of
// Dirs in [Sources] that has that directory (then <dir>/_default), or Docker's certificate files
// there. It is read for every pull. Hosts are tried in the order of the file, the server last. The
// error of the last host decides the code of a failure; the text names all. Unlike in containerd,
// an invalid hosts.toml fails the pull, because the pull's security may depend on it. Unknown keys
// are logged with their lines and have no effect.
//
// A registries.conf (containers-registries.conf(5)) comes first: it expands short names, blocks
// registries and decides which locations serve an image. Each location is then reached as its own
// certs.d folder says. "insecure" counts only for a location without TLS options in certs.d.
//
// # Credentials
//
// A credential goes to one host only: the one that it names (server address), or the registry of
// the image that it was given for. It never goes to a mirror with another host name, to the target
// of a redirect or to a URL in a manifest (CVE-2020-15157). A mirror that requires authentication
// gets the credentials for its own host in docker's config.json, or the header that hosts.toml
// configures for it. Headers of hosts.toml also go to their host only. A location that
// registries.conf rewrites is still the image's registry, but a mirror there is not.
//
// Among the entries of a credential file, a helper for the host comes first, then the entry with
// the longest matching path, then the default helper.
//
// Docker's config.json and credential helpers are read by this package and not by docker/cli's
// config package. The latter runs helpers without a deadline and without a limit for their output,
// quotes their output in errors, which may contain secrets, and finds no entry with another
// spelling of the host.
//
// # Redirects
//
// A registry chooses its redirects and token servers, and any pod may name a registry. A guard
// (redirectGuard) forbids targets that are closer to this machine than the registry: loopback,
// link-local addresses and the metadata services of clouds. The key redirect_to in hosts.toml,
// which only berth has, allows addresses and networks. For a request through a proxy the guard
// checks only an address in the URL, because the proxy's operator decides where the proxy connects.
//
// A registry's client certificates and skip_verify apply to the registry and, as in containerd, to
// the token server that it names, which gets its passwords too. They do not apply to the targets of
// redirects. A token server or target with its own directory in Dirs has the TLS options of that
// directory instead.
//
// The URLs in the descriptor of a layer are asked only if no host has it. They follow the rules of
// redirects, but see no client certificate at all: whoever has pushed the manifest has chosen them.
//
// # Errors
//
// Errors carry gRPC codes: NotFound, Unauthenticated, PermissionDenied; InvalidArgument for
// references and credentials that cannot be parsed; FailedPrecondition for invalid host
// configuration, forbidden redirects, invalid documents and images that this node cannot run;
// DataLoss for content that has not the expected digest or size. A registry that cannot be reached
// or that is failing is an [*UnavailableError].
package registry
