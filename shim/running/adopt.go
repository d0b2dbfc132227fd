package running

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"berth/internal/coded"
	"berth/internal/pidfd"
	"berth/shim/proto"
)

// HandOver sends the exec to another process. launcher is the launcher's pidfd. send sends the
// record and the files for Adopt. The caller then closes its end of the connection, also after an
// error.
func (e *Exec) HandOver(launcher *os.File, send func(Record, []*os.File) error) error {
	conn, err := e.conn.File()
	if err != nil {
		return fmt.Errorf("hand over exec: %w", err)
	}
	files := []*os.File{conn, launcher, e.proc}
	if e.console != nil {
		files = append(files, e.console)
	}
	if err := errors.Join(send(e.Record, files), conn.Close()); err != nil {
		return fmt.Errorf("hand over exec: %w", err)
	}
	return nil
}

// Adopted is an exec that another process has handed over. Close must be called once.
type Adopted struct {
	*Exec
	launcher *os.File // pidfd
	spawn    func(func()) bool
}

// Adopt takes over the exec and the files that HandOver has sent. spawn starts a goroutine that the
// caller owns.
func Adopt(r Record, files []*os.File, log *slog.Logger, spawn func(func()) bool) (*Adopted, error) {
	if len(files) < 3 {
		return nil, errors.Join(coded.Errorf(coded.Internal, "adopt exec: %d files", len(files)), closeFiles(files))
	}
	conn, err := proto.NewConn(files[0])
	if err != nil {
		return nil, errors.Join(err, closeFiles(files[1:]))
	}
	launcher, err := pidfd.FromFile(files[1])
	if err != nil {
		return nil, errors.Join(err, conn.Close(), closeFiles(files[2:]))
	}
	e, err := New(r, conn, files[2:], log)
	if err != nil {
		return nil, errors.Join(err, conn.Close(), launcher.Close())
	}
	return &Adopted{e, launcher, spawn}, nil
}

// launcherTimeout bounds the exit of a launcher whose connection was closed.
const launcherTimeout = 10 * time.Second

// remainsTimeout bounds the attempts to remove what a lost exec has left, because the process of
// sessions waits for them at its end. Then the removal of the container removes it.
const remainsTimeout = 10 * time.Minute

// Close releases the exec and its launcher. It kills a process that still runs, with its
// descendants.
func (a *Adopted) Close() error {
	ended, _, lost := a.Result()
	closeErr := errors.Join(a.conn.Close(), a.CloseFiles())
	clear := func() {
		defer a.launcher.Close()
		if err := a.endLauncher(); err != nil {
			a.log.Error("end the launcher of an exec", "container", a.Container, "exec", a.ExecID, "error", err)
		} else if !ended || lost != nil {
			ctx, cancel := context.WithTimeout(context.Background(), remainsTimeout)
			defer cancel()
			a.RemoveUntil(ctx, a.log)
		}
	}
	if !a.spawn(clear) {
		clear()
	}
	return closeErr
}

// endLauncher waits for the launcher, which kills an exec that still runs. It kills a launcher that
// does not end.
func (a *Adopted) endLauncher() error {
	ctx, cancel := context.WithTimeout(context.Background(), launcherTimeout)
	defer cancel()
	if err := pidfd.Wait(ctx, a.launcher); err != nil {
		err = pidfd.Signal(a.launcher, unix.SIGKILL)
		if err != nil && !errors.Is(err, os.ErrProcessDone) {
			return fmt.Errorf("kill launcher: %w", err)
		}
	}
	return nil
}
