// Package registry parses image references and fetches images from OCI distribution registries:
// host configuration, authentication, manifests and blobs.
//
// # Contract
//
// A [Client] opens the [Repository] of a [Reference]. [Repository.Resolve] finds the image, and
// [Repository.Blob] reads its layers. Everything this package returns has the requested digest and
// size. A digest is validated before it becomes part of a URL. The size of a registry's answers is
// limited (see the constants in manifest.go). An error quotes only the code and the message of a
// registry error, shortened. URLs appear in errors as scheme and host only, because the path and
// query of a redirect may contain tokens.
//
// # Hosts
//
// A registry host is configured as for containerd, by <dir>/<host>/hosts.toml or by Docker's
// certificate files in the same directory. dir is the first of Dirs in [Sources] that has a
// directory for the host. If none has, <dir>/_default counts. The files are read for every pull.
// Hosts are tried in the order of the file, the server last. The error of the last host decides the
// code of a failure. The text has the errors of all hosts. Unlike in containerd, an invalid
// hosts.toml fails the pull, because the pull's security may depend on it. Unknown keys are logged
// with their lines and have no effect.
//
// A registries.conf (containers-registries.conf(5)) is applied before that. It expands short names,
// blocks registries and decides which locations serve an image. Each location then has its own
// folder in certs.d. "insecure" counts only for a location without TLS options in certs.d.
//
// # Credentials
//
// A credential is sent to one host only: to the host in its server address, or else to the registry
// of the pulled image. It never goes to a mirror with another host name, to the target of a
// redirect or to a URL in a manifest (CVE-2020-15157). A mirror that requires authentication gets
// the credentials for its own host in docker's config.json, or the header that hosts.toml
// configures for it. Headers in hosts.toml are also sent to their host only. A rewritten location
// in registries.conf counts as the image's registry, and a mirror in registries.conf does not.
//
// In a credential file, a helper for the host comes first. Then come the entry with the longest
// matching path, and the default helper.
//
// Docker's config.json and credential helpers are read by this package and not by docker/cli's
// config package. The latter runs helpers without a deadline and without a limit for their output.
// It quotes their output in errors, which may contain secrets. It does not find an entry with
// another spelling of the host.
//
// # Redirects
//
// A registry chooses its redirects and token servers, and the author of any pod chooses the
// registry. A guard (redirectGuard) forbids targets that are closer to this machine than the
// registry: loopback, link-local addresses and the metadata services of clouds. The key redirect_to
// in hosts.toml, which only berth has, allows addresses and networks. For a request through a proxy
// the guard checks only an address in the URL, because the proxy's operator decides where the proxy
// connects.
//
// A registry's client certificates and skip_verify apply to the registry. As in containerd, they
// also apply to its token server, which gets the registry's passwords too. They do not apply to the
// targets of redirects. A token server or target with its own directory in Dirs has the TLS options
// of that directory instead.
//
// The URLs in the descriptor of a layer are asked only if no host has it. The rules of redirects
// apply to them. They never get a client certificate, because the author of the manifest has chosen
// them.
//
// # Errors
//
// Errors carry gRPC codes. NotFound, Unauthenticated and PermissionDenied come from the registry.
// InvalidArgument is for references and credentials that cannot be parsed. FailedPrecondition is
// for invalid host configuration, forbidden redirects, invalid documents and images that this node
// cannot run. DataLoss is for content with a wrong digest or size. A registry that cannot be
// reached or that is failing is an [*UnavailableError].
package registry
