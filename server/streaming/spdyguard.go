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

// What a client may send. spdystream takes what SPDY can say: frames of 16 MiB, of
// which it queues 250, headers of 1 GiB, and any number of streams.
const (
	// maxData is what a data frame has at most; longer ones are split. It is what
	// client-go writes at once, so that its frames pass as they are. With it a session
	// whose input nobody reads holds 8 MiB.
	maxData = 32 << 10
	// maxControl, maxHeaders and maxHeader bound control frames. Those of client-go
	// have three headers and 50 bytes.
	maxControl = 1 << 10
	maxHeaders = 16
	maxHeader  = 256
	// maxForwards is how many connections a port-forward has at a time, each of which
	// is a pair of streams here and a socket in the pod.
	maxForwards = 128
)

// streamRules are what streams a client may open. A stream's kind is its header
// "streamType".
type streamRules struct {
	once   map[string]bool // nil: any; otherwise these, each once
	open   int             // at a time
	inputs map[string]bool
}

// commandRules are those of an exec or attach: the streams that the session waits for.
func commandRules(o remotecommand.Options, protocol string) streamRules {
	once := streamKinds(o, protocol)
	return streamRules{
		once: once, open: len(once),
		inputs: map[string]bool{remotecommand.StreamTypeStdin: true, remotecommand.StreamTypeResize: true},
	}
}

// streamKinds are the streams of an exec or attach.
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
	return streamRules{open: 2 * maxForwards, inputs: map[string]bool{portforward.StreamTypeData: true}}
}

// spdyGuard is a client's connection that hands on only what spdystream can take:
//   - Data in frames of at most maxData, and only for streams that somebody reads: a
//     frame that nobody takes would hold up its session, and the end of it.
//   - The streams that the rules allow. One that they don't, or a control frame that
//     is malformed or that no client sends, ends the connection.
//   - Nothing, not even the connection's end, between a new stream and the answer to it:
//     cri-streaming's handlers take no more streams when the connection has ended, and
//     spdystream would wait for ever for one that was not taken.
//
// Reads are one at a time, and so are writes.
type spdyGuard struct {
	net.Conn
	rules streamRules
	log   *slog.Logger

	// Of Read.
	frames
	parser *spdy.Framer  // of control frames; it has the state of the compressed headers
	frame  *bytes.Buffer // what parser reads
	data   dataFrame     // what is left of the one that is being handed on
	last   spdy.StreamId // the latest that was opened

	sent sentFrames // of Write

	closing sync.Once
	closed  chan struct{}

	mu       sync.Mutex // guards what follows
	streams  map[spdy.StreamId]*guardedStream
	opening  spdy.StreamId // has not been answered; 0: none
	answered chan struct{} // closed when opening has been
}

// guardedStream is one that is open: until both sides have finished, or one resets it.
type guardedStream struct {
	input                      bool
	clientFinished, weFinished bool
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

// Read implements net.Conn. An error other than the connection's own has closed it.
func (g *spdyGuard) Read(p []byte) (int, error) { return g.read(p, g.next) }

// next reads on to something that can be handed on, mostly.
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
			g.log.Info("A SPDY connection is ended for what its client sent", "err", err)
			return errors.Join(err, g.Close())
		}
		return nil
	}
	return g.beginData(dataFrame{stream: spdy.StreamId(binary.BigEndian.Uint32(header[:])), flags: header[4], left: length})
}

func isControl(header [8]byte) bool { return header[0]&0x80 != 0 }

// waitForAnswer waits until the stream that was opened last has been taken or refused.
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

// beginData hands a data frame on, or its end only if nobody reads the data.
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

// beginChunk hands on the header of as much of the data frame as one may have. Only
// the last has its flags.
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

// control hands a control frame on if it is allowed. It is parsed as spdystream does,
// which trusts some frames' lengths and others not: both must come to the same end.
func (g *spdyGuard) control(header [8]byte, length int) error {
	if length > maxControl {
		return fmt.Errorf("a SPDY control frame of %d bytes; the limit is %d", length, maxControl)
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
		return fmt.Errorf("a SPDY frame is %d bytes too long", g.frame.Len())
	}
	switch f := frame.(type) {
	case *spdy.SynStreamFrame:
		if err := g.open(f); err != nil {
			return err
		}
	case *spdy.RstStreamFrame:
		g.reset(f.StreamId)
	case *spdy.PingFrame, *spdy.GoAwayFrame, *spdy.SettingsFrame, *spdy.WindowUpdateFrame:
	default: // a reply, though we open no streams; headers, which spdystream would keep until somebody asks
		return fmt.Errorf("an unexpected SPDY frame: %T", f)
	}
	g.ready = raw
	return nil
}

// open notes a new stream, if the rules allow it.
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
		return fmt.Errorf("%d SPDY streams are open; it is the limit", len(g.streams))
	}
	g.streams[f.StreamId] = &guardedStream{
		input:          g.rules.inputs[kind],
		clientFinished: f.CFHeader.Flags&spdy.ControlFlagFin != 0,
		weFinished:     f.CFHeader.Flags&spdy.ControlFlagUnidirectional != 0,
	}
	g.opening, g.answered = f.StreamId, make(chan struct{})
	return nil
}

func (g *spdyGuard) reset(id spdy.StreamId) {
	g.mu.Lock()
	defer g.mu.Unlock()
	delete(g.streams, id)
}

// forgetFinished needs the lock.
func (g *spdyGuard) forgetFinished(id spdy.StreamId, s *guardedStream) {
	if s.clientFinished && s.weFinished {
		delete(g.streams, id)
	}
}

// Write implements net.Conn. What it says is noted before it is sent: a stream has
// been taken when its answer is written, whether that arrives or not. An answer that
// does not arrive is no error, since spdystream would have the stream's writers wait
// for another; whatever comes after it fails.
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
			g.sent = sentFrames{} // it does not go on with the frame
			return done, err
		}
		done += n
	}
	return done, nil
}

// note notes the beginning of a frame of ours.
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

// sentFrames puts together what is written of frames a few bytes at a time.
type sentFrames struct {
	begin [12]byte // of the current frame: header, and a control frame's stream
	have  int      // of begin
	left  int      // of the frame, after begin
	began bool     // begin has just become whole
}

// next takes n bytes of p, and returns what is to be sent now.
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
	if f.have < 8 || f.control() && f.have < 12 { // no control frame of ours is shorter
		return n, nil
	}
	out = f.begin[:f.have]
	f.left = int(binary.BigEndian.Uint32(f.begin[4:])&0xffffff) - (f.have - 8)
	f.have, f.began = 0, true
	return n, out
}

func (f *sentFrames) control() bool { return isControl([8]byte(f.begin[:])) }

// kind is a control frame's type; 0 for data.
func (f *sentFrames) kind() spdy.ControlFrameType {
	if !f.control() {
		return 0
	}
	return spdy.ControlFrameType(binary.BigEndian.Uint16(f.begin[2:]))
}

// stream is the frame's, if it has one.
func (f *sentFrames) stream() spdy.StreamId {
	if f.control() {
		return spdy.StreamId(binary.BigEndian.Uint32(f.begin[8:]))
	}
	return spdy.StreamId(binary.BigEndian.Uint32(f.begin[:]))
}
