// Package wire has the messages between the daemon and the process of its sessions, berth-stream.
//
// # Contract
//
// The process listens on a unix socket, and a daemon connects. The daemon sends Hello, and the
// process answers with Welcome. The process then sends the sessions that it has (Open.Running).
// After that either side may send requests. Each comes with the socket of its answer, so requests
// do not wait for each other. The end of the answer's socket ends the request. For Open it is also
// the end of the session.
//
// Messages are those of proto.Conn. A later version may add fields: both sides ignore unknown ones.
// The package links no gRPC.
package wire

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"berth/internal/coded"
	"berth/sandbox/stream/copying"
	"berth/shim/proto"
	"berth/shim/running"
)

// Kinds of sessions, which are path elements of their URLs.
const (
	Exec        = "exec"
	Attach      = "attach"
	PortForward = "portforward"
)

// Session is a session that a client may begin.
type Session struct {
	Kind    string          `json:"kind"`
	ID      string          `json:"id"`                // of the container or pod
	Command []string        `json:"command,omitempty"` // of an exec
	Options json.RawMessage `json:"options,omitempty"` // of an exec: stream.ExecOptions
	TTY     bool            `json:"tty,omitempty"`
	Stdin   bool            `json:"stdin,omitempty"`
	Stdout  bool            `json:"stdout,omitempty"`
	Stderr  bool            `json:"stderr,omitempty"`
	Ports   []int32         `json:"ports,omitempty"` // of a WebSocket
}

// Token is an unused URL.
type Token struct {
	Token   string    `json:"token"`
	Session Session   `json:"session"`
	Expires time.Time `json:"expires"`
}

// Settings are the daemon's settings for the process.
type Settings struct {
	Program     string        `json:"program"` // identifies the version of the process
	Address     string        `json:"address"` // IP:port
	TLS         TLS           `json:"tls"`
	IdleTimeout time.Duration `json:"idleTimeout"`
	LogFormat   string        `json:"logFormat"`
	LogLevel    string        `json:"logLevel"`
}

// TLS has the paths of PEM files. All may be empty.
type TLS struct {
	Cert     string `json:"cert,omitempty"`
	Key      string `json:"key,omitempty"`
	ClientCA string `json:"clientCA,omitempty"`
}

// PEM has the last valid content of the files of TLS.
type PEM struct {
	Cert     []byte `json:"cert"`
	Key      []byte `json:"key"`
	ClientCA []byte `json:"clientCA,omitempty"`
}

// Hello is the daemon's first message. The first daemon's settings are those of the process. Tokens
// come from an earlier process, whose listener comes with the message.
type Hello struct {
	Settings Settings `json:"settings"`
	Tokens   []Token  `json:"tokens,omitempty"`
	PEM      *PEM     `json:"pem,omitempty"` // used while the files are invalid
}

// Welcome is the answer to Hello.
type Welcome struct {
	Settings Settings `json:"settings"`
	Retired  bool     `json:"retired,omitempty"` // it offers no new URLs
	Sessions int      `json:"sessions"`          // number of messages that follow
	Error    string   `json:"error,omitempty"`
}

// Request is a message after Welcome. One field is set. The socket for the Answer comes with it.
type Request struct {
	Offer  *Session `json:"offer,omitempty"`  // to the process: make a URL
	Retire bool     `json:"retire,omitempty"` // to the process: give up the listener and the tokens
	Open   *Open    `json:"open,omitempty"`   // to the daemon: begin a session
}

// Open asks the daemon to begin a session.
type Open struct {
	Session
	Port    int32 `json:"port,omitempty"`    // of the pod
	Running bool  `json:"running,omitempty"` // an earlier daemon has begun it; there is no answer
}

// Answer is the answer to a request.
type Answer struct {
	Error *Error `json:"error,omitempty"`

	URL    string  `json:"url,omitempty"`    // for Offer
	Tokens []Token `json:"tokens,omitempty"` // for Retire, with the listener

	Exec   *running.Record `json:"exec,omitempty"`   // with Kept, and the files of running.HandOver
	Kept   proto.Streams   `json:"kept,omitempty"`   // the pipes that come first
	Attach *Attached       `json:"attach,omitempty"` // with the connection to the monitor, or none
}

// Attached describes a connection to a monitor.
type Attached struct {
	Target       copying.Target `json:"target"`
	In           []byte         `json:"in,omitempty"` // received, not yet decoded
	AnnouncesEnd bool           `json:"announcesEnd,omitempty"`
}

// Error is an error with its code.
type Error struct {
	Code coded.Code `json:"code"`
	Text string     `json:"text"`
}

// ErrorOf returns an error for an answer, or nil. Without a code it is Internal.
func ErrorOf(err error) *Error {
	if err == nil {
		return nil
	}
	code, ok := coded.Of(err)
	if !ok {
		code = coded.Internal
	}
	return &Error{Code: code, Text: err.Error()}
}

// Err returns the error of an answer, or nil.
func (a *Answer) Err() error {
	if a.Error == nil {
		return nil
	}
	return coded.Errorf(a.Error.Code, "%s", a.Error.Text)
}

// Send sends a request on a connection, and returns the connection of its answer.
func Send(to *proto.Conn, r Request) (*proto.Conn, error) {
	ours, theirs, err := proto.ConnPair()
	if err != nil {
		return nil, err
	}
	if err := errors.Join(to.Send(r, theirs), theirs.Close()); err != nil {
		return nil, errors.Join(err, ours.Close())
	}
	return ours, nil
}

// Receive receives a request and the connection for its answer.
func Receive(from *proto.Conn) (Request, *proto.Conn, error) {
	var r Request
	files, err := from.Receive(&r)
	if err != nil {
		return r, nil, err
	}
	if len(files) != 1 {
		return r, nil, errors.Join(fmt.Errorf("request with %d files", len(files)), CloseAll(files))
	}
	reply, err := proto.NewConn(files[0])
	return r, reply, err
}

// Ended reports whether an error means that the other process has ended, or does not serve the
// request.
func Ended(err error) bool {
	return errors.Is(err, io.EOF) || errors.Is(err, unix.EPIPE) || errors.Is(err, unix.ECONNRESET)
}

// CloseAll closes files.
func CloseAll(files []*os.File) error {
	var err error
	for _, f := range files {
		err = errors.Join(err, f.Close())
	}
	return err
}
