package trust

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/opencontainers/go-digest"
	"go.podman.io/image/v5/docker/policyconfiguration"
	podmanref "go.podman.io/image/v5/docker/reference"
	"sigs.k8s.io/yaml"

	"berth/image/registry"
)

// registriesFile is a file in the format of containers-registries.d(5).
type registriesFile struct {
	DefaultDocker *registryEntry           `json:"default-docker"`
	Docker        map[string]registryEntry `json:"docker"`
}

type registryEntry struct {
	Lookaside string `json:"lookaside"`
	SigStore  string `json:"sigstore"` // the old name of lookaside
}

func (e registryEntry) url() string {
	if e.Lookaside != "" {
		return e.Lookaside
	}
	return e.SigStore
}

const (
	maxLookaside     = 64      // signatures of one document
	maxSignature     = 1 << 20 // bytes
	lookasideTimeout = time.Minute
)

// lookaside returns the OpenPGP signatures of a document from the store that RegistriesDir names
// for the image. If there is no store, it returns none.
func (c Config) lookaside(ctx context.Context, ref registry.Reference, d digest.Digest) (list [][]byte, err error) {
	store, err := c.lookasideURL(ref)
	if err != nil || store == "" {
		return nil, err
	}
	base, err := url.Parse(store)
	if err != nil {
		return nil, fmt.Errorf("lookaside %q: not a URL", store)
	}
	ctx, cancel := context.WithTimeout(ctx, lookasideTimeout)
	defer cancel()
	for i := 1; i <= maxLookaside; i++ {
		at := base.JoinPath(fmt.Sprintf("%s@%s=%s", ref.Repository, d.Algorithm(), d.Encoded()), fmt.Sprintf("signature-%d", i))
		data, err := fetchSignature(ctx, at)
		if errors.Is(err, fs.ErrNotExist) {
			break
		}
		if err != nil {
			return nil, fmt.Errorf("lookaside %s: %w", base.Redacted(), err)
		}
		list = append(list, data)
	}
	return list, nil
}

// lookasideURL returns the store with the most specific scope for an image.
func (c Config) lookasideURL(ref registry.Reference) (string, error) {
	if c.RegistriesDir == "" {
		return "", nil
	}
	names, err := filepath.Glob(filepath.Join(c.RegistriesDir, "*.yaml"))
	if err != nil {
		return "", err
	}
	entries := map[string]registryEntry{}
	for _, name := range names {
		data, err := readLimited(name)
		if err != nil {
			return "", err
		}
		var file registriesFile
		if err := yaml.Unmarshal(data, &file); err != nil {
			return "", fmt.Errorf("%s: %w", name, err)
		}
		for scope, entry := range file.Docker {
			entries[scope] = entry
		}
		if file.DefaultDocker != nil {
			entries[""] = *file.DefaultDocker
		}
	}
	named, err := podmanref.ParseNormalizedNamed(ref.Name())
	if err != nil {
		return "", err
	}
	for _, scope := range append(policyconfiguration.DockerReferenceNamespaces(named), "") {
		if store := entries[scope].url(); store != "" {
			return store, nil
		}
	}
	return "", nil
}

// fetchSignature reads a file of a store. A missing file is fs.ErrNotExist.
func fetchSignature(ctx context.Context, at *url.URL) ([]byte, error) {
	switch at.Scheme {
	case "file":
		data, err := os.ReadFile(at.Path)
		if err == nil && len(data) > maxSignature {
			err = errors.New("signature is too large")
		}
		return data, err
	case "http", "https":
	default:
		return nil, fmt.Errorf("scheme %q is not file, http or https", at.Scheme)
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, at.String(), nil)
	if err != nil {
		return nil, err
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		var failed *url.Error
		if errors.As(err, &failed) {
			err = failed.Err // without the URL, which may contain a password
		}
		return nil, err
	}
	defer resp.Body.Close() // read only
	switch {
	case resp.StatusCode == http.StatusNotFound:
		return nil, fs.ErrNotExist
	case resp.StatusCode != http.StatusOK:
		return nil, errors.New(strings.TrimSpace(resp.Status))
	}
	data, err := io.ReadAll(io.LimitReader(resp.Body, maxSignature+1))
	if err == nil && len(data) > maxSignature {
		err = errors.New("signature is too large")
	}
	return data, err
}
