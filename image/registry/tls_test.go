package registry

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"fmt"
	"math/big"
	"net"
	"net/http"
	"net/http/httptest"
	"path"
	"path/filepath"
	"sync/atomic"
	"testing"
	"time"

	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"google.golang.org/grpc/codes"

	"berth/image/registry/registrytest"
)

func pemOf(cert *x509.Certificate) string {
	return string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: cert.Raw}))
}

// serverCertificate makes a self-signed certificate for a host of that name.
func serverCertificate(t *testing.T, name string) tls.Certificate {
	t.Helper()
	private, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour), DNSNames: []string{name},
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageDigitalSignature | x509.KeyUsageCertSign,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &private.PublicKey, private)
	if err != nil {
		t.Fatal(err)
	}
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: private}
}

// A host's skip_verify and client certificates do not apply to the hosts that it redirects to. Its
// CA certificates do.
func TestTLSOptionsAreForTheirHost(t *testing.T) {
	const other = "localhost" // the registry is 127.0.0.1
	cert, key, clients := clientCertificate(t)
	dir := t.TempDir()
	both := registrytest.WriteFile(t, filepath.Join(dir, "both.pem"), cert+key)
	blob := []byte("content")
	var shown atomic.Int64
	elsewhere := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		shown.Store(int64(len(r.TLS.PeerCertificates)))
		_, _ = w.Write(blob)
	}))
	elsewhere.TLS = &tls.Config{ClientAuth: tls.RequestClientCert, Certificates: []tls.Certificate{serverCertificate(t, other)}}
	elsewhere.Config.ErrorLog = registrytest.DiscardLog
	elsewhere.StartTLS()
	defer elsewhere.Close()
	_, port, err := net.SplitHostPort(elsewhere.Listener.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	reg := registrytest.Start(t, func(s *httptest.Server) {
		s.TLS = &tls.Config{ClientAuth: tls.RequireAndVerifyClientCert, ClientCAs: clients}
		s.StartTLS()
	})
	to := other
	reg.Before = func(w http.ResponseWriter, r *http.Request) bool {
		http.Redirect(w, r, "https://"+net.JoinHostPort(to, port)+"/blob", http.StatusTemporaryRedirect)
		return true
	}
	want := ocispec.Descriptor{Digest: digest.FromBytes(blob), Size: int64(len(blob))}
	read := func(options string) error {
		tree := hostsDir(t, "example.com", fmt.Sprintf("server = %q\nclient = %q\n%s", reg.URL, both, options))
		_, err := readBlob(t, open(t, Config{Sources: Sources{Dirs: []string{tree}}}, "example.com/app:v1", Credentials{}), want)
		return err
	}
	wantUnavailable(t, read("skip_verify = true"), "certificate")

	leaf, err := x509.ParseCertificate(elsewhere.TLS.Certificates[0].Certificate[0])
	if err != nil {
		t.Fatal(err)
	}
	cas := registrytest.WriteFile(t, filepath.Join(dir, "ca.pem"), pemOf(reg.Certificate())+pemOf(leaf))
	if err := read(fmt.Sprintf("ca = %q", cas)); err != nil {
		t.Error(err)
	}
	if n := shown.Load(); n != 0 {
		t.Errorf("another host was shown %d client certificates", n)
	}
	to = "127.0.0.1" // the same host, on another port
	if err := read("skip_verify = true"); err != nil {
		t.Error(err)
	}
	if n := shown.Load(); n != 1 {
		t.Errorf("the host itself was shown %d client certificates", n)
	}
}

// clientCertificate makes a self-signed client certificate and a pool that trusts it.
func clientCertificate(t *testing.T) (cert, key string, pool *x509.CertPool) {
	t.Helper()
	private, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageDigitalSignature | x509.KeyUsageCertSign,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth},
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &private.PublicKey, private)
	if err != nil {
		t.Fatal(err)
	}
	parsed, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	keyDER, err := x509.MarshalPKCS8PrivateKey(private)
	if err != nil {
		t.Fatal(err)
	}
	pool = x509.NewCertPool()
	pool.AddCert(parsed)
	return pemOf(parsed), string(pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: keyDER})), pool
}

// tlsHost is a server at https://localhost, where registries here are at 127.0.0.1.
type tlsHost struct {
	*httptest.Server
	host  string       // host and port
	ca    string       // file with its certificate
	shown atomic.Int64 // client certificates of the last request
	asked atomic.Int64
}

