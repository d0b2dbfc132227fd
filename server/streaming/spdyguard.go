package streaming

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"sync"

	"github.com/moby/spdystream/spdy"
	"k8s.io/cri-streaming/pkg/streaming/portforward"
	"k8s.io/cri-streaming/pkg/streaming/remotecommand"
)

// Limits of a client. spdystream accepts everything that SPDY can encode: frames of 16 MiB in a
// queue of 250, headers of 1 GiB, and any number of streams.
const (
	// maxData bounds a data frame. Longer frames are split. client-go's frames have this size, so
	// they pass unchanged. A session whose input is not read then buffers 8 MiB.
	maxData = 32 << 10
	// maxControl, maxHeaders and maxHeader bound control frames. Frames of client-go have three
	// headers and 50 bytes.
	maxControl = 1 << 10
	maxHeaders = 16
	maxHeader  = 256
	// maxForwards bounds the concurrent connections of a port-forward. Each connection is a pair of
	// streams and a socket in the pod. Further connections are refused.
	maxForwards = 128
	// maxForwardStreams bounds the streams of these and of connections that are being refused.
	maxForwardStreams = 4 * 2 * maxForwards
)

// streamRules limit the streams that a client may open. A stream's kind is its header "streamType".
type streamRules struct {
	once   map[string]bool // nil: any kind; otherwise each of these kinds may occur once
	open   int             // limit of the streams that are open at the same time
	inputs map[string]bool
}

// commandRules returns the rules of an exec or attach: the streams that the session waits for.
func commandRules(o remotecommand.Options, protocol string) streamRules {
	once := streamKinds(o, protocol)
	return streamRules{
		once: once, open: len(once), inputs: inputs,
	}
}

// inputs are the streams from the client of an exec or attach.
var inputs = map[string]bool{remotecommand.StreamTypeStdin: true, remotecommand.StreamTypeResize: true}

// streamKinds returns the streams of an exec or attach.
func streamKinds(o remotecommand.Options, protocol string) map[string]bool {
	resizes := protocol == remotecommand.StreamProtocolV4Name || protocol == remotecommand.StreamProtocolV3Name
	kinds := map[string]bool{remotecommand.StreamTypeError: true}
	for kind, wanted := range map[string]bool{
		remotecommand.StreamTypeStdin:  o.Stdin,
		remotecommand.StreamTypeStdout: o.Stdout,
		remotecommand.StreamTypeStderr: o.Stderr,
		remotecommand.StreamTypeResize: o.TTY && resizes,
	} {
		if wanted {
			kinds[kind] = true
		}
	}
	return kinds
}

func forwardRules() streamRules {
	return streamRules{open: maxForwardStreams, inputs: map[string]bool{portforward.StreamTypeData: true}}
}

// spdyGuard wraps a client's connection and passes only frames that spdystream can handle:
//   - Data in frames of at most maxData, and only for streams with a reader. A frame that has no
//     reader would block its session, and the session's end.
//   - Streams that the rules allow. Any other stream ends the connection. So does a malformed
//     control frame, and a frame type that no client sends.
//   - After a new stream, everything is held back until the stream is answered, even the
//     connection's end. cri-streaming's handlers accept no stream after the connection's end, and
//     spdystream would wait forever for a stream that was not accepted.
//
// Reads are serial, and so are writes.
type spdyGuard struct {
	net.Conn
	rules streamRules
	log   *slog.Logger

	// Fields of Read.
	frames
	parser *spdy.Framer  // of control frames; has the state of header compression
	frame  *bytes.Buffer // input of parser
	data   dataFrame     // rest of the current data frame
	last   spdy.StreamId // latest stream that the client opened

	sent sentFrames // used by Write

	closing sync.Once
	closed  chan struct{}

	mu sync.Mutex
	// +checklocks:mu
	streams map[spdy.StreamId]*guardedStream
	// +checklocks:mu
	opening spdy.StreamId // new stream that was not answered yet; 0: none
	// +checklocks:mu
	answered chan struct{} // closed when opening has an answer
}

// guardedStream is an open stream. It ends when both sides have finished or one resets it.
type guardedStream struct {
	input                      bool
	clientFinished, weFinished bool
	reset                      func() // called if the client resets the stream before this side has finished; nil: not set
}

type dataFrame struct {
	stream spdy.StreamId
	flags  byte
	left   int
}

func newSPDYGuard(conn net.Conn, from *bufio.Reader, rules streamRules, log *slog.Logger) (*spdyGuard, error) {
	frame := new(bytes.Buffer)
	parser, err := spdy.NewFramerWithOptions(io.Discard, frame, spdy.WithMaxControlFramePayloadSize(maxControl),
		spdy.WithMaxHeaderCount(maxHeaders), spdy.WithMaxHeaderFieldSize(maxHeader))
	if err != nil {
		return nil, fmt.Errorf("read SPDY frames: %w", err)
	}
	return &spdyGuard{
		Conn: conn, rules: rules, log: log,
		frames: frames{from: from}, parser: parser, frame: frame,
		closed:  make(chan struct{}),
		streams: map[spdy.StreamId]*guardedStream{},
	}, nil
}

