package registry

import (
	"encoding/base64"
	"strings"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/internal/errdefs"
)

// Credentials authenticate to one registry host. The zero value is anonymous. [FromCRI] converts
// the credentials of a request.
type Credentials struct {
	Username      string
	Password      Secret
	IdentityToken Secret // OAuth2 refresh token, exchanged at the token server
	RegistryToken Secret // bearer token, sent to the registry as it is
	ServerAddress string // the host they are for; empty: the registry of the image
}

// identityUser is the user name that marks a password as an identity token in Docker's files.
const identityUser = "<token>"

// FromCRI converts the credentials of a PullImage call; nil is anonymous. Errors have
// codes.InvalidArgument and do not quote the credentials.
func FromCRI(a *runtimeapi.AuthConfig) (Credentials, error) {
	c := Credentials{
		Username:      a.GetUsername(),
		Password:      Secret(a.GetPassword()),
		IdentityToken: Secret(a.GetIdentityToken()),
		RegistryToken: Secret(a.GetRegistryToken()),
		ServerAddress: a.GetServerAddress(),
	}
	if c.Username == "" && a.GetAuth() != "" {
		var err error
		if c.Username, c.Password, err = decodeAuth(a.GetAuth()); err != nil {
			return Credentials{}, err
		}
	}
	if !c.RegistryToken.sendable() {
		return Credentials{}, errdefs.InvalidArgument("registry credentials: registry_token has characters that cannot be sent")
	}
	return c.normalize(), nil
}

// decodeAuth decodes base64(user:password), padded or not. Docker's old config
// files pad the password with NUL bytes.
func decodeAuth(auth string) (string, Secret, error) {
	raw, err := base64.RawStdEncoding.DecodeString(strings.TrimRight(strings.TrimSpace(auth), "="))
	if err != nil {
		return "", "", errdefs.InvalidArgument("registry credentials: auth is not valid base64")
	}
	user, password, ok := strings.Cut(string(raw), ":")
	if !ok {
		return "", "", errdefs.InvalidArgument("registry credentials: auth is not base64 of user:password")
	}
	return user, Secret(strings.Trim(password, "\x00")), nil
}

// normalize moves an identity token from the password to its field.
func (c Credentials) normalize() Credentials {
	if c.Username == identityUser && c.IdentityToken == "" {
		c.IdentityToken, c.Username, c.Password = c.Password, "", ""
	}
	return c
}

// isAnonymous reports whether there are no credentials.
func (c Credentials) isAnonymous() bool {
	return c.Username == "" && c.IdentityToken == "" && c.RegistryToken == ""
}

// hasPassword reports whether the credentials can be used for HTTP basic authentication.
func (c Credentials) hasPassword() bool { return c.Username != "" && c.Password != "" }

// belongTo reports whether credentials of a pull may be sent to a host. If they have no server
// address, they are for the image's registry, which is every host with Home set. Otherwise they are
// for the host with this address.
func (c Credentials) belongTo(host string, home bool, domain string) bool {
	if c.isAnonymous() {
		return false
	}
	if c.ServerAddress == "" {
		return home
	}
	server := canonicalHost(c.ServerAddress)
	return server == canonicalHost(host) || home && server == canonicalHost(domain)
}
