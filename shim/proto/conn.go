package proto

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

const (
	headerSize = 4
	// maxMessage bounds the memory that a corrupt length can allocate. A spec with its seccomp
	// profile has some tens of KB.
	maxMessage = 16 << 20
	// maxFDs is the maximum number of descriptors in one message: the three of an exec, or the
	// mounts of a container's images.
	maxFDs = 32
)

// Conn is one end of the connection. It carries messages in JSON or in the compact encoding, each
// after its length (four bytes, big-endian). Open files are sent with the first byte of a message
// (SCM_RIGHTS). One goroutine may receive while others send.
type Conn struct {
	unix *net.UnixConn

	in    []byte     // received bytes of one message; used only by Receive
	files []*os.File // that came with it

	sendTimeout time.Duration // the constant, except in tests
	sending     sync.Mutex    // held for one message, so that messages do not mix
}

// NewConn returns the Conn of a connected unix stream socket. It takes over file.
func NewConn(file *os.File) (*Conn, error) {
	c, err := net.FileConn(file)
	if err := errors.Join(err, file.Close()); err != nil {
		return nil, fmt.Errorf("control socket: %w", err)
	}
	u, ok := c.(*net.UnixConn)
	if !ok {
		return nil, errors.Join(fmt.Errorf("control socket: it is a %T", c), c.Close())
	}
	return &Conn{unix: u, sendTimeout: sendTimeout}, nil
}

// ConnPair returns a Conn and the file for the NewConn of the other end.
func ConnPair() (*Conn, *os.File, error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, nil, fmt.Errorf("control socket: %w", err)
	}
	other := os.NewFile(uintptr(fds[1]), "control")
	c, err := NewConn(os.NewFile(uintptr(fds[0]), "control"))
	if err != nil {
		return nil, nil, errors.Join(err, other.Close())
	}
	return c, other, nil
}

// sendTimeout bounds the wait for space in the socket. Only a spec of hundreds of KB does not fit
// into an empty socket.
const sendTimeout = 10 * time.Second

// ErrUnread means that the other end has closed the connection, or died, before it had read every
// message. So it has not seen the last message whole.
var ErrUnread = errors.New("the other end has ended without reading")

// Send sends one message. The caller still owns the files. If the other end does not read, the
// error is os.ErrDeadlineExceeded, and the connection can no longer be used. If the other end has
// closed the connection, it is ErrUnread.
func (c *Conn) Send(message any, files ...*os.File) error {
	body, err := encode(message)
	if err != nil {
		return fmt.Errorf("encode %T: %w", message, err)
	}
	if len(body) > maxMessage {
		return fmt.Errorf("encode %T: %d bytes are too long", message, len(body))
	}
	data := append(binary.BigEndian.AppendUint32(make([]byte, 0, headerSize+len(body)), uint32(len(body))), body...)
	var fds []int
	for _, f := range files {
		fds = append(fds, int(f.Fd()))
	}

	c.sending.Lock()
	defer c.sending.Unlock()
	if err := c.unix.SetWriteDeadline(time.Now().Add(c.sendTimeout)); err != nil {
		return fmt.Errorf("send %T: %w", message, err)
	}
	n, _, err := c.unix.WriteMsgUnix(data, rights(fds), nil)
	if err == nil && n < len(data) {
		_, err = c.unix.Write(data[n:])
	}
	if errors.Is(err, unix.EPIPE) || errors.Is(err, unix.ECONNRESET) {
		err = fmt.Errorf("%w: %w", ErrUnread, err)
	}
	if err != nil {
		return fmt.Errorf("send %T: %w", message, err)
	}
	return nil
}

func encode(message any) ([]byte, error) {
	if isCompact(message) {
		return encodeCompact(message), nil
	}
	return json.Marshal(message)
}

func decode(body []byte, message any) error {
	if len(body) > 0 && body[0] == compactStart {
		return decodeCompact(body, message)
	}
	return json.Unmarshal(body, message)
}

func rights(fds []int) []byte {
	if len(fds) == 0 {
		return nil
	}
	return unix.UnixRights(fds...)
}

