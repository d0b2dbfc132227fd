// Package peerstest has certificates and addresses for tests of peers.
package peerstest

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
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
)

// CA signs certificates of nodes.
type CA struct {
	t      testing.TB
	dir    string
	cert   *x509.Certificate
	key    *ecdsa.PrivateKey
	File   string // PEM file with the CA's certificate
	serial int64
}

// NewCA returns a new CA.
func NewCA(t testing.TB) *CA {
	t.Helper()
	c := &CA{t: t, dir: t.TempDir()}
	c.key = newKey(t)
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "peers"}, NotBefore: time.Now().Add(-time.Hour),
		NotAfter: time.Now().Add(time.Hour), IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &c.key.PublicKey, c.key)
	if err != nil {
		t.Fatal(err)
	}
	if c.cert, err = x509.ParseCertificate(der); err != nil {
		t.Fatal(err)
	}
	c.File = c.write("ca.pem", "CERTIFICATE", der)
	return c
}

func newKey(t testing.TB) *ecdsa.PrivateKey {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	return key
}

func (c *CA) write(name, kind string, der []byte) string {
	c.t.Helper()
	path := filepath.Join(c.dir, name)
	if err := os.WriteFile(path, pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der}), 0o600); err != nil {
		c.t.Fatal(err)
	}
	return path
}

// Node returns PEM files with the certificate and the key of a new node.
func (c *CA) Node() (cert, key string) {
	c.t.Helper()
	c.serial++
	own := newKey(c.t)
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1 + c.serial), Subject: pkix.Name{CommonName: "node"}, NotBefore: time.Now().Add(-time.Hour),
		NotAfter: time.Now().Add(time.Hour), KeyUsage: x509.KeyUsageDigitalSignature,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
	}
	der, err := x509.CreateCertificate(rand.Reader, template, c.cert, &own.PublicKey, c.key)
	if err != nil {
		c.t.Fatal(err)
	}
	private, err := x509.MarshalPKCS8PrivateKey(own)
	if err != nil {
		c.t.Fatal(err)
	}
	return c.write(fmt.Sprintf("%d.pem", c.serial), "CERTIFICATE", der),
		c.write(fmt.Sprintf("%d.key", c.serial), "PRIVATE KEY", private)
}

// Addresses returns count addresses on loopback with one port, which was free a moment ago.
func Addresses(t testing.TB, count int) (list []string) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.2:0")
	if err != nil {
		t.Fatal(err)
	}
	_, port, err := net.SplitHostPort(l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	for i := range count {
		list = append(list, net.JoinHostPort(fmt.Sprintf("127.0.0.%d", i+2), port))
	}
	return list
}
