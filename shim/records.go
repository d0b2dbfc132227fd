package shim

import (
	"fmt"
	"os"
	"path/filepath"

	"berth/internal/failpoint"
	"berth/shim/proto"
)

// ReadShim reads Dir/shim. The error wraps fs.ErrNotExist if nothing was launched.
func ReadShim(dir string) (proto.PIDs, error) {
	data, err := os.ReadFile(filepath.Join(dir, proto.ShimFile))
	if err != nil {
		return proto.PIDs{}, fmt.Errorf("read shim record: %w", err)
	}
	p, err := proto.DecodePIDs(data)
	if err != nil {
		return proto.PIDs{}, fmt.Errorf("read shim record of %s: %w: remove that directory if no process of the launch runs",
			dir, err)
	}
	return p, nil
}

// ReadExit reads Dir/exit. The error wraps fs.ErrNotExist if there is none. If the monitor has
// ended then, it was lost.
func ReadExit(dir string) (proto.Exit, error) {
	data, err := os.ReadFile(filepath.Join(dir, proto.ExitFile))
	if err != nil {
		return proto.Exit{}, fmt.Errorf("read exit record: %w", err)
	}
	e, err := proto.DecodeExit(data)
	if err != nil {
		return proto.Exit{}, fmt.Errorf("read exit record of %s: %w", dir, err)
	}
	return e, nil
}

// WriteExit writes Dir/exit in place of a lost monitor. It keeps a valid record that exists.
func WriteExit(dir string, e proto.Exit) error {
	if _, err := ReadExit(dir); err == nil {
		return nil
	}
	failpoint.Reach("exit.write")
	err := proto.WriteFile(dir, proto.ExitFile, e.Encode())
	failpoint.Reach("exit.written")
	if err != nil {
		return fmt.Errorf("write exit record of %s: %w", dir, err)
	}
	return nil
}

// NoteSignalled records in a shim directory that the container got its stop signal.
func NoteSignalled(dir string) error {
	failpoint.Reach("signal.note")
	err := os.WriteFile(filepath.Join(dir, proto.SignalledFile), nil, 0o600)
	failpoint.Reach("signal.noted")
	if err != nil {
		return fmt.Errorf("record a stop signal: %w", err)
	}
	return nil
}

// Signalled returns whether NoteSignalled was called.
func Signalled(dir string) bool {
	_, err := os.Lstat(filepath.Join(dir, proto.SignalledFile))
	return err == nil
}
