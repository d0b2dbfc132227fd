package server

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/peer"

	"berth/internal/failpoint"
	"berth/server/journal"
)

// Listen makes the unix socket at path with mode 0600, and a missing directory with mode 0700. It
// replaces a socket that has no listener. Any other file at path is an error. The caller holds the
// lock of the daemon's directories, so no other berth starts at the same time.
//
// Closing the listener removes the socket.
func Listen(path string) (net.Listener, error) { return listenIn(path, 0o700) }

// ListenForRoot is Listen for servers that do not check their clients. It closes connections of
// other users than root and the daemon's.
func ListenForRoot(path string, log *slog.Logger) (net.Listener, error) {
	l, err := Listen(path)
	if err != nil {
		return nil, err
	}
	return rootListener{l, log}, nil
}

// rootListener accepts only connections of root and of the daemon's user.
type rootListener struct {
	net.Listener
	log *slog.Logger
}

// Accept implements net.Listener.
func (l rootListener) Accept() (net.Conn, error) {
	for {
		conn, err := l.Listener.Accept()
		if err != nil {
			return nil, err
		}
		if _, err := checkPeer(conn, l.log); err == nil {
			return conn, nil
		}
		_ = conn.Close() // refused
	}
}

// endingListener accepts no connection after end. A stop of gRPC closes connections that it has
// accepted and not begun to serve, and their clients would see an error. Connections that are not
// accepted wait in the socket for the next daemon.
type endingListener struct {
	net.Listener
	accepted *sync.WaitGroup // an accepted connection counts until its handshake begins
	ended    chan struct{}   // closed when Accept has noticed end
	closed   chan struct{}   // closed by Close
}

func newEndingListener(l net.Listener, accepted *sync.WaitGroup) *endingListener {
	return &endingListener{Listener: l, accepted: accepted, ended: make(chan struct{}), closed: make(chan struct{})}
}

// Accept implements net.Listener. After end it returns with Close, because its error ends Serve.
// gRPC calls it from one goroutine.
func (l *endingListener) Accept() (net.Conn, error) {
	conn, err := l.Listener.Accept()
	switch {
	case err == nil:
		l.accepted.Add(1)
	case errors.Is(err, os.ErrDeadlineExceeded):
		close(l.ended)
		<-l.closed
		err = net.ErrClosed
	}
	return conn, err
}

// end returns when the handshakes of all accepted connections have begun.
func (l *endingListener) end() {
	limited, ok := l.Listener.(interface{ SetDeadline(time.Time) error })
	if !ok || limited.SetDeadline(time.Unix(1, 0)) != nil { // wakes Accept
		return
	}
	select {
	case <-l.ended:
	case <-l.closed: // Serve has failed
	}
	l.accepted.Wait()
}

// Close implements net.Listener. gRPC calls it once.
func (l *endingListener) Close() error {
	close(l.closed)
	return l.Listener.Close()
}

// ListenForCadvisor is Listen for Cadvisor's socket. Like containerd it makes a missing directory
// with mode 0711, because other programs have sockets in it.
func ListenForCadvisor(path string) (net.Listener, error) {
	l, err := listenIn(path, 0o711)
	if err != nil {
		return nil, fmt.Errorf("cadvisor_socket: %w; stop the other server, or set another path or an empty one", err)
	}
	return l, nil
}

func listenIn(path string, dirMode fs.FileMode) (net.Listener, error) {
	failpoint.Reach("socket.make-directory")
	if err := os.MkdirAll(filepath.Dir(path), dirMode); err != nil {
		return nil, fmt.Errorf("make directory of socket %s: %w", path, err)
	}
	failpoint.Reach("socket.directory-made")
	if err := removeStale(path); err != nil {
		return nil, err
	}
	// The kernel creates the socket file with the mode of the unbound socket's inode and the umask.
	// So other users cannot connect at any moment (net/unix/af_unix.c, unix_bind_bsd).
	private := net.ListenConfig{Control: func(_, _ string, c syscall.RawConn) error {
		var err error
		if e := c.Control(func(fd uintptr) { err = unix.Fchmod(int(fd), 0o600) }); e != nil {
			return e
		}
		return err
	}}
	l, err := private.Listen(context.Background(), "unix", path)
	if err != nil {
		return nil, fmt.Errorf("listen on %s: %w", path, err)
	}
	failpoint.Reach("socket.made")
	return l, nil
}

