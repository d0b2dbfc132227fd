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
	"path/filepath"
	"sync/atomic"
	"testing"
	"time"

	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

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
