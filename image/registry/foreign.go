package registry

import (
	"net/http"
	"net/url"

	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
)

// maxURLs limits the URLs of a blob that are tried.
const maxURLs = 8

// foreign returns the URLs in a blob's descriptor, which are asked if no host of the repository has
// the blob. The author of the manifest has chosen them. So they get no credentials, headers or
// client certificates (CVE-2020-15157), and errors do not quote their answers. The same addresses
// are allowed as for redirects of the image's registry.
func (r *Repository) foreign(blob ocispec.Descriptor) []*endpoint {
	if len(r.endpoints) == 0 {
		return nil
	}
	var list []*endpoint
	registry := r.endpoints[len(r.endpoints)-1]
	client := &http.Client{Transport: foreignConnections{registry.wires}, CheckRedirect: checkRedirect}
	for _, text := range blob.URLs[:min(len(blob.URLs), maxURLs)] {
		u, err := url.Parse(text)
		if err != nil || u.Scheme != "https" && u.Scheme != "http" || u.Host == "" || u.User != nil {
			continue
		}
		list = append(list, &endpoint{
			caps: capPull, base: *u, foreign: true, agent: registry.agent, stall: registry.stall,
			document: registry.document, client: client, wires: registry.wires,
		})
	}
	return list
}

// foreignConnections sends requests to URLs of a manifest.
type foreignConnections struct{ *connections }

func (f foreignConnections) RoundTrip(r *http.Request) (*http.Response, error) {
	return f.roundTripTo(f.others, r, true)
}
