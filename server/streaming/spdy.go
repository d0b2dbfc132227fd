package streaming

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"time"

	"k8s.io/cri-streaming/pkg/streaming/remotecommand"
	"k8s.io/klog/v2"
	"k8s.io/streaming/pkg/httpstream"
	"k8s.io/streaming/pkg/httpstream/spdy"
)

// serveSPDY serves versions 1 to 4 of the protocol on a guarded connection. cri-streaming's server
// is not used. That server waits for a client's streams until its timeout, even if the client has
// disconnected. It would delay the daemon's shutdown.
func (s *Server) serveSPDY(w http.ResponseWriter, r *http.Request, c *command) {
	protocol, err := httpstream.Handshake(r, w, remotecommand.SupportedStreamingProtocols)
	if err != nil {
		klog.FromContext(r.Context()).V(4).Info("No SPDY connection was opened", "err", err) // the client got the answer
		return
	}
	ctx, cancel := context.WithCancel(r.Context())
	defer cancel()
	opened := make(chan openedStream)
	conn := spdy.NewResponseUpgrader().UpgradeResponse(w, r, func(x httpstream.Stream, answered <-chan struct{}) error {
		select {
		case opened <- openedStream{x, answered}:
			return nil
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	})
	if conn == nil { // the client got the answer
		return
	}
	defer conn.Close()
	defer cancel() // runs first and ends the wait for an unanswered stream
	streams, err := collectStreams(ctx, opened, len(streamKinds(c.options, protocol)), s.streamsTimeout)
	if err != nil {
		klog.FromContext(ctx).V(4).Info("No session was started", "err", err)
		return
	}
	var sizes chan remotecommand.TerminalSize
	if resize := streams[remotecommand.StreamTypeResize]; resize != nil {
		sizes = make(chan remotecommand.TerminalSize)
		c.sizes.Go(func() { decodeSizes(r.Context(), resize, sizes) })
	}
	err = c.ExecInContainer(r.Context(), "", "", "", nil, streams[remotecommand.StreamTypeStdin],
		streams[remotecommand.StreamTypeStdout], streams[remotecommand.StreamTypeStderr], c.options.TTY, sizes, 0)
	writeStatus(streams[remotecommand.StreamTypeError], protocol, err)
	finish(streams)
	s.awaitClient(r, conn.CloseChan())
}

// finish tells the client that each stream has ended. The library's Close would reset the streams.
// The guard then discards further input, so that it does not block the client.
func finish(streams map[string]httpstream.Stream) {
	for kind, x := range streams {
		if inputs[kind] {
			_ = x.Reset() // both fail only if the client has disconnected
		} else {
			_ = x.Close()
		}
	}
}

// openedStream is a stream that the client has opened. answered is closed when the client has
// received the answer.
type openedStream struct {
	httpstream.Stream
	answered <-chan struct{}
}

// collectStreams waits for the streams of a session. The guard passes each kind once.
func collectStreams(ctx context.Context, opened <-chan openedStream, count int,
	timeout time.Duration) (map[string]httpstream.Stream, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, timeout, fmt.Errorf("the client has not opened its %d streams in %v",
		count, timeout))
	defer cancel()
	streams := map[string]httpstream.Stream{}
	for len(streams) < count {
		select {
		case s := <-opened:
			select {
			case <-s.answered: // a write must not precede the answer
			case <-ctx.Done():
				return nil, context.Cause(ctx)
			}
			streams[s.Headers().Get(remotecommand.StreamType)] = s.Stream
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
	}
	return streams, nil
}

// writeStatus writes the result of a session. From version 4 of the protocol it is JSON. Earlier
// versions get only the text of an error. It fails only if the client has disconnected.
func writeStatus(to io.Writer, protocol string, err error) {
	switch protocol {
	case remotecommand.StreamProtocolV4Name, remotecommand.StreamProtocolV5Name, base64V4:
		_ = json.NewEncoder(to).Encode(status(err))
	default:
		if err != nil {
			_, _ = io.WriteString(to, err.Error())
		}
	}
}