func newTLSHost(t *testing.T, answer http.HandlerFunc) *tlsHost {
	t.Helper()
	h := &tlsHost{}
	h.Server = httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		h.asked.Add(1)
		h.shown.Store(int64(len(r.TLS.PeerCertificates)))
		if r.Header.Get("X-Secret") != "" {
			t.Error("another host got the headers of the registry")
		}
		answer(w, r)
	}))
	h.TLS = &tls.Config{ClientAuth: tls.RequestClientCert, Certificates: []tls.Certificate{serverCertificate(t, "localhost")}}
	h.Config.ErrorLog = registrytest.DiscardLog
	h.StartTLS()
	t.Cleanup(h.Close)
	_, port, err := net.SplitHostPort(h.Listener.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	h.host = net.JoinHostPort("localhost", port)
	leaf, err := x509.ParseCertificate(h.TLS.Certificates[0].Certificate[0])
	if err != nil {
		t.Fatal(err)
	}
	h.ca = registrytest.WriteFile(t, filepath.Join(t.TempDir(), "ca.pem"), pemOf(leaf))
	return h
}

func giveToken(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write([]byte(`{"token":"T"}`)) }

// requireToken makes a registry ask for a token of a server.
func requireToken(reg *registrytest.Server, realm string) {
	reg.Before = func(w http.ResponseWriter, r *http.Request) bool {
		if r.Header.Get("Authorization") == "Bearer T" {
			return false
		}
		w.Header().Set("WWW-Authenticate", fmt.Sprintf("Bearer realm=%q", realm))
		w.WriteHeader(http.StatusUnauthorized)
		return true
	}
}

// The TLS options of a registry apply to its token server under another name, but not to the hosts
// that the token server redirects to.
func TestTLSOptionsOfTokenServer(t *testing.T) {
	cert, key, _ := clientCertificate(t)
	both := registrytest.WriteFile(t, filepath.Join(t.TempDir(), "both.pem"), cert+key)
	var to string
	tokens := newTLSHost(t, func(w http.ResponseWriter, r *http.Request) {
		if to != "" {
			http.Redirect(w, r, to, http.StatusTemporaryRedirect)
			return
		}
		giveToken(w, r)
	})
	third := newTLSHost(t, giveToken)
	reg := registrytest.NewTLS(t)
	putImage(reg, "app", "v1", []byte("x"))
	requireToken(reg, "https://"+tokens.host+"/token")
	cas := registrytest.WriteFile(t, filepath.Join(t.TempDir(), "ca.pem"), pemOf(reg.Certificate())+pemOf(leafOf(t, tokens)))
	for name, c := range map[string]struct {
		options, to string
		ok          bool
		shown       int64
	}{
		"CA":                    {fmt.Sprintf("ca = %q", cas), "", true, 0},
		"skip_verify":           {"skip_verify = true", "", true, 0},
		"client certificate":    {fmt.Sprintf("skip_verify = true\nclient = %q", both), "", true, 1},
		"redirect to another":   {fmt.Sprintf("skip_verify = true\nclient = %q", both), "https://" + third.host, false, 1},
		"redirect without TLS":  {"skip_verify = true", "http://127.0.0.1:1/", false, 0},
		"redirect to the other": {fmt.Sprintf("ca = %q", cas), reg.URL + "/token", false, 0}, // it has no token
	} {
		to = c.to
		tree := hostsDir(t, "example.com", fmt.Sprintf("server = %q\n%s\n[header]\nX-Secret = \"s\"", reg.URL, c.options))
		_, err := resolve(t, Config{Sources: Sources{Dirs: []string{tree}}}, "example.com/app:v1", Credentials{Username: "u", Password: "p"})
		if (err == nil) != c.ok {
			t.Errorf("%s: %v", name, err)
		}
		if n := tokens.shown.Load(); n != c.shown {
			t.Errorf("%s: the token server was shown %d client certificates", name, n)
		}
	}
	if n := third.asked.Load(); n != 0 {
		t.Errorf("a host with an unknown certificate was asked %d times", n)
	}
}

// Certificates of registries on loopback are not verified by default. Those of other hosts are,
// when they are token servers of such a registry.
func TestTokenServerOfRegistryOnLoopback(t *testing.T) {
	tokens := newTLSHost(t, giveToken)
	reg := registrytest.NewTLS(t)
	putImage(reg, "app", "v1", []byte("x"))
	requireToken(reg, "https://"+tokens.host+"/token")
	_, err := resolve(t, Config{}, reg.Host()+"/app:v1", Credentials{Username: "u", Password: "p"})
	wantUnavailable(t, err, "certificate")
	if n := tokens.asked.Load(); n != 0 {
		t.Errorf("a token server with an unknown certificate was asked %d times", n)
	}
}

