package daemon

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"berth/cmd/config"
	"berth/sandbox"
	"berth/sandbox/stream"
	"berth/server/streaming"
)

// listenStreaming opens the port for exec, attach and port-forward sessions.
func listenStreaming(cfg *config.Config, runtime streaming.Runtime, log *slog.Logger) (*streaming.Server, error) {
	tlsConfig, err := streamTLS(cfg, log)
	if err != nil {
		return nil, err
	}
	return streaming.Listen(
		streaming.Config{Address: cfg.StreamAddress, TLS: tlsConfig, IdleTimeout: cfg.StreamIdleTimeout.Duration, Log: log},
		runtime)
}

// namedSessions adds the names of pod and container to the errors of sessions.
type namedSessions struct {
	streaming.Runtime
	names *sandbox.Names
}

// Exec implements streaming.Runtime.
func (n namedSessions) Exec(ctx context.Context, id string, command stream.Command, s stream.IO) (int32, error) {
	named, _ := n.names.Of(id) // before the container may be removed
	code, err := n.Runtime.Exec(ctx, id, command, s)
	return code, named.Explain(err)
}

// Attach implements streaming.Runtime.
func (n namedSessions) Attach(ctx context.Context, id string, terminal bool, s stream.IO) error {
	named, _ := n.names.Of(id)
	return named.Explain(n.Runtime.Attach(ctx, id, terminal, s))
}

// PortForward implements streaming.Runtime.
func (n namedSessions) PortForward(ctx context.Context, podID string, port int32, s io.ReadWriteCloser) error {
	named, _ := n.names.Of(podID)
	return named.Explain(n.Runtime.PortForward(ctx, podID, port, s))
}

// streamTLS returns the TLS configuration of the streaming server, or nil without certificates. It
// reloads changed files, so that a rotation needs no restart.
func streamTLS(cfg *config.Config, log *slog.Logger) (*tls.Config, error) {
	if cfg.StreamTLSCert == "" {
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
	cfg  *config.Config
	log  *slog.Logger
	now  func() time.Time
	last atomic.Pointer[tls.Config]

	mu      sync.Mutex // held by the goroutine that checks the files; other goroutines do not wait for it; guards the fields below
	looked  time.Time
	version string // identifies the files from which last was read; empty: the files may have changed since then
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
	for _, path := range []string{f.cfg.StreamTLSCert, f.cfg.StreamTLSKey, f.cfg.StreamClientCA} {
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
func readStreamTLS(cfg *config.Config) (*tls.Config, error) {
	certificate, err := tls.LoadX509KeyPair(cfg.StreamTLSCert, cfg.StreamTLSKey)
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
	if cfg.StreamClientCA == "" {
		return t, nil
	}
	data, err := os.ReadFile(cfg.StreamClientCA)
	if err != nil {
		return nil, fmt.Errorf("stream.client_ca: %w", err)
	}
	t.ClientCAs, t.ClientAuth = x509.NewCertPool(), tls.RequireAndVerifyClientCert
	if !t.ClientCAs.AppendCertsFromPEM(data) {
		return nil, errors.New("stream.client_ca: no certificate in " + cfg.StreamClientCA)
	}
	return t, nil
}

// serveStreaming serves sessions in the background. stop ends the sessions and waits for their end.
func serveStreaming(s *streaming.Server, log *slog.Logger) (stop func() error) {
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() {
		err := s.Serve(ctx)
		if err != nil && ctx.Err() == nil {
			log.Error("streaming server failed: exec, attach and port-forward do not work until berth is restarted",
				"error", err)
		}
		ended <- err
	}()
	return func() error {
		cancel()
		return <-ended
	}
}
