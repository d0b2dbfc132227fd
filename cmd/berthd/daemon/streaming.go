package daemon

import (
	"path/filepath"

	"berth/cmd/config"
	"berth/cmd/node"
	"berth/sandbox"
	"berth/server/sessions"
	"berth/server/sessions/certs"
	"berth/server/sessions/wire"
)

// openSessions opens exec, attach and port-forward sessions. A process of their own has them, so
// they outlive the daemon.
func (a *assembly) openSessions(n *node.Node, pods *sandbox.Manager) (*sessions.Sessions, error) {
	settings := sessionSettings(a.cfg)
	files, err := certs.Open(settings.TLS, nil, a.log)
	if err != nil {
		return nil, err
	}
	s, err := sessions.Open(sessions.Config{
		Dir:      filepath.Join(a.cfg.State, "sessions"),
		Program:  n.Stream,
		Settings: settings,
		Certs:    files,
		Explain: func(id string) func(error) error {
			named, _ := a.names.Of(id)
			return named.Explain
		},
		Log: a.log,
	}, pods)
	if err != nil {
		return nil, err
	}
	a.closing.Add("leave streaming sessions", a.shutdown.closer(s.Close))
	return s, nil
}

func sessionSettings(cfg *config.Config) wire.Settings {
	return wire.Settings{
		Address:     cfg.StreamAddress,
		TLS:         wire.TLS{Cert: cfg.StreamTLSCert, Key: cfg.StreamTLSKey, ClientCA: cfg.StreamClientCA},
		IdleTimeout: cfg.StreamIdleTimeout.Duration,
		LogFormat:   cfg.LogFormat,
		LogLevel:    cfg.LogLevel,
	}
}
