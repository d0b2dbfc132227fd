package copying

import (
	"context"
	"errors"
	"io"
	"net"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

// Forward connects a client to a connection of a pod, which it takes over. It returns when both
// sides have ended, one of them fails, or ctx ends. Each side may close its direction and continue
// in the other, but the client must send something in each clientRest after the pod's end. Closing
// stream closes the direction to the client.
//
// Forward does not always wait for a pending Read from stream, so the caller closes stream. The
// error is Unavailable when the program is stopping.
func (spawn Spawn) Forward(ctx context.Context, conn *net.TCPConn, stream io.ReadWriteCloser) error {
	defer conn.Close()
	defer context.AfterFunc(ctx, func() { interrupt(conn) })()
	return spawn.copyBoth(ctx, conn, stream)
}

// clientRest is the time without data from a client after which the pod's end ends the connection,
// as with containerd and CRI-O. SPDY clients before client-go 1.32 end their side only after the
// server has ended the connection.
const clientRest = time.Second

// interrupt makes reads and writes fail.
func interrupt(conn net.Conn) { _ = conn.SetDeadline(time.Unix(1, 0)) }

// copyBoth copies in both directions until both have ended, one fails, or ctx ends.
func (spawn Spawn) copyBoth(ctx context.Context, conn *net.TCPConn, stream io.ReadWriteCloser) error {
	toPod, input := make(chan error, 1), &input{Reader: stream}
	// Ends when the caller closes stream.
	spawned := spawn(func() { toPod <- copyToPod(conn, input) })
	if !spawned {
		return errStopping
	}
	_, err := io.Copy(stream, conn)
	if err == nil {
		err = stream.Close()
	}
	if err != nil {
		select {
		case inputErr := <-toPod: // the cause, if the input failed first
			return errors.Join(inputErr, err)
		default:
			return err
		}
	}
	for {
		steps := input.steps.Load()
		select {
		case <-toPod: // the pod's side is complete, so errors of the client's side do not matter
			return nil
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(clientRest):
			if input.steps.Load() == steps && steps%2 == 1 {
				return nil
			}
		}
	}
}

// input counts the beginnings and ends of reads. The count is odd during a read.
type input struct {
	io.Reader
	steps atomic.Int64
}

// Read implements io.Reader.
func (i *input) Read(p []byte) (int, error) {
	i.steps.Add(1)
	defer i.steps.Add(1)
	return i.Reader.Read(p)
}

// copyToPod copies until the client ends or a write fails. If the pod has closed the connection,
// the data that it has sent before must still be read.
func copyToPod(conn *net.TCPConn, stream io.Reader) error {
	_, err := io.Copy(conn, stream)
	if err != nil && !errors.Is(err, unix.ECONNRESET) && !errors.Is(err, unix.EPIPE) {
		interrupt(conn)
	}
	_ = conn.CloseWrite() // fails after the pod closed the connection, which the other copy sees
	return err
}
