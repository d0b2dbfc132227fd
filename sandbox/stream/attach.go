package stream

import (
	"context"
	"io"

	"berth/shim"
)

// Attach connects a client to a container's own input and output, from now on, until the
// container ends or ctx does. terminal is whether the container has one. Without
// takesInput, Stdin is read and passed over. Unavailable if berth is stopping.
func (r runner) Attach(ctx context.Context, monitor *shim.Monitor, terminal, takesInput bool, s IO) error {
	session := shim.AttachIO{Stdout: s.Stdout, Stderr: s.Stderr}
	if terminal {
		session.Resize = s.Resize
	}
	if s.Stdin != nil {
		in, out := io.Pipe()
		if takesInput {
			session.Stdin = in
		} else if err := in.Close(); err != nil { // what is written fails, and is passed over
			return err
		}
		if err := r.copyInput(out, s.Stdin); err != nil {
			return err
		}
	}
	return monitor.Attach(ctx, session)
}
