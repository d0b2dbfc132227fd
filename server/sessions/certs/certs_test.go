package certs

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"log/slog"
	"math/big"
	"os"
	"path/filepath"
	"testing"
	"time"

	"berth/server/sessions/wire"
)

func TestStreamTLSFollowsItsFiles(t *testing.T) {
	dir := t.TempDir()
	cfg := wire.TLS{Cert: filepath.Join(dir, "cert"), Key: filepath.Join(dir, "key")}
	if _, err := Open(cfg, nil, slog.New(slog.DiscardHandler)); err == nil {
		t.Error("there was no error without the files")
	}
	first := writeCertificate(t, cfg, 1)
	now := time.Now()
	f := &Files{cfg: cfg, log: slog.New(slog.DiscardHandler), now: func() time.Time { return now }}
	if err := f.read(now); err != nil {
		t.Fatal(err)
	}
	shown := func(want []byte) *tls.Config {
		t.Helper()
		current := f.current().config
		if !bytes.Equal(current.Certificates[0].Certificate[0], want) {
			t.Error("another certificate is shown")
		}
		return current
	}
	shown(first)
	second := writeCertificate(t, cfg, 2)
	shown(first) // the files are checked once a second
	now = now.Add(tlsPeriod)
	shown(second)
	writeFile(t, cfg.Cert, []byte("half of"))
	now = now.Add(tlsPeriod)
	shown(second)
	third := writeCertificate(t, cfg, 3)
	now = now.Add(tlsPeriod)
	shown(third)
	now = now.Add(tlsSettled)
	settled := shown(third)
	for range 3 {
		now = now.Add(tlsPeriod)
		if shown(third) != settled {
			t.Error("files that have not changed are read again")
		}
	}
	now = now.Add(time.Minute)
	shown(writeCertificate(t, cfg, 4))
}

// If the files are invalid when a process starts, it uses the content that the daemon has.
func TestProcessStartsWithInvalidFiles(t *testing.T) {
	dir, log := t.TempDir(), slog.New(slog.DiscardHandler)
	cfg := wire.TLS{Cert: filepath.Join(dir, "cert"), Key: filepath.Join(dir, "key"), ClientCA: filepath.Join(dir, "cert")}
	der := writeCertificate(t, cfg, 1)
	daemon, err := Open(cfg, nil, log)
	if err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{cfg.Cert, cfg.Key} {
		valid := daemon.Valid()
		whole, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		writeFile(t, path, []byte("half of"))
		if _, err := Open(cfg, nil, log); err == nil {
			t.Errorf("%s is not invalid", path)
		}
		f, err := Open(cfg, valid, log)
		if err != nil {
			t.Fatal(err)
		}
		if got := f.current().config; !bytes.Equal(got.Certificates[0].Certificate[0], der) || got.ClientAuth != tls.RequireAndVerifyClientCert {
			t.Errorf("another configuration with invalid %s", path)
		}
		writeFile(t, path, whole)
	}
	if _, err := Open(cfg, &wire.PEM{}, log); err != nil {
		t.Errorf("valid files are not preferred: %v", err)
	}
}

// writeCertificate writes a new key and certificate and returns the certificate.
func writeCertificate(t *testing.T, cfg wire.TLS, serial int64) []byte {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{SerialNumber: big.NewInt(serial)}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	if err != nil {
		t.Fatal(err)
	}
	private, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	writeFile(t, cfg.Cert, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}))
	writeFile(t, cfg.Key, pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: private}))
	return der
}

func writeFile(t *testing.T, path string, data []byte) {
	t.Helper()
	if err := os.WriteFile(path, data, 0o600); err != nil {
		t.Fatal(err)
	}
}