// Close implements net.Conn.
func (g *spdyGuard) Close() error {
	g.closing.Do(func() { close(g.closed) })
	return g.Conn.Close()
}

// Read implements net.Conn. After an invalid frame it closes the connection and returns an error.
func (g *spdyGuard) Read(p []byte) (int, error) { return g.read(p, g.next) }

// next parses the next frame. It may leave nothing to pass on.
func (g *spdyGuard) next() error {
	if err := g.waitForAnswer(); err != nil {
		return err
	}
	if g.data.left > 0 {
		g.beginChunk()
		return nil
	}
	var header [8]byte
	if _, err := io.ReadFull(g.from, header[:]); err != nil {
		return err
	}
	length := int(binary.BigEndian.Uint32(header[4:]) & 0xffffff)
	if isControl(header) {
		err := g.control(header, length)
		if err != nil {
			g.log.Info("close SPDY connection after an invalid frame", "err", err)
			return errors.Join(err, g.Close())
		}
		return nil
	}
	return g.beginData(dataFrame{
		stream: spdy.StreamId(binary.BigEndian.Uint32(header[:])),
		flags:  header[4],
		left:   length,
	})
}

func isControl(header [8]byte) bool { return header[0]&0x80 != 0 }

// waitForAnswer waits until the latest stream has been accepted or refused.
func (g *spdyGuard) waitForAnswer() error {
	g.mu.Lock()
	opening, answered := g.opening, g.answered
	g.mu.Unlock()
	if opening == 0 {
		return nil
	}
	select {
	case <-answered:
		return nil
	case <-g.closed:
		return net.ErrClosed
	}
}

// beginData passes on a data frame. If a stream has no reader, it passes on only the end.
func (g *spdyGuard) beginData(f dataFrame) error {
	finished := spdy.DataFlags(f.flags)&spdy.DataFlagFin != 0
	g.mu.Lock()
	stream := g.streams[f.stream]
	known := stream != nil && !stream.clientFinished
	wanted := known && stream.input
	if known && finished {
		stream.clientFinished = true
		g.forgetFinished(f.stream, stream)
	}
	g.mu.Unlock()
	if !wanted {
		if _, err := io.CopyN(io.Discard, g.from, int64(f.left)); err != nil {
			return err
		}
		f.left = 0
	}
	g.data = f
	if wanted || known && finished {
		g.beginChunk()
	}
	return nil
}

// beginChunk passes on the header of the next chunk of the data frame. Only the last chunk has the
// frame's flags.
func (g *spdyGuard) beginChunk() {
	g.body = min(g.data.left, maxData)
	g.data.left -= g.body
	flagsAndLength := uint32(g.body)
	if g.data.left == 0 {
		flagsAndLength |= uint32(g.data.flags) << 24
	}
	header := binary.BigEndian.AppendUint32(nil, uint32(g.data.stream))
	g.ready = binary.BigEndian.AppendUint32(header, flagsAndLength)
}

// control passes on an allowed control frame. It uses the parser of spdystream. The library's
// parser ignores the length of some frames, so control checks that both find the same end of the
// frame.
func (g *spdyGuard) control(header [8]byte, length int) error {
	if length > maxControl {
		return fmt.Errorf("SPDY control frame of %d bytes, the limit is %d", length, maxControl)
	}
	raw := make([]byte, len(header)+length)
	copy(raw, header[:])
	if _, err := io.ReadFull(g.from, raw[len(header):]); err != nil {
		return err
	}
	g.frame.Reset()
	g.frame.Write(raw)
	frame, err := g.parser.ReadFrame()
	if err != nil {
		return fmt.Errorf("read a SPDY frame: %w", err)
	}
	if g.frame.Len() > 0 {
		return fmt.Errorf("SPDY frame is %d bytes too long", g.frame.Len())
	}
	switch f := frame.(type) {
	case *spdy.SynStreamFrame:
		if err := g.open(f); err != nil {
			return err
		}
	case *spdy.RstStreamFrame:
		g.reset(f.StreamId)
	case *spdy.PingFrame, *spdy.GoAwayFrame, *spdy.SettingsFrame, *spdy.WindowUpdateFrame:
	default: // a reply is invalid, because the server opens no streams; headers are invalid, because spdystream would buffer them without limit
		return fmt.Errorf("unexpected SPDY frame %T", f)
	}
	g.ready = raw
	return nil
}

