package stream

import (
	"context"
	"io"
	"time"

	"berth/shim"
)

// stdinGrace is how long a session continues after the end of its stdin if no output follows. The
// answer of a container to its last input takes milliseconds.
const stdinGrace = 300 * time.Millisecond

// Attach connects a client to a container's own input and output. Like containerd's, the session
// ends
//   - with the container or ctx
//   - with Stdin, unless the end of Stdin closes the container's stdin (StdinOnce, without a
//     terminal), or the container takes no input. Unlike containerd's, the client gets the output
//     that follows.
//
// If there is neither input nor output, there is nothing to wait for. If the container takes no
// input, Attach reads Stdin and discards it. The error is Unavailable when berth is stopping.
func (r runner) Attach(ctx context.Context, monitor *shim.Monitor, c ContainerTarget, s IO) error {
	session := shim.AttachIO{Stdout: s.Stdout, Stderr: s.Stderr}
	if c.Terminal {
		session.Resize, session.Stderr = s.Resize, nil
	}
	hasOutput := session.Stdout != nil || session.Stderr != nil
	if !hasOutput && (s.Stdin == nil || !c.Stdin) {
		return nil
	}
	if !c.StdinOnce || c.Terminal || !hasOutput {
		session.StdinGrace = stdinGrace
	}
	if s.Stdin != nil {
		in, out := io.Pipe()
		if c.Stdin {
			session.Stdin = in
		} else if err := in.Close(); err != nil { // writes fail, so copyInput discards the input
			return err
		}
		if err := r.copyInput(out, s.Stdin); err != nil {
			return err
		}
	}
	return monitor.Attach(ctx, session)
}
