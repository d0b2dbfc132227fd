package streaming

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/moby/spdystream/spdy"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
	"k8s.io/cri-streaming/pkg/streaming/remotecommand"

	"berth/internal/testutil"
	"berth/sandbox/stream/copying"
)

// An incomplete session ends at once when its client or the daemon ends, whatever the client's
// timeout.
func TestIncompleteSessionsEnd(t *testing.T) {
	s := serving(t, doing{exec: func(context.Context, copying.IO) error {
		t.Error("it began")
		return nil
	}})
	s.streamsTimeout = time.Hour
	gone := s.execClient(t, &runtimeapi.ExecRequest{Stdin: true})
	gone.open(remotecommand.StreamTypeError)
	gone.conn.Close()
	for range 2 { // stay until the server ends
		s.execClient(t, &runtimeapi.ExecRequest{Stdin: true, Stdout: true}).open(remotecommand.StreamTypeStdin)
	}
}

func TestSessionsWithMissingStreamsEnd(t *testing.T) {
	s := serving(t, doing{})
	s.streamsTimeout = time.Millisecond
	s.execClient(t, &runtimeapi.ExecRequest{Stdin: true}).ended()
}

func TestStatusOfSessions(t *testing.T) {
	for _, c := range []struct {
		protocol string
		err      error
		want     string // the text of the result before version 4
	}{
		{remotecommand.StreamProtocolV1Name, nil, ""},
		{remotecommand.StreamProtocolV2Name, errors.New("no such thing"), "no such thing"},
		{remotecommand.StreamProtocolV3Name, nil, ""},
		{remotecommand.StreamProtocolV4Name, nil, ""},
		{remotecommand.StreamProtocolV4Name, errors.New("no such thing"), "no such thing"},
	} {
		t.Run(c.protocol+" "+fmt.Sprint(c.err), func(t *testing.T) {
			s := serving(t, doing{exec: func(context.Context, copying.IO) error { return c.err }})
			address, err := s.Attach(&runtimeapi.AttachRequest{Stdout: true})
			testutil.Must(t, err)
			client := s.spdyClient(t, address, c.protocol)
			said := client.readAll(client.open(remotecommand.StreamTypeError), func() { client.open(remotecommand.StreamTypeStdout) })
			if c.protocol != remotecommand.StreamProtocolV4Name {
				if string(said) != c.want {
					t.Errorf("%s: %q, want %q", c.protocol, said, c.want)
				}
				return
			}
			var status metav1.Status
			if err := json.Unmarshal(said, &status); err != nil || status.Message != c.want || (status.Status == metav1.StatusSuccess) != (c.err == nil) {
				t.Errorf("%s: %q: %v", c.protocol, said, err)
			}
		})
	}
}

// readAll returns the data of a stream after do, until the stream ends.
func (c *spdyClient) readAll(stream spdy.StreamId, do func()) (said []byte) {
	c.t.Helper()
	do()
	for {
		f, err := c.framer.ReadFrame()
		if err != nil {
			c.t.Fatal(err)
		}
		if d, ok := f.(*spdy.DataFrame); ok && d.StreamId == stream {
			said = append(said, d.Data...)
			if d.Flags&spdy.DataFlagFin != 0 {
				return said
			}
		}
	}
}