// open records a new stream if the rules allow it.
func (g *spdyGuard) open(f *spdy.SynStreamFrame) error {
	kind := f.Headers.Get(remotecommand.StreamType)
	if f.StreamId <= g.last || f.StreamId > 1<<31-1 {
		return fmt.Errorf("SPDY stream %d comes after %d", f.StreamId, g.last)
	}
	g.last = f.StreamId
	if g.rules.once != nil {
		if !g.rules.once[kind] {
			return fmt.Errorf("the session has no further stream of type %.20q", kind)
		}
		delete(g.rules.once, kind)
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	if len(g.streams) >= g.rules.open {
		return fmt.Errorf("the limit of %d open SPDY streams is reached", len(g.streams))
	}
	g.streams[f.StreamId] = &guardedStream{
		input:          g.rules.inputs[kind],
		clientFinished: f.CFHeader.Flags&spdy.ControlFlagFin != 0,
		weFinished:     f.CFHeader.Flags&spdy.ControlFlagUnidirectional != 0,
	}
	g.opening, g.answered = f.StreamId, make(chan struct{})
	return nil
}

// reset removes a stream that the client has reset. The library does not report that to writers, so
// their data would still be sent to the client.
func (g *spdyGuard) reset(id spdy.StreamId) {
	g.mu.Lock()
	var notify func()
	if s := g.streams[id]; s != nil && !s.weFinished {
		notify = s.reset
	}
	delete(g.streams, id)
	g.mu.Unlock()
	if notify != nil {
		notify()
	}
}

// onReset calls do when the client resets a stream, or at once if it has ended.
func (g *spdyGuard) onReset(id spdy.StreamId, do func()) {
	g.mu.Lock()
	s := g.streams[id]
	if s != nil {
		s.reset = do
	}
	g.mu.Unlock()
	if s == nil {
		do()
	}
}

// closeWrite tells the client that the session ends.
func (g *spdyGuard) closeWrite() {
	if c, ok := g.Conn.(interface{ CloseWrite() error }); ok {
		_ = c.CloseWrite() // fails only if the client has disconnected
	}
}

// forgetFinished removes a stream that both sides have finished.
//
// +checklocks:g.mu
func (g *spdyGuard) forgetFinished(id spdy.StreamId, s *guardedStream) {
	if s.clientFinished && s.weFinished {
		delete(g.streams, id)
	}
}

// Write implements net.Conn. It records a frame before it sends the frame. A stream counts as
// accepted when its answer is written, even if the answer does not arrive. Write returns no error
// for such an answer, because spdystream would make the stream's writers wait for another answer.
// Later writes fail.
func (g *spdyGuard) Write(p []byte) (int, error) {
	done := 0
	for done < len(p) {
		n, out := g.sent.next(p[done:])
		if g.sent.began {
			g.note(&g.sent)
		}
		if len(out) == 0 {
			done += n
			continue
		}
		if _, err := g.Conn.Write(out); err != nil && g.sent.kind() != spdy.TypeSynReply {
			g.sent = sentFrames{} // the caller does not continue the frame
			return done, err
		}
		done += n
	}
	return done, nil
}

// note records the first bytes of a frame that the server sends.
func (g *spdyGuard) note(f *sentFrames) {
	g.mu.Lock()
	defer g.mu.Unlock()
	id := f.stream()
	switch {
	case !f.control():
		if s := g.streams[id]; s != nil && spdy.DataFlags(f.begin[4])&spdy.DataFlagFin != 0 {
			s.weFinished = true
			g.forgetFinished(id, s)
		}
		return
	case f.kind() == spdy.TypeRstStream:
		delete(g.streams, id)
	case f.kind() != spdy.TypeSynReply:
		return
	}
	if g.opening == id {
		g.opening = 0
		close(g.answered)
	}
}

// sentFrames assembles frames that are written in pieces.
type sentFrames struct {
	begin [12]byte // first bytes of the frame: the header, and a control frame's stream
	have  int      // known bytes of begin
	left  int      // bytes of the frame after begin
	began bool     // begin is complete since the last call of next
}

// next consumes n bytes of p, and returns the bytes to send now.
func (f *sentFrames) next(p []byte) (n int, out []byte) {
	f.began = false
	if f.left > 0 {
		n = min(f.left, len(p))
		f.left -= n
		return n, p[:n]
	}
	need := 8
	if f.have >= 8 {
		need = 12
	}
	n = copy(f.begin[f.have:need], p)
	f.have += n
	if f.have < 8 || f.control() && f.have < 12 { // the server's shortest control frame
		return n, nil
	}
	out = f.begin[:f.have]
	f.left = int(binary.BigEndian.Uint32(f.begin[4:])&0xffffff) - (f.have - 8)
	f.have, f.began = 0, true
	return n, out
}

func (f *sentFrames) control() bool { return isControl([8]byte(f.begin[:])) }

// kind returns a control frame's type, 0 for data.
func (f *sentFrames) kind() spdy.ControlFrameType {
	if !f.control() {
		return 0
	}
	return spdy.ControlFrameType(binary.BigEndian.Uint16(f.begin[2:]))
}

// stream returns the frame's stream, 0 without one.
func (f *sentFrames) stream() spdy.StreamId {
	if f.control() {
		return spdy.StreamId(binary.BigEndian.Uint32(f.begin[8:]))
	}
	return spdy.StreamId(binary.BigEndian.Uint32(f.begin[:]))
}
