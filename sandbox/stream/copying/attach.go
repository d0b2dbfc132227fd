package copying

import (
	"context"
	"errors"
	"io"
	"time"

	"berth/shim/proto"
	"berth/shim/running"
)

// stdinGrace is how long a session continues after the end of its stdin if no output follows. The
// answer of a container to its last input takes milliseconds.
const stdinGrace = 300 * time.Millisecond

// Target describes the container of an attached client.
type Target struct {
	Terminal bool `json:"terminal,omitempty"`
	Stdin    bool `json:"stdin,omitempty"` // it reads stdin
	// StdinOnce says that its stdin is closed when the stdin of its first client ends.
	StdinOnce bool `json:"stdinOnce,omitempty"`
}

// Wants returns the streams to ask a container's monitor for, and whether there is anything to wait
// for.
func (c Target) Wants(stdin, stdout, stderr bool) (wants proto.Streams, any bool) {
	if stdin && c.Stdin {
		wants |= proto.WantStdin
	}
	if stdout {
		wants |= proto.WantStdout
	}
	if stderr && !c.Terminal {
		wants |= proto.WantStderr
	}
	return wants, wants != 0
}

// Attach connects a client to a container's own input and output. Like containerd's, the session
// ends
//   - with the container or ctx
//   - with Stdin, unless the end of Stdin closes the container's stdin (StdinOnce, without a
//     terminal), or the container takes no input. Unlike containerd's, the client gets the output
//     that follows.
//
// If the container takes no input, Attach reads Stdin and discards it. Attach takes over the
// connection. The error is Aborted if output is missing, and Unavailable when the program is
// stopping.
func (spawn Spawn) Attach(ctx context.Context, monitor *running.Attached, c Target, s IO) error {
	session := running.AttachIO{Stdout: s.Stdout, Stderr: s.Stderr}
	if c.Terminal {
		session.Resize, session.Stderr = s.Resize, nil
	}
	if !c.StdinOnce || c.Terminal || session.Stdout == nil && session.Stderr == nil {
		session.StdinGrace = stdinGrace
	}
	if s.Stdin != nil {
		in, out := io.Pipe()
		if c.Stdin {
			session.Stdin = in
		} else if err := in.Close(); err != nil { // writes fail, so copyInput discards the input
			return errors.Join(err, monitor.Close())
		}
		if err := spawn.copyInput(out, s.Stdin); err != nil {
			return errors.Join(err, monitor.Close())
		}
	}
	return monitor.Copy(ctx, session)
}
