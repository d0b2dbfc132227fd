// Package certs reads the certificates of the streaming server.
//
// # Contract
//
// The configuration follows changes of its files, so that a rotation needs no restart. While the
// files are invalid, the last valid certificate is used.
package certs

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"berth/server/sessions/wire"
)

// Load returns the TLS configuration of the streaming server, or nil without certificates.
func Load(cfg wire.TLS, log *slog.Logger) (*tls.Config, error) {
	if cfg.Cert == "" {
		return nil, nil
	}
	f := &tlsFiles{cfg: cfg, log: log, now: time.Now}
	if err := f.read(f.now()); err != nil {
		return nil, err
	}
	return &tls.Config{MinVersion: tls.VersionTLS12, GetConfigForClient: func(*tls.ClientHelloInfo) (*tls.Config, error) {
		return f.current(), nil
	}}, nil
}

const (
	// tlsPeriod is the minimum time between two checks of the files, because anyone on the node can
	// start handshakes.
	tlsPeriod = time.Second
	// tlsSettled is the minimum age of a file whose timestamps detect the next change. Kernel
	// timestamps are coarse.
	tlsSettled = 2 * time.Second
)

// tlsFiles are the files of certificates and key, with the last usable configuration. The server
// keeps using the last valid certificate while the files are invalid, for example during a
// rotation.
type tlsFiles struct {
	cfg  wire.TLS
	log  *slog.Logger
	now  func() time.Time
	last atomic.Pointer[tls.Config]

	// It is held by the goroutine that checks the files. Others do not wait. It guards the fields
	// below.
	mu     sync.Mutex
	looked time.Time
	// Identifies the files from which last was read; empty: the files may have changed since then.
	version string
}

// current returns the configuration for a connection.
func (f *tlsFiles) current() *tls.Config {
	if f.mu.TryLock() {
		defer f.mu.Unlock() // +checklocksignore: it does not know TryLock
		if now := f.now(); now.Sub(f.looked) >= tlsPeriod {
			if err := f.refresh(now); err != nil {
				f.log.Warn("cannot use the streaming server's new certificates, keeping the old ones", "error", err)
			}
		}
	}
	return f.last.Load()
}

// refresh reads the files if they have changed. It needs the lock.
func (f *tlsFiles) refresh(now time.Time) error {
	f.looked = now
	if version, _, err := f.identify(); err == nil && version == f.version {
		return nil
	}
	return f.read(now)
}

// read reads the files. It identifies them first, so that the next check detects a change during
// the reading.
func (f *tlsFiles) read(now time.Time) error {
	f.looked, f.version = now, ""
	version, changed, err := f.identify()
	if err != nil {
		return err
	}
	next, err := readStreamTLS(f.cfg)
	if err != nil {
		return err
	}
	f.last.Store(next)
	if now.Sub(changed) >= tlsSettled {
		f.version = version
	}
	return nil
}

// identify returns a string that differs after a change of any file, and the time of the last
// change.
func (f *tlsFiles) identify() (version string, changed time.Time, err error) {
	for _, path := range []string{f.cfg.Cert, f.cfg.Key, f.cfg.ClientCA} {
		if path == "" {
			continue
		}
		var st unix.Stat_t
		if err := unix.Stat(path, &st); err != nil {
			return "", time.Time{}, &fs.PathError{Op: "stat", Path: path, Err: err}
		}
		version += fmt.Sprintln(st.Dev, st.Ino, st.Size, st.Mtim, st.Ctim)
		if at := time.Unix(st.Ctim.Unix()); at.After(changed) {
			changed = at
		}
	}
	return version, changed, nil
}

// readStreamTLS reads certificates and key.
func readStreamTLS(cfg wire.TLS) (*tls.Config, error) {
	certificate, err := tls.LoadX509KeyPair(cfg.Cert, cfg.Key)
	if err != nil {
		return nil, fmt.Errorf("stream.tls_cert and stream.tls_key: %w", err)
	}
	// Session tickets are off, because they would admit clients of a certificate authority that has
	// been removed.
	t := &tls.Config{
		Certificates:           []tls.Certificate{certificate},
		MinVersion:             tls.VersionTLS12,
		SessionTicketsDisabled: true,
	}
	if cfg.ClientCA == "" {
		return t, nil
	}
	data, err := os.ReadFile(cfg.ClientCA)
	if err != nil {
		return nil, fmt.Errorf("stream.client_ca: %w", err)
	}
	t.ClientCAs, t.ClientAuth = x509.NewCertPool(), tls.RequireAndVerifyClientCert
	if !t.ClientCAs.AppendCertsFromPEM(data) {
		return nil, errors.New("stream.client_ca: no certificate in " + cfg.ClientCA)
	}
	return t, nil
}
