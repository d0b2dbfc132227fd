package registry

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"berth/internal/capture"
	"berth/internal/errdefs"
)

// helperTimeout limits the run of a credential helper.
const helperTimeout = 30 * time.Second

// dockerConfig is the part of docker's config.json with credentials.
type dockerConfig struct {
	Auths       map[string]dockerAuth `json:"auths"`
	CredHelpers map[string]string     `json:"credHelpers"` // host → helper
	CredsStore  string                `json:"credsStore"`  // helper for all other hosts
}

type dockerAuth struct {
	Username      string `json:"username"`
	Password      string `json:"password"`
	Auth          string `json:"auth"`
	IdentityToken string `json:"identitytoken"`
	RegistryToken string `json:"registrytoken"`
}

// loadDockerConfig reads a config.json. A missing file is empty.
func loadDockerConfig(path string) (dockerConfig, error) {
	var c dockerConfig
	if path == "" {
		return c, nil
	}
	data, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return c, nil
	}
	if err != nil {
		return c, errdefs.FailedPrecondition("read registry credentials: %w", err)
	}
	var kind *json.UnmarshalTypeError
	switch err := json.Unmarshal(data, &c); {
	case errors.As(err, &kind):
		return c, errdefs.FailedPrecondition("read registry credentials: %s: %s", path, typeFault(kind))
	case err != nil: // the decoder's text may quote a secret
		return c, errdefs.FailedPrecondition("read registry credentials: %s is not valid JSON", path)
	}
	return c, nil
}

// lookup returns the credentials for a repository of a host. It asks the host's helper first, then
// the file's entry with the longest part of the repository's path, then the credentials store. It
// is no error if there are none.
func (c dockerConfig) lookup(ctx context.Context, host, repository string) (Credentials, error) {
	want := canonicalHost(host)
	if key, ok := findHost(c.CredHelpers, want, ""); ok {
		return runHelper(ctx, c.CredHelpers[key], key)
	}
	for scope, more := repository, true; more; {
		if key, ok := findHost(c.Auths, want, scope); ok {
			return c.Auths[key].credentials()
		}
		more = scope != ""
		scope = scope[:max(0, strings.LastIndexByte(scope, '/'))]
	}
	if c.CredsStore != "" {
		return runHelper(ctx, c.CredsStore, storeKey(want))
	}
	return Credentials{}, nil
}

// findHost returns the shortest key of m for a host and a path on it. See containers-auth.json(5)
// for paths.
func findHost[V comparable](m map[string]V, want, scope string) (string, bool) {
	var empty V
	best, found := "", false
	for key, value := range m {
		if value == empty || canonicalHost(key) != want || scopeOf(key) != scope {
			continue
		}
		if !found || len(key) < len(best) || len(key) == len(best) && key < best {
			best, found = key, true
		}
	}
	return best, found
}

// scopeOf returns the path of a key: the part of a registry that the key is for. It is "" for the
// whole registry, even if `docker login` has appended the API version.
func scopeOf(key string) string {
	if _, rest, ok := strings.Cut(key, "://"); ok {
		key = rest
	}
	_, path, _ := strings.Cut(key, "/")
	path = strings.Trim(path, "/")
	if path == "v1" || path == "v2" {
		return ""
	}
	return path
}

// StandardAuthFiles stands for the files of standardAuthFiles in AuthFiles of [Sources].
const StandardAuthFiles = "default"

// standardAuthFiles returns the files where podman, docker and kubelet keep root's credentials, see
// containers-auth.json(5). systemd sets no HOME for services.
func standardAuthFiles() []string {
	home, err := os.UserHomeDir()
	if err != nil {
		home = "/root"
	}
	var files []string
	if dir := os.Getenv("XDG_RUNTIME_DIR"); dir != "" {
		files = append(files, filepath.Join(dir, "containers/auth.json"))
	}
	return append(files,
		"/run/containers/0/auth.json",
		filepath.Join(cmp.Or(os.Getenv("XDG_CONFIG_HOME"), filepath.Join(home, ".config")), "containers/auth.json"),
		filepath.Join(cmp.Or(os.Getenv("DOCKER_CONFIG"), filepath.Join(home, ".docker")), "config.json"),
		"/var/lib/kubelet/config.json",
	)
}

// files returns the credential files in the order in which they are searched.
func (s Sources) files() (files []string) {
	for _, file := range s.AuthFiles {
		if file == StandardAuthFiles {
			files = append(files, standardAuthFiles()...)
		} else {
			files = append(files, file)
		}
	}
	return append(files, s.DockerConfig)
}

// credentials returns the credentials for a repository of a host from the first file that has any.
func (s Sources) credentials(ctx context.Context, host, repository string) (Credentials, error) {
	for _, file := range s.files() {
		config, err := loadDockerConfig(file)
		if err != nil {
			return Credentials{}, err
		}
		found, err := config.lookup(ctx, host, repository)
		if err != nil || !found.isAnonymous() {
			return found, err
		}
	}
	return Credentials{}, nil
}

// storeKey returns the key that `docker login` uses for a host's credentials.
func storeKey(host string) string {
	if host == dockerHub {
		return "https://index.docker.io/v1/"
	}
	return host
}

func (a dockerAuth) credentials() (Credentials, error) {
	c := Credentials{
		Username:      a.Username,
		Password:      Secret(a.Password),
		IdentityToken: Secret(a.IdentityToken),
		RegistryToken: Secret(a.RegistryToken),
	}
	if a.Auth != "" {
		var err error
		if c.Username, c.Password, err = decodeAuth(a.Auth); err != nil {
			return Credentials{}, err
		}
	}
	if !c.RegistryToken.sendable() {
		return Credentials{}, errdefs.FailedPrecondition("registry credentials: registrytoken has characters that cannot be sent")
	}
	return c.normalize(), nil
}

// maxHelperOutput limits the output of a helper, in bytes.
const maxHelperOutput = 64 << 10

// runHelper runs docker-credential-<name> with the credential helper protocol. Errors do not quote
// its output.
func runHelper(ctx context.Context, name, server string) (Credentials, error) {
	if name == "" || strings.ContainsAny(name, "/\\") {
		return Credentials{}, errdefs.FailedPrecondition("credential helper %q: not a helper's name", errdefs.Clip(name))
	}
	ctx, cancel := context.WithTimeout(ctx, helperTimeout)
	defer cancel()
	cmd := exec.CommandContext(ctx, "docker-credential-"+name, "get")
	cmd.WaitDelay = time.Second // a grandchild may keep standard input open
	cmd.Stdin = strings.NewReader(server)
	out, err := capture.New(maxHelperOutput)
	if err != nil {
		return Credentials{}, fmt.Errorf("credential helper %s for %s: %w", name, server, err)
	}
	cmd.Stdout = out.File()
	err = cmd.Run()
	if err := errors.Join(err, out.End()); err != nil {
		if bytes.Contains(out.Bytes(), []byte("credentials not found")) {
			return Credentials{}, nil
		}
		return Credentials{}, fmt.Errorf("credential helper %s for %s: %w", name, server, err)
	}
	var reply struct{ Username, Secret string }
	if json.Unmarshal(out.Bytes(), &reply) != nil {
		return Credentials{}, fmt.Errorf("credential helper %s for %s: response is not valid JSON", name, server)
	}
	return Credentials{Username: reply.Username, Password: Secret(reply.Secret)}.normalize(), nil
}