// removeStale removes the socket at path if it refuses connections.
func removeStale(path string) error {
	info, err := os.Lstat(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("stat %s: %w", path, err)
	}
	if info.Mode().Type() != fs.ModeSocket {
		return fmt.Errorf("listen on %s: it exists and is not a socket", path)
	}
	conn, err := net.DialTimeout("unix", path, time.Second)
	if err == nil {
		defer conn.Close()
		return fmt.Errorf("listen on %s: %s serves it", path, peerName(conn))
	}
	if !errors.Is(err, unix.ECONNREFUSED) {
		return fmt.Errorf("check whether %s is in use: %w", path, err)
	}
	failpoint.Reach("socket.remove-stale")
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("remove stale socket: %w", err)
	}
	failpoint.Reach("socket.stale-removed")
	return nil
}

// peerName describes the process at the other end of conn for the log.
func peerName(conn net.Conn) string {
	if cred, err := peerOf(conn); err == nil && cred.Pid != 0 {
		return fmt.Sprintf("process %d", cred.Pid)
	}
	return "another process"
}

// peerOf returns the credentials of a unix connection's peer.
func peerOf(conn net.Conn) (*unix.Ucred, error) {
	u, ok := conn.(*net.UnixConn)
	if !ok {
		return nil, fmt.Errorf("%s is not a unix connection", conn.RemoteAddr())
	}
	raw, err := u.SyscallConn()
	if err != nil {
		return nil, err
	}
	var cred *unix.Ucred
	if e := raw.Control(func(fd uintptr) {
		cred, err = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED)
	}); e != nil {
		return nil, e
	}
	return cred, err
}

// checkPeer returns an error if the peer of conn is neither root nor the daemon's user.
func checkPeer(conn net.Conn, log *slog.Logger) (*unix.Ucred, error) {
	cred, err := peerOf(conn)
	if err != nil {
		return nil, fmt.Errorf("read peer credentials: %w", err)
	}
	if cred.Uid != 0 && int(cred.Uid) != os.Geteuid() {
		log.Warn("connection refused", "peer", cred.Pid, "uid", cred.Uid)
		return nil, fmt.Errorf("uid %d is not root", cred.Uid)
	}
	return cred, nil
}

// peerCredentials admits only root and the daemon's user, because any CRI client can become root.
// The socket's mode has the same effect, but an operator or a systemd socket unit may change it.
type peerCredentials struct {
	log   *slog.Logger
	begun func() // called when the handshake of a connection begins
}

// peerInfo is the AuthInfo of a connection.
type peerInfo struct {
	credentials.CommonAuthInfo
	pid    int32
	conn   *markedConn
	frames *refusingConn
}

// clientOf returns the connection of a call. ok is false in tests without gRPC.
func clientOf(ctx context.Context) (info peerInfo, ok bool) {
	if p, found := peer.FromContext(ctx); found {
		info, ok = p.AuthInfo.(peerInfo)
	}
	return info, ok
}

// process returns the client. It is the zero Process if the client has ended, or if it is in a PID
// namespace that the daemon does not see.
func (p peerInfo) process() journal.Process {
	found, err := journal.ProcessOf(int(p.pid))
	if err != nil {
		return journal.Process{}
	}
	return found
}

// AuthType implements credentials.AuthInfo.
func (peerInfo) AuthType() string { return "peercred" }

// ServerHandshake implements credentials.TransportCredentials.
func (p peerCredentials) ServerHandshake(conn net.Conn) (net.Conn, credentials.AuthInfo, error) {
	p.begun()
	cred, err := checkPeer(conn, p.log)
	if err != nil {
		return nil, nil, err
	}
	refusing := newRefusingConn(conn)
	marked := &markedConn{Conn: refusing}
	common := credentials.CommonAuthInfo{SecurityLevel: credentials.PrivacyAndIntegrity}
	return marked, peerInfo{common, cred.Pid, marked, refusing}, nil
}

// ClientHandshake implements credentials.TransportCredentials. It always fails.
func (peerCredentials) ClientHandshake(context.Context, string, net.Conn) (net.Conn, credentials.AuthInfo, error) {
	return nil, nil, errors.New("peer credentials are for servers")
}

// Info implements credentials.TransportCredentials.
func (peerCredentials) Info() credentials.ProtocolInfo {
	return credentials.ProtocolInfo{SecurityProtocol: "peercred"}
}

// Clone implements credentials.TransportCredentials.
func (p peerCredentials) Clone() credentials.TransportCredentials { return p }

// OverrideServerName implements credentials.TransportCredentials.
func (peerCredentials) OverrideServerName(string) error { return nil }
