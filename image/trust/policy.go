package trust

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"strconv"
	"strings"

	"go.podman.io/image/v5/docker/policyconfiguration"
	podmanref "go.podman.io/image/v5/docker/reference"

	"berth/image/registry"
	"berth/image/trust/worker"
)

// policy is a policy.json. Package worker checks the requirements.
type policy struct {
	Default    []requirement                       `json:"default"`
	Transports map[string]map[string][]requirement `json:"transports"` // transport → scope → requirements
}

type requirement map[string]any

// Types of requirements.
const (
	acceptAnything = "insecureAcceptAnything"
	rejectAll      = "reject"
	signedBy       = "signedBy"       // OpenPGP
	sigstoreSigned = "sigstoreSigned" // sigstore
)

// dockerTransport is the transport of images from registries.
const dockerTransport = "docker"

// maxPolicy limits the size of a policy and of a key file, in bytes.
const maxPolicy = 1 << 20

// readPolicy reads the policy for a namespace: <dir>/<namespace>.json if it exists, else file. It
// returns nil if neither is configured.
func (c Config) readPolicy(namespace string) (*policy, error) {
	file := c.Policy
	if c.PolicyDir != "" && namespace != "" {
		if namespace != filepath.Base(namespace) || strings.HasPrefix(namespace, ".") {
			return nil, fmt.Errorf("namespace %q has no valid name", namespace)
		}
		own := filepath.Join(c.PolicyDir, namespace+".json")
		if _, err := os.Stat(own); err == nil {
			file = own
		} else if !errors.Is(err, fs.ErrNotExist) {
			return nil, err
		}
	}
	if file == "" {
		return nil, nil
	}
	data, err := readLimited(file)
	if err != nil {
		return nil, err
	}
	p, err := parsePolicy(data)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", file, err)
	}
	return p, nil
}

// parsePolicy parses a policy.json strictly, because a misspelled key must not weaken the policy.
func parsePolicy(data []byte) (*policy, error) {
	p := new(policy)
	d := json.NewDecoder(bytes.NewReader(data))
	d.DisallowUnknownFields()
	if err := d.Decode(p); err != nil {
		return nil, fmt.Errorf("parse policy: %w", err)
	}
	if d.More() {
		return nil, errors.New("parse policy: text after the policy")
	}
	if len(p.Default) == 0 {
		return nil, errors.New("parse policy: default has no requirements")
	}
	for transport, scopes := range p.Transports {
		for scope, requirements := range scopes {
			if len(requirements) == 0 {
				return nil, fmt.Errorf("parse policy: scope %q of transport %q has no requirements", scope, transport)
			}
		}
	}
	return p, nil
}

// requirements returns the requirements for an image: those of the most specific scope.
func (p *policy) requirements(ref registry.Reference) ([]requirement, error) {
	named, err := podmanref.ParseNormalizedNamed(ref.String())
	if err != nil {
		return nil, err
	}
	identity, err := policyconfiguration.DockerReferenceIdentity(named)
	if err != nil {
		return nil, err
	}
	scopes := append([]string{identity}, policyconfiguration.DockerReferenceNamespaces(named)...)
	for _, scope := range append(scopes, "") {
		if found, ok := p.Transports[dockerTransport][scope]; ok {
			return found, nil
		}
	}
	return p.Default, nil
}

// all reports whether all requirements have a type. has reports whether at least one has the type.
func all(list []requirement, kind string) bool {
	for _, r := range list {
		if r["type"] != kind {
			return false
		}
	}
	return true
}

func has(list []requirement, kind string) bool {
	for _, r := range list {
		if r["type"] == kind {
			return true
		}
	}
	return false
}

// files are the content of a directory for berth-verify, by path.
type files map[string][]byte

// putPolicy adds a policy with the requirements as its default, and the key files that they name.
func (f files) putPolicy(list []requirement) error {
	copied, err := f.withKeys(map[string]any{"default": asAny(list)})
	if err != nil {
		return err
	}
	data, err := json.Marshal(copied)
	f[worker.PolicyFile] = data
	return err
}

func asAny(list []requirement) (values []any) {
	for _, r := range list {
		values = append(values, map[string]any(r))
	}
	return values
}

// withKeys returns a copy of a JSON value. In the copy, each key that ends in Path or Paths names a
// copy of the original file.
func (f files) withKeys(value any) (any, error) {
	switch v := value.(type) {
	case map[string]any:
		copied := map[string]any{}
		for key, child := range v {
			var err error
			if strings.HasSuffix(key, "Path") || strings.HasSuffix(key, "Paths") {
				child, err = f.copyKeys(child)
			} else {
				child, err = f.withKeys(child)
			}
			if err != nil {
				return nil, err
			}
			copied[key] = child
		}
		return copied, nil
	case []any:
		copied := make([]any, 0, len(v))
		for _, child := range v {
			child, err := f.withKeys(child)
			if err != nil {
				return nil, err
			}
			copied = append(copied, child)
		}
		return copied, nil
	}
	return value, nil
}

// copyKeys copies the file with the given name, or the files of a list, and returns their new
// names.
func (f files) copyKeys(value any) (any, error) {
	switch v := value.(type) {
	case string:
		data, err := readLimited(v)
		if err != nil {
			return nil, fmt.Errorf("read key: %w", err)
		}
		name := path.Join(worker.KeyDir, strconv.Itoa(len(f)))
		f[name] = data
		return "/" + name, nil
	case []any:
		copied := make([]any, 0, len(v))
		for _, name := range v {
			name, err := f.copyKeys(name)
			if err != nil {
				return nil, err
			}
			copied = append(copied, name)
		}
		return copied, nil
	}
	return value, nil
}

// readLimited reads a small file.
func readLimited(name string) ([]byte, error) {
	info, err := os.Stat(name)
	if err != nil {
		return nil, err
	}
	if !info.Mode().IsRegular() || info.Size() > maxPolicy {
		return nil, fmt.Errorf("%s is not a regular file of at most %d bytes", name, maxPolicy)
	}
	return os.ReadFile(name)
}