// Receive decodes the next message and returns the files that came with it. The caller owns them.
// The error is io.EOF if the other end closed between two messages, and ErrUnread if it has not read
// everything. After a timeout (SetDeadline) Receive may be called again.
func (c *Conn) Receive(message any) ([]*os.File, error) {
	for {
		body, missing, err := c.next()
		if err != nil {
			return nil, fmt.Errorf("receive %T: %w", message, err)
		}
		if missing == 0 {
			files := c.files
			c.files = nil
			if err := decode(body, message); err != nil {
				return nil, errors.Join(fmt.Errorf("decode %T: %w", message, err), closeAll(files))
			}
			c.in = nil
			return files, nil
		}
		if err := c.read(missing); err != nil {
			if err == io.EOF && len(c.in) == 0 { //nolint:errorlint // read does not wrap it
				return nil, io.EOF
			}
			return nil, fmt.Errorf("receive %T: %w", message, err)
		}
	}
}

// next returns the body of the message, or the number of bytes that are missing of it, or of its
// length.
func (c *Conn) next() (body []byte, missing int, err error) {
	if len(c.in) < headerSize {
		return nil, headerSize - len(c.in), nil
	}
	size := binary.BigEndian.Uint32(c.in)
	if size > maxMessage {
		return nil, 0, fmt.Errorf("message of %d bytes is too long", size)
	}
	return c.in[headerSize:], headerSize + int(size) - len(c.in), nil
}

// read receives at most that many bytes, so no byte of the next message. The kernel gives the files
// of a message to the read of its first byte, which may begin with bytes of the message before.
func (c *Conn) read(missing int) error {
	buf := make([]byte, min(missing, 64<<10))
	oob := make([]byte, unix.CmsgSpace(maxFDs*4))
	n, oobn, flags, _, err := c.unix.ReadMsgUnix(buf, oob)
	if oobn > 0 {
		files, err := parseRights(oob[:oobn])
		c.files = append(c.files, files...)
		if err != nil {
			return err
		}
	}
	switch {
	case errors.Is(err, unix.ECONNRESET): // unix(7): closed by the other end with unread data
		return fmt.Errorf("%w: %w", ErrUnread, err)
	case err != nil:
		return err
	case flags&unix.MSG_CTRUNC != 0 && len(c.files) < maxFDs:
		return fmt.Errorf("receive files: %w", unix.EMFILE) // this process had no free descriptors
	case flags&unix.MSG_CTRUNC != 0:
		return errors.New("too many files in one message")
	case n == 0:
		return io.EOF
	}
	c.in = append(c.in, buf[:n]...)
	return nil
}

// parseRights returns the files of a control message. They are close-on-exec (MSG_CMSG_CLOEXEC,
// which package net sets).
func parseRights(oob []byte) ([]*os.File, error) {
	messages, err := unix.ParseSocketControlMessage(oob)
	if err != nil {
		return nil, fmt.Errorf("parse control message: %w", err)
	}
	var files []*os.File
	for i := range messages {
		fds, err := unix.ParseUnixRights(&messages[i])
		if err != nil {
			return files, fmt.Errorf("parse control message: %w", err)
		}
		for _, fd := range fds {
			files = append(files, os.NewFile(uintptr(fd), "received"))
		}
	}
	return files, nil
}

// File returns a duplicate of the socket, to be sent to another process. Receive must have
// returned.
func (c *Conn) File() (*os.File, error) { return c.unix.File() }

// SetDeadline bounds Receive. The zero time removes the bound.
func (c *Conn) SetDeadline(t time.Time) error { return c.unix.SetReadDeadline(t) }

// Interrupt makes a Send and a Receive in progress fail with os.ErrDeadlineExceeded, and each later
// Receive until SetDeadline.
func (c *Conn) Interrupt() error { return c.unix.SetDeadline(time.Unix(1, 0)) }

// Unread returns the size of the sent data that the other end has not read, in bytes of kernel
// memory.
func (c *Conn) Unread() (n int, err error) {
	raw, err := c.unix.SyscallConn()
	if err != nil {
		return 0, fmt.Errorf("what is unread: %w", err)
	}
	var callErr error
	err = raw.Control(func(fd uintptr) { n, callErr = unix.IoctlGetInt(int(fd), unix.SIOCOUTQ) })
	if err := errors.Join(err, callErr); err != nil {
		return 0, fmt.Errorf("what is unread: %w", err)
	}
	return n, nil
}

// CloseWrite closes this direction: the other end receives io.EOF.
func (c *Conn) CloseWrite() error { return c.unix.CloseWrite() }

// Close closes the connection, and files received with an incomplete message.
func (c *Conn) Close() error { return errors.Join(c.unix.Close(), closeAll(c.files)) }

func closeAll(files []*os.File) error {
	var err error
	for _, f := range files {
		err = errors.Join(err, f.Close())
	}
	return err
}
