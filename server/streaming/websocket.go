package streaming

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"sync/atomic"

	"k8s.io/cri-streaming/pkg/streaming/remotecommand"
	"k8s.io/klog/v2"
	"k8s.io/streaming/pkg/httpstream/wsstream"
	utilexec "k8s.io/utils/exec"
)

// The protocols of earlier clients, whose names cri-streaming does not export.
const (
	binaryV1 = wsstream.ChannelWebSocketProtocol
	base64V1 = wsstream.Base64ChannelWebSocketProtocol
	base64V4 = "v4." + wsstream.Base64ChannelWebSocketProtocol
)

// serveWebSocket serves an exec or attach in all versions of the protocol. cri-streaming's server
// stops at version 4, in which clients cannot close stdin (KEP-4006). Versions before 4, and "",
// send errors as text.
func (s *Server) serveWebSocket(w http.ResponseWriter, r *http.Request, c *command) {
	channels := []wsstream.ChannelType{
		remotecommand.StreamStdIn:  channel(c.options.Stdin, wsstream.ReadChannel),
		remotecommand.StreamStdOut: channel(c.options.Stdout, wsstream.WriteChannel),
		remotecommand.StreamStdErr: channel(c.options.Stderr, wsstream.WriteChannel),
		remotecommand.StreamErr:    wsstream.WriteChannel,
		// without a reader the channel would block all others
		remotecommand.StreamResize: channel(c.options.TTY, wsstream.ReadChannel),
	}
	binary, text := wsstream.ChannelProtocolConfig{Binary: true,
		Channels: channels}, wsstream.ChannelProtocolConfig{Channels: channels}
	conn := wsstream.NewConn(map[string]wsstream.ChannelProtocolConfig{
		"": binary, binaryV1: binary, remotecommand.StreamProtocolV4Name: binary, remotecommand.StreamProtocolV5Name: binary,
		base64V1: text, base64V4: text,
	})
	var ending atomic.Bool
	protocol, streams, err := conn.Open(s.guardWebSocket(w, &ending), r)
	if err != nil {
		klog.FromContext(r.Context()).V(4).Info("No WebSocket was opened", "err", err) // the client got the answer
		return
	}
	defer conn.Close()
	// An empty message tells the client that the connection is open.
	if _, err := streams[firstWritable(c.options)].Write(nil); err != nil {
		return // the client has disconnected
	}
	sizes := make(chan remotecommand.TerminalSize)
	c.sizes.Go(func() { decodeSizes(r.Context(), streams[remotecommand.StreamResize], sizes) })
	err = c.ExecInContainer(r.Context(), "", "", "", nil, streams[remotecommand.StreamStdIn],
		streams[remotecommand.StreamStdOut], streams[remotecommand.StreamStdErr], c.options.TTY, sizes, 0)
	writeStatus(streams[remotecommand.StreamErr], protocol, err)
	ending.Store(true)
	_ = conn.Close() // sends a Close frame
	s.awaitClient(r, nil)
}

func channel(wanted bool, kind wsstream.ChannelType) wsstream.ChannelType {
	if wanted {
		return kind
	}
	return wsstream.IgnoreChannel
}

func firstWritable(o remotecommand.Options) int {
	switch {
	case o.Stdout:
		return remotecommand.StreamStdOut
	case o.Stderr:
		return remotecommand.StreamStdErr
	}
	return remotecommand.StreamErr
}

// maxSize bounds the bytes of one terminal size.
const maxSize = 1 << 10

// decodeSizes passes on the client's terminal sizes until the stream or ctx ends. A size is a flat
// JSON object.
func decodeSizes(ctx context.Context, from io.Reader, to chan<- remotecommand.TerminalSize) {
	defer close(to)
	objects := bufio.NewScanner(from)
	objects.Buffer(nil, maxSize)
	objects.Split(splitObjects)
	for objects.Scan() {
		var size remotecommand.TerminalSize
		if json.Unmarshal(objects.Bytes(), &size) != nil {
			break
		}
		select {
		case to <- size:
		case <-ctx.Done():
			return
		}
	}
	_, _ = io.Copy(io.Discard, from) // invalid data must not block the other channels
}

// splitObjects is a bufio.SplitFunc for objects, which end with a brace.
func splitObjects(data []byte, _ bool) (advance int, token []byte, err error) {
	end := bytes.IndexByte(data, '}') + 1
	if end == 0 {
		return 0, nil, nil // incomplete
	}
	return end, data[:end], nil
}

// result is the result of a session in the JSON of metav1.Status. That package would add 2 MiB to
// the process.
type result struct {
	Status  string        `json:"status"`
	Message string        `json:"message,omitempty"`
	Reason  string        `json:"reason,omitempty"`
	Details *resultDetail `json:"details,omitempty"`
	Code    int           `json:"code,omitempty"`
}

type resultDetail struct {
	Causes []resultCause `json:"causes"`
}

type resultCause struct {
	Reason  string `json:"reason"`
	Message string `json:"message"`
}

// status returns the result of a session for versions 4 and 5 of the protocol.
func status(err error) result {
	if err == nil {
		return result{Status: "Success"}
	}
	if exit, ok := errors.AsType[utilexec.ExitError](err); ok && exit.Exited() {
		return result{
			Status:  "Failure",
			Reason:  remotecommand.NonZeroExitCodeReason,
			Details: &resultDetail{[]resultCause{{remotecommand.ExitCodeCauseType, strconv.Itoa(exit.ExitStatus())}}},
			Message: fmt.Sprintf("command terminated with non-zero exit code: %v", exit),
		}
	}
	return result{Status: "Failure", Reason: "InternalError", Code: http.StatusInternalServerError, Message: err.Error()}
}