func leafOf(t *testing.T, h *tlsHost) *x509.Certificate {
	t.Helper()
	leaf, err := x509.ParseCertificate(h.TLS.Certificates[0].Certificate[0])
	if err != nil {
		t.Fatal(err)
	}
	return leaf
}

// The folder of a token server, or of the target of a redirect, applies to it. That of all
// registries does not.
func TestFolderOfOtherHost(t *testing.T) {
	cert, key, _ := clientCertificate(t)
	both := registrytest.WriteFile(t, filepath.Join(t.TempDir(), "both.pem"), cert+key)
	layer := []byte("content")
	other := newTLSHost(t, func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/token" {
			giveToken(w, r)
			return
		}
		_, _ = w.Write(layer)
	})
	reg := registrytest.New(t)
	top := putImage(reg, "app", "v1", layer)
	requireToken(reg, "https://"+other.host+"/token")
	next := reg.Before
	reg.Before = func(w http.ResponseWriter, r *http.Request) bool {
		if next(w, r) {
			return true
		}
		if blob := digest.FromBytes(layer).Encoded(); path.Base(r.URL.Path) == "sha256:"+blob {
			http.Redirect(w, r, "https://"+other.host+"/blob", http.StatusTemporaryRedirect)
			return true
		}
		return false
	}
	for name, c := range map[string]struct {
		folder, options string
		ok              bool
		shown           int64
	}{
		"no folder":                {"else.example", "skip_verify = true", false, 0},
		"CA":                       {other.host, fmt.Sprintf("ca = %q", other.ca), true, 0},
		"skip_verify":              {other.host, "skip_verify = true", true, 0},
		"client certificate":       {other.host, fmt.Sprintf("ca = %q\nclient = %q\n[header]\nX-Secret = \"s\"", other.ca, both), true, 1},
		"table of the host":        {other.host, fmt.Sprintf("[host.%q]\nca = %q", "https://"+other.host, other.ca), true, 0},
		"table of another host":    {other.host, "[host.\"https://else.example\"]\nskip_verify = true", false, 0},
		"folder of all registries": {defaultHostDir, fmt.Sprintf("server = %q\nskip_verify = true", reg.URL), false, 0},
		"invalid":                  {other.host, "ca = 1", false, 0},
	} {
		tree := hostsDir(t, "example.com", fmt.Sprintf("server = %q\n", reg.URL))
		registrytest.WriteFile(t, filepath.Join(tree, c.folder, "hosts.toml"), c.options)
		other.shown.Store(0)
		repo := open(t, Config{Sources: Sources{Dirs: []string{tree}}}, "example.com/app@"+top.Digest.String(), Credentials{})
		img, err := repo.Resolve(t.Context(), DefaultPlatform())
		if err == nil {
			_, err = readBlob(t, repo, img.Layers[0].Blob)
		}
		if (err == nil) != c.ok {
			t.Errorf("%s: %v", name, err)
		}
		if n := other.shown.Load(); n != c.shown {
			t.Errorf("%s: it was shown %d client certificates", name, n)
		}
		if name == "invalid" {
			wantCode(t, err, codes.FailedPrecondition, "hosts.toml")
		}
	}
	for _, host := range []string{"..", ".", "", defaultHostDir, "../registry", "a/b", `a\b`} {
		tree := hostsDir(t, defaultHostDir, "skip_verify = true")
		if h, err := loadOther([]string{filepath.Join(tree, defaultHostDir), tree}, host); h != nil || err != nil {
			t.Errorf("host %q: %+v, %v", host, h, err)
		}
	}
}

// Registries and manifests name other hosts in any spelling. Each host has one pool of connections.
func TestSpellingsShareConnections(t *testing.T) {
	dir := t.TempDir()
	server := httptest.NewTLSServer(http.NotFoundHandler())
	defer server.Close()
	_, port, err := net.SplitHostPort(server.Listener.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	registrytest.WriteFile(t, filepath.Join(dir, "localhost:"+port, "hosts.toml"), "skip_verify = true\n")
	c, err := newConnections(&hostConfig{Host: "registry.example"}, []string{dir}, time.Minute)
	if err != nil {
		t.Fatal(err)
	}
	for _, host := range []string{"localhost", "LOCALHOST", "LocalHost"} {
		r := httptest.NewRequest(http.MethodGet, "https://"+host+":"+port+"/", nil)
		if resp, err := c.RoundTrip(r); err == nil {
			_ = resp.Body.Close() // it was not read
		}
	}
	if len(c.configured) != 1 {
		t.Errorf("%d pools of connections", len(c.configured))
	}
	c.closeIdle()
}
