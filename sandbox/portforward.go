package sandbox

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"strconv"
	"time"

	"berth/cni"
	"berth/internal/errdefs"
)

// dialTime is how long a port in a pod may take to accept a connection.
const dialTime = 10 * time.Second

// CheckPortForward tells whether PortForward would find a pod, and returns its full
// ID. Errors: as PortForward's.
func (m *Manager) CheckPortForward(podID string) (string, error) {
	pod, err := m.forwardTarget(podID)
	if err != nil {
		return "", err
	}
	return pod.ID, nil
}

func (m *Manager) forwardTarget(podID string) (*PodInfo, error) {
	pod, err := m.Pod(podID)
	if err != nil {
		return nil, err
	}
	if !pod.Ready {
		return nil, errdefs.FailedPrecondition("forward a port of pod sandbox %s: it is not ready", pod.ID)
	}
	return pod, nil
}

// PortForward connects a client to a TCP port that a pod's processes listen on at
// their localhost, IPv4 first, until both sides have ended, one of them fails, or ctx
// ends. Each side may close its direction and go on in the other (stream.Close closes
// the one to the client).
//
// When it fails a Read from stream that is under way is not waited for: the caller
// closes the stream.
//
// Errors: NotFound, FailedPrecondition if the pod is not ready, InvalidArgument for no
// port, Unavailable if nothing listens there.
func (m *Manager) PortForward(ctx context.Context, podID string, port int32, stream io.ReadWriteCloser) error {
	pod, err := m.forwardTarget(podID)
	if err != nil {
		return err
	}
	if port < 1 || port > 65535 {
		return errdefs.InvalidArgument("forward a port of pod sandbox %s: %d is no port", pod.ID, port)
	}
	conn, err := dialPod(ctx, pod, port)
	if err != nil {
		return err
	}
	defer conn.Close()
	defer context.AfterFunc(ctx, func() { interrupt(conn) })()
	if err := m.forward(ctx, conn, stream); err != nil {
		return fmt.Errorf("forward port %d of pod sandbox %s: %w", port, pod.ID, err)
	}
	return nil
}

// interrupt makes reads and writes fail.
func interrupt(conn net.Conn) { _ = conn.SetDeadline(time.Unix(1, 0)) }

// forward copies in both directions until both have ended, one fails, or ctx ends.
func (m *Manager) forward(ctx context.Context, conn *net.TCPConn, stream io.ReadWriteCloser) error {
	toPod := make(chan error, 1)
	spawned := m.tasks.Operations.Spawn(func() { // see PortForward for its end
		_, err := io.Copy(conn, stream)
		if err != nil {
			interrupt(conn)
		}
		_ = conn.CloseWrite() // fails if the pod has closed its side, which reading tells
		toPod <- err
	})
	if !spawned {
		return errdefs.Unavailable("berth is stopping")
	}
	_, err := io.Copy(stream, conn)
	if err == nil {
		err = stream.Close()
	}
	if err != nil {
		select {
		case inputErr := <-toPod: // the reason, if there is one
			return errors.Join(inputErr, err)
		default:
			return err
		}
	}
	select {
	case <-toPod: // the pod has said all: how the client leaves is of no interest
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// dialPod connects to a port at localhost, as seen in the pod's network namespace.
func dialPod(ctx context.Context, pod *PodInfo, port int32) (*net.TCPConn, error) {
	ctx, cancel := context.WithTimeout(ctx, dialTime)
	defer cancel()
	var conn *net.TCPConn
	dial := func() (err error) { conn, err = dialLocalhost(ctx, port); return err }
	var err error
	if pod.NetNS == "" { // the host's
		err = dial()
	} else {
		err = cni.InNetNS(pod.NetNS, dial)
	}
	if err != nil {
		return nil, errdefs.Unavailable("connect to port %d of pod sandbox %s: %w", port, pod.ID, err)
	}
	return conn, nil
}

// dialLocalhost connects from the network namespace of the calling thread.
func dialLocalhost(ctx context.Context, port int32) (*net.TCPConn, error) {
	var all error
	for _, address := range []string{"127.0.0.1", "::1"} {
		var d net.Dialer
		conn, err := d.DialContext(ctx, "tcp", net.JoinHostPort(address, strconv.Itoa(int(port))))
		if err == nil {
			return conn.(*net.TCPConn), nil
		}
		all = errors.Join(all, err)
	}
	return nil, all
}
