package integration

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"testing"
	"time"

	"berth/integration/harness"
)

func sha256Of(content string) string { return fmt.Sprintf("%x", sha256.Sum256([]byte(content))) }

// authority is a certificate authority for one test.
type authority struct {
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
}

func newAuthority(t *testing.T) *authority {
	t.Helper()
	key := harness.Get(ecdsa.GenerateKey(elliptic.P256(), rand.Reader))(t)
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "test authority"},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign,
	}
	der := harness.Get(x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key))(t)
	cert := harness.Get(x509.ParseCertificate(der))(t)
	return &authority{cert: cert, key: key}
}

// issue returns a certificate for a server at address, which is also valid for a client.
func (a *authority) issue(t *testing.T, address string) tls.Certificate {
	t.Helper()
	key := harness.Get(ecdsa.GenerateKey(elliptic.P256(), rand.Reader))(t)
	template := &x509.Certificate{
		SerialNumber: big.NewInt(2), Subject: pkix.Name{CommonName: address}, IPAddresses: []net.IP{net.ParseIP(address)},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
	}
	der := harness.Get(x509.CreateCertificate(rand.Reader, template, a.cert, &key.PublicKey, a.key))(t)
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}
}

// requireClient returns a server configuration that requires a client certificate of this
// authority.
func (a *authority) requireClient() *tls.Config {
	pool := x509.NewCertPool()
	pool.AddCert(a.cert)
	return &tls.Config{ClientAuth: tls.RequireAndVerifyClientCert, ClientCAs: pool}
}

// writeFiles writes the authority's certificate, and a client's certificate and key.
func (a *authority) writeFiles(t *testing.T, dir string) (ca, cert, key string) {
	t.Helper()
	client := a.issue(t, "127.0.0.1")
	private := harness.Get(x509.MarshalPKCS8PrivateKey(client.PrivateKey))(t)
	write := func(name, kind string, der []byte) string {
		path := filepath.Join(dir, name)
		harness.Must(t, os.WriteFile(path, pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der}), 0o600))
		return path
	}
	return write("ca.crt", "CERTIFICATE", a.cert.Raw), write("client.cert", "CERTIFICATE", client.Certificate[0]), write("client.key", "PRIVATE KEY", private)
}
