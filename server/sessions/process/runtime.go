package process

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"

	"berth/internal/coded"
	"berth/sandbox/stream/copying"
	"berth/server/sessions/wire"
	"berth/shim/proto"
	"berth/shim/running"
)

// runtime runs sessions that the daemon has begun. It implements streaming.Runtime.
type runtime struct {
	*link
	spawn copying.Spawn
	log   *slog.Logger
}

// Exec implements streaming.Runtime.
func (r runtime) Exec(ctx context.Context, s wire.Session, client copying.IO) (int32, error) {
	a, files, end, err := r.begin(ctx, wire.Open{Session: s})
	if err != nil {
		return 0, err
	}
	defer end()
	process, kept, err := r.adopt(a, files)
	if err != nil {
		return 0, err
	}
	code, err := r.spawn.Exec(ctx, process, kept, client)
	if err != nil {
		return 0, fmt.Errorf("exec in container %s: %w", s.ID, err)
	}
	return code, nil
}

// adopt takes over the exec of an answer, and the kept ends of its pipes.
func (r runtime) adopt(a wire.Answer, files []*os.File) (p *running.Adopted, kept copying.Pipes, err error) {
	for i := range kept {
		if a.Kept&(1<<i) == 0 || len(files) == 0 || err != nil {
			continue
		}
		kept[i], err = running.NonBlocking(files[0])
		files = files[1:]
	}
	if err == nil && a.Exec == nil {
		err = coded.Errorf(coded.Internal, "unexpected answer of the daemon")
	}
	if err != nil {
		err = errors.Join(err, wire.CloseAll(files))
	} else {
		p, err = running.Adopt(*a.Exec, files, r.log, r.spawn)
	}
	if err != nil {
		kept.Close()
	}
	return p, kept, err
}

// Attach implements streaming.Runtime.
func (r runtime) Attach(ctx context.Context, s wire.Session, client copying.IO) error {
	a, files, end, err := r.begin(ctx, wire.Open{Session: s})
	if err != nil {
		return err
	}
	defer end()
	if len(files) == 0 { // no stream is wanted
		return nil
	}
	conn, err := connOf[*net.UnixConn](files)
	if err != nil {
		return err
	}
	if a.Attach == nil {
		return errors.Join(coded.Errorf(coded.Internal, "unexpected answer of the daemon"), conn.Close())
	}
	monitor := &running.Attached{FrameConn: &proto.FrameConn{UnixConn: conn, In: a.Attach.In},
		AnnouncesEnd: a.Attach.AnnouncesEnd}
	if err := r.spawn.Attach(ctx, monitor, a.Attach.Target, client); err != nil {
		return fmt.Errorf("container %s: %w", s.ID, err)
	}
	return nil
}

// PortForward implements streaming.Runtime.
func (r runtime) PortForward(ctx context.Context, s wire.Session, port int32, client io.ReadWriteCloser) error {
	_, files, end, err := r.begin(ctx, wire.Open{Session: s, Port: port})
	if err != nil {
		return err
	}
	defer end()
	conn, err := connOf[*net.TCPConn](files)
	if err == nil {
		err = r.spawn.Forward(ctx, conn, client)
	}
	if err != nil {
		return fmt.Errorf("forward port %d of pod sandbox %s: %w", port, s.ID, err)
	}
	return nil
}

// connOf returns the connection that came as a file. It takes over the files.
func connOf[T net.Conn](files []*os.File) (conn T, err error) {
	if len(files) != 1 {
		return conn, errors.Join(coded.Errorf(coded.Internal, "answer with %d files", len(files)), wire.CloseAll(files))
	}
	c, err := net.FileConn(files[0])
	if err := errors.Join(err, files[0].Close()); err != nil {
		return conn, fmt.Errorf("take over connection: %w", err)
	}
	conn, ok := c.(T)
	if !ok {
		return conn, errors.Join(coded.Errorf(coded.Internal, "answer with a %T", c), c.Close())
	}
	return conn, nil
}
