package registry

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strings"
	"time"

	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"berth/internal/errdefs"
)

// Probe is the result of one step of [Client.Diagnose].
type Probe struct {
	Host  string `json:"host"` // URL of the host, or the reference before the first host
	Step  string `json:"step"`
	OK    bool   `json:"ok"`
	Found string `json:"found"`
}

const (
	probeTimeout = 10 * time.Second // of each step
	speedBytes   = 16 << 20         // read at most to measure the speed
)

// Diagnose contacts each host that serves an image, mirrors first, and reports each step. The steps
// are name resolution, connection, TLS, authentication, manifest, range requests and speed. If
// withImage is false, it stops after the authentication. The steps of a host end with the first
// failure.
func (c *Client) Diagnose(ctx context.Context, ref Reference, withImage bool) []Probe {
	repo, err := c.Open(ref, Credentials{})
	if err != nil {
		return []Probe{{Host: ref.Name(), Step: "configuration", Found: err.Error()}}
	}
	defer repo.Close()
	var all []Probe
	for _, e := range repo.endpoints {
		d := diagnosis{endpoint: e, ref: ref}
		steps := []probeStep{{"dns", d.dns}, {"tcp", d.tcp}, {"tls", d.tls}, {"auth", d.authentication}}
		if withImage {
			steps = append(steps, probeStep{"manifest", d.manifest}, probeStep{"ranges", d.ranges}, probeStep{"speed", d.speed})
		}
		for _, s := range steps {
			limited, cancel := context.WithTimeout(ctx, probeTimeout)
			found, err := s.run(limited)
			cancel()
			if err != nil {
				found = err.Error()
			}
			all = append(all, Probe{Host: e.String(), Step: s.name, OK: err == nil, Found: found})
			if err != nil {
				break
			}
		}
	}
	return all
}

type probeStep struct {
	name string
	run  func(context.Context) (found string, err error)
}

// diagnosis checks one host.
type diagnosis struct {
	*endpoint
	ref   Reference
	layer ocispec.Descriptor // the largest, set by manifest
}

func (d *diagnosis) dns(ctx context.Context) (string, error) {
	addresses, err := net.DefaultResolver.LookupHost(ctx, d.base.Hostname())
	return strings.Join(addresses, " "), err
}

// address returns host and port.
func (d *diagnosis) address() string {
	port := d.base.Port()
	if port == "" {
		port = d.base.Scheme
	}
	return net.JoinHostPort(d.base.Hostname(), port)
}

func (d *diagnosis) tcp(ctx context.Context) (string, error) {
	began := time.Now()
	conn, err := new(net.Dialer).DialContext(ctx, "tcp", d.address())
	if err != nil {
		return "", err
	}
	took := time.Since(began)
	return fmt.Sprintf("%s in %v", conn.RemoteAddr(), took.Round(100*time.Microsecond)), conn.Close()
}

func (d *diagnosis) tls(ctx context.Context) (string, error) {
	if d.base.Scheme != "https" {
		return "plain HTTP, nothing is encrypted", nil
	}
	config := d.wires.own.TLSClientConfig.Clone()
	config.ServerName = d.base.Hostname()
	conn, err := (&tls.Dialer{Config: config}).DialContext(ctx, "tcp", d.address())
	var record tls.RecordHeaderError
	if _, fallback := d.origin.inner.(*plainFallback); fallback && errors.As(err, &record) {
		return "the host speaks plain HTTP, which is allowed for it", nil
	}
	if err != nil {
		return "", err
	}
	state := conn.(*tls.Conn).ConnectionState()
	leaf := state.PeerCertificates[0]
	found := fmt.Sprintf("%s, certificate by %s, valid until %s", tls.VersionName(state.Version),
		errdefs.Clip(leaf.Issuer.String()), leaf.NotAfter.Format(time.DateOnly))
	switch {
	case config.InsecureSkipVerify:
		found += ", not verified"
	case len(state.VerifiedChains) > 0:
		found += fmt.Sprintf(", chain of %d", len(state.VerifiedChains[0]))
	}
	return found, conn.Close()
}

// authentication requests the root of the API, which needs no access to a repository.
func (d *diagnosis) authentication(ctx context.Context) (string, error) {
	root := d.base
	root.Path = strings.TrimSuffix(root.Path, d.ref.Repository)
	if at := strings.Index(root.Path, "/v2/"); at >= 0 {
		root.Path = root.Path[:at+len("/v2/")]
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, root.String(), nil)
	if err != nil {
		return "", err
	}
	resp, err := d.client.Do(req)
	if err != nil {
		return "", requestError(ctx, err)
	}
	defer drain(resp.Body)
	if resp.StatusCode != http.StatusUnauthorized {
		return "anonymous access, status " + errdefs.Clip(resp.Status), nil
	}
	var offers []string
	for _, c := range parseChallenges(resp.Header) {
		offer := c.Scheme
		if realm, err := url.Parse(c.Params["realm"]); err == nil && realm.Host != "" {
			offer = "token of " + realm.Host
		}
		offers = append(offers, errdefs.Clip(offer))
	}
	if len(offers) == 0 {
		return "", errors.New("the registry requires authentication but offers no scheme")
	}
	cred, err := d.auth.lookup(ctx)
	if err != nil {
		return "", err
	}
	has := "no credentials configured"
	if !cred.isAnonymous() {
		has = "credentials configured"
	}
	return strings.Join(offers, ", ") + "; " + has, nil
}

// manifest resolves the image and chooses its largest layer.
func (d *diagnosis) manifest(ctx context.Context) (string, error) {
	only := &Repository{ref: d.ref, endpoints: []*endpoint{d.endpoint}, pause: firstDelay}
	img, err := only.Resolve(ctx, DefaultPlatform())
	if err != nil {
		return "", err
	}
	for _, l := range img.Layers {
		if l.Blob.Size > d.layer.Size {
			d.layer = l.Blob
		}
	}
	return fmt.Sprintf("%s, %d layers", img.Digest, len(img.Layers)), nil
}

func (d *diagnosis) ranges(ctx context.Context) (string, error) {
	if d.layer.Size < 2 {
		return "the image has no layer to test", nil
	}
	resp, err := d.request(ctx, http.MethodGet, "blobs/"+d.layer.Digest.String(), http.Header{"Range": {"bytes=1-1"}})
	if err != nil {
		return "", err
	}
	defer resp.Body.Close() // the rest is not needed
	switch resp.StatusCode {
	case http.StatusPartialContent:
		return "supported", nil
	case http.StatusOK:
		return "not supported: interrupted layers start again, and large layers are one transfer", nil
	}
	return "", d.statusError(resp)
}

func (d *diagnosis) speed(ctx context.Context) (string, error) {
	if d.layer.Size == 0 {
		return "the image has no layer to test", nil
	}
	began := time.Now()
	resp, err := d.request(ctx, http.MethodGet, "blobs/"+d.layer.Digest.String(), http.Header{"Accept": {"*/*"}})
	if err != nil {
		return "", err
	}
	if resp.StatusCode != http.StatusOK {
		return "", d.statusError(resp)
	}
	defer resp.Body.Close() // the rest is not needed
	n, err := io.Copy(io.Discard, io.LimitReader(resp.Body, speedBytes))
	if err != nil && (ctx.Err() == nil || n == 0) {
		return "", bodyError(ctx, err)
	}
	took := time.Since(began)
	return fmt.Sprintf("%.1f MB/s (%d bytes in %v)", float64(n)/1e6/took.Seconds(), n, took.Round(time.Millisecond)), nil
}
