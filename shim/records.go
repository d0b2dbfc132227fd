package shim

import (
	"fmt"
	"os"
	"path/filepath"
	"time"

	"berth/internal/failpoint"
	"berth/shim/record"
)

// Launched is the content of Dir/shim: who runs a container. Start times are clock
// ticks since boot; see pidfd.OpenVerified.
type Launched struct {
	ShimPID       int // launcher or monitor; 0 for a pause that runs
	ShimStartTime uint64
	InitPID       int // 0: the container's init does not exist yet
	InitStartTime uint64
	StartedAt     time.Time
}

// ReadShim reads Dir/shim. The error wraps fs.ErrNotExist if nothing was launched.
func ReadShim(dir string) (Launched, error) {
	data, err := os.ReadFile(filepath.Join(dir, record.ShimFile))
	if err != nil {
		return Launched{}, fmt.Errorf("read shim record: %w", err)
	}
	s, err := record.DecodeShim(data)
	if err != nil {
		return Launched{}, fmt.Errorf("read shim record of %s: %w", dir, err)
	}
	l := Launched{ShimPID: s.PID, ShimStartTime: s.Start, InitPID: s.InitPID, InitStartTime: s.InitStart}
	if s.StartedAt != 0 {
		l.StartedAt = time.Unix(0, s.StartedAt)
	}
	return l, nil
}

// ReadExit reads Dir/exit. The error wraps fs.ErrNotExist if there is none: then,
// if the monitor has ended, it was lost.
func ReadExit(dir string) (Exit, error) {
	data, err := os.ReadFile(filepath.Join(dir, record.ExitFile))
	if err != nil {
		return Exit{}, fmt.Errorf("read exit record: %w", err)
	}
	e, err := record.DecodeExit(data)
	if err != nil {
		return Exit{}, fmt.Errorf("read exit record of %s: %w", dir, err)
	}
	return Exit{Code: e.Code, Signal: int(e.Signal), OOMKilled: e.OOMKilled, At: time.Unix(0, e.At)}, nil
}

// WriteExit writes Dir/exit for a monitor that does not. One that is there, and can be trusted,
// stays.
func WriteExit(dir string, e Exit) error {
	if _, err := ReadExit(dir); err == nil {
		return nil
	}
	r := record.Exit{Code: e.Code, Signal: int32(e.Signal), OOMKilled: e.OOMKilled, At: e.At.UnixNano()}
	failpoint.Reach("exit.write")
	err := record.Write(dir, record.ExitFile, r.Encode())
	failpoint.Reach("exit.written")
	if err != nil {
		return fmt.Errorf("write exit record of %s: %w", dir, err)
	}
	return nil
}
