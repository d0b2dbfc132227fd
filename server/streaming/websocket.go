package streaming

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/cri-streaming/pkg/streaming/remotecommand"
	"k8s.io/klog/v2"
	"k8s.io/streaming/pkg/httpstream/wsstream"
	utilexec "k8s.io/utils/exec"
)

// serveWebSocketV5 serves v5.channel.k8s.io, with which clients can close stdin
// (KEP-4006). cri-streaming's own WebSocket stops at version 4; this is the same with
// a library that understands the closing.
func serveWebSocketV5(w http.ResponseWriter, r *http.Request, c *command, idle time.Duration) {
	channels := []wsstream.ChannelType{
		remotecommand.StreamStdIn:  channel(c.options.Stdin, wsstream.ReadChannel),
		remotecommand.StreamStdOut: channel(c.options.Stdout, wsstream.WriteChannel),
		remotecommand.StreamStdErr: channel(c.options.Stderr, wsstream.WriteChannel),
		remotecommand.StreamErr:    wsstream.WriteChannel,
		remotecommand.StreamResize: wsstream.ReadChannel,
	}
	conn := wsstream.NewConn(map[string]wsstream.ChannelProtocolConfig{
		remotecommand.StreamProtocolV5Name: {Binary: true, Channels: channels},
	})
	conn.SetIdleTimeout(idle)
	_, streams, err := conn.Open(w, r)
	if err != nil {
		klog.FromContext(r.Context()).V(4).Info("No WebSocket was opened", "err", err) // the client has been told
		return
	}
	defer conn.Close()
	// An empty message tells the client that the connection stands.
	if _, err := streams[firstWritable(c.options)].Write(nil); err != nil {
		return // the client is gone
	}
	sizes := make(chan remotecommand.TerminalSize)
	c.sizes.Go(func() { decodeSizes(r.Context(), streams[remotecommand.StreamResize], sizes) })
	err = c.ExecInContainer(r.Context(), "", "", "", nil, streams[remotecommand.StreamStdIn],
		streams[remotecommand.StreamStdOut], streams[remotecommand.StreamStdErr], c.options.TTY, sizes, 0)
	_ = json.NewEncoder(streams[remotecommand.StreamErr]).Encode(status(err)) // it fails if nobody is there to be told
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

// decodeSizes passes on the sizes that the client sends, until the stream or ctx ends.
func decodeSizes(ctx context.Context, from io.Reader, to chan<- remotecommand.TerminalSize) {
	defer close(to)
	decoder := json.NewDecoder(from)
	for {
		var size remotecommand.TerminalSize
		if decoder.Decode(&size) != nil {
			_, _ = io.Copy(io.Discard, from) // what is no size must not hold up the rest
			return
		}
		select {
		case to <- size:
		case <-ctx.Done():
			return
		}
	}
}

// status is how a session came out, as versions 4 and 5 of the protocol have it.
func status(err error) metav1.Status {
	if err == nil {
		return metav1.Status{Status: metav1.StatusSuccess}
	}
	if exit, ok := err.(utilexec.ExitError); ok && exit.Exited() {
		return metav1.Status{
			Status: metav1.StatusFailure,
			Reason: remotecommand.NonZeroExitCodeReason,
			Details: &metav1.StatusDetails{Causes: []metav1.StatusCause{
				{Type: remotecommand.ExitCodeCauseType, Message: strconv.Itoa(exit.ExitStatus())},
			}},
			Message: fmt.Sprintf("command terminated with non-zero exit code: %v", exit),
		}
	}
	return metav1.Status{Status: metav1.StatusFailure, Reason: metav1.StatusReasonInternalError, Code: http.StatusInternalServerError, Message: err.Error()}
}
