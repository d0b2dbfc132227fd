// Package certs reads the certificates of the streaming server.
//
// # Contract
//
// The configuration follows changes of its files, so that a rotation needs no restart. While the
// files are invalid, the last valid certificate is used. The daemon passes it to each process that
// it starts.
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

// Open reads the certificates. It returns nil if none are configured. If the files are invalid, it
// uses earlier, their last valid content, which may be nil.
func Open(cfg wire.TLS, earlier *wire.PEM, log *slog.Logger) (*Files, error) {
	if cfg.Cert == "" {
		return nil, nil
	}
	f := &Files{cfg: cfg, log: log, now: time.Now}
	err := f.read(f.now())
	if err == nil || earlier == nil {
		return f, err
	}
	f.warn(err)
	return f, f.use(earlier)
}

// Config returns the TLS configuration of the streaming server, or nil without certificates.
func (f *Files) Config() *tls.Config {
	if f == nil {
		return nil
	}
	return &tls.Config{MinVersion: tls.VersionTLS12, GetConfigForClient: func(*tls.ClientHelloInfo) (*tls.Config, error) {
		return f.current().config, nil
	}}
}

// Valid returns the last valid content of the files, or nil without certificates.
func (f *Files) Valid() *wire.PEM {
	if f == nil {
		return nil
	}
	return f.current().pem
}

const (
	// tlsPeriod is the minimum time between two checks of the files, because anyone on the node can
	// start handshakes.
	tlsPeriod = time.Second
	// tlsSettled is the minimum age of a file whose timestamps detect the next change. Kernel
	// timestamps are coarse.
	tlsSettled = 2 * time.Second
)

// Files are the files of certificates and key, with the last usable configuration. The server
// keeps using the last valid certificate while the files are invalid, for example during a
// rotation. [Open] makes it.
type Files struct {
	cfg  wire.TLS
	log  *slog.Logger
	now  func() time.Time
	last atomic.Pointer[content]

	// It is held by the goroutine that checks the files. Others do not wait. It guards the fields
	// below.
	mu     sync.Mutex
	looked time.Time
	// Identifies the files from which last was read; empty: the files may have changed since then.
	version string
}

// content is a valid content of the files.
type content struct {
	pem    *wire.PEM
	config *tls.Config
}

// current returns the content for a connection.
func (f *Files) current() *content {
	if f.mu.TryLock() {
		defer f.mu.Unlock() // +checklocksignore: it does not know TryLock
		if now := f.now(); now.Sub(f.looked) >= tlsPeriod {
			if err := f.refresh(now); err != nil {
				f.warn(err)
			}
		}
	}
	return f.last.Load()
}

func (f *Files) warn(err error) {
	f.log.Warn("cannot use the streaming server's new certificates, keeping the old ones", "error", err)
}

// refresh reads the files if they have changed. It needs the lock.
func (f *Files) refresh(now time.Time) error {
	f.looked = now
	if version, _, err := f.identify(); err == nil && version == f.version {
		return nil
	}
	return f.read(now)
}

// read reads the files. It identifies them first, so that the next check detects a change during
// the reading.
func (f *Files) read(now time.Time) error {
	f.looked, f.version = now, ""
	version, changed, err := f.identify()
	if err != nil {
		return err
	}
	next, err := readPEM(f.cfg)
	if err != nil {
		return err
	}
	if err := f.use(next); err != nil {
		return err
	}
	if now.Sub(changed) >= tlsSettled {
		f.version = version
	}
	return nil
}

// identify returns a string that differs after a change of any file, and the time of the last
// change.
func (f *Files) identify() (version string, changed time.Time, err error) {
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

// readPEM reads certificates and key.
func readPEM(cfg wire.TLS) (*wire.PEM, error) {
	var p wire.PEM
	for _, file := range []struct {
		option, path string
		to           *[]byte
	}{
		{"stream.tls_cert", cfg.Cert, &p.Cert},
		{"stream.tls_key", cfg.Key, &p.Key},
		{"stream.client_ca", cfg.ClientCA, &p.ClientCA},
	} {
		if file.path == "" {
			continue
		}
		var err error
		if *file.to, err = os.ReadFile(file.path); err != nil {
			return nil, fmt.Errorf("%s: %w", file.option, err)
		}
	}
	return &p, nil
}

// use makes p the last valid content, unless it is invalid.
func (f *Files) use(p *wire.PEM) error {
	certificate, err := tls.X509KeyPair(p.Cert, p.Key)
	if err != nil {
		return fmt.Errorf("stream.tls_cert and stream.tls_key: %w", err)
	}
	// Session tickets are off, because they would admit clients of a certificate authority that has
	// been removed.
	t := &tls.Config{
		Certificates:           []tls.Certificate{certificate},
		MinVersion:             tls.VersionTLS12,
		SessionTicketsDisabled: true,
	}
	if f.cfg.ClientCA != "" {
		t.ClientCAs, t.ClientAuth = x509.NewCertPool(), tls.RequireAndVerifyClientCert
		if !t.ClientCAs.AppendCertsFromPEM(p.ClientCA) {
			return errors.New("stream.client_ca: no certificate in " + f.cfg.ClientCA)
		}
	}
	f.last.Store(&content{p, t})
	return nil
}
