package host

import (
	"os"
	"path/filepath"
	"testing"

	"berth/internal/testutil"
)

func TestResolvConf(t *testing.T) {
	t.Parallel()
	const (
		stub   = "# Made by systemd-resolved\nnameserver 127.0.0.53\noptions edns0 trust-ad\nsearch lan\n"
		behind = "nameserver 192.0.2.1\nnameserver 2001:db8::1\n"
	)
	for name, c := range map[string]struct{ etc, resolved, want string }{
		"plain":                      {"nameserver 192.0.2.9\n", "", etcResolvConf},
		"plain beside resolved":      {"nameserver 192.0.2.9\n", behind, etcResolvConf},
		"stub":                       {stub, behind, resolvedConf},
		"both stubs":                 {stub + "nameserver 127.0.0.54\n", behind, resolvedConf},
		"stub and another":           {stub + "nameserver 192.0.2.9\n", behind, etcResolvConf},
		"another resolver on lo":     {"nameserver 127.0.0.1\n", behind, etcResolvConf},
		"stub, nothing behind it":    {stub, "# no servers known\n", etcResolvConf},
		"stub, resolved without one": {stub, "", etcResolvConf},
		"stub with a comment":        {"nameserver 127.0.0.53;resolved\n", behind, resolvedConf},
		"comment behind a server":    {stub + "nameserver 192.0.2.9#lan\n", behind, etcResolvConf},
		"stub and a malformed word":  {stub + "nameserver 192.0.2.999\n", behind, resolvedConf},
		"no servers":                 {"search lan\n", behind, etcResolvConf},
		"no file":                    {"", behind, etcResolvConf},
	} {
		t.Run(name, func(t *testing.T) {
			root := t.TempDir()
			for path, content := range map[string]string{etcResolvConf: c.etc, resolvedConf: c.resolved} {
				if content == "" {
					continue
				}
				path = filepath.Join(root, path)
				testutil.Must(t, os.MkdirAll(filepath.Dir(path), 0o755))
				testutil.Must(t, os.WriteFile(path, []byte(content), 0o644))
			}
			if got := ResolvConf(root); got != c.want {
				t.Errorf("got %s, want %s", got, c.want)
			}
		})
	}
}
