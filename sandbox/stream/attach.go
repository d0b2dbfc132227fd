package stream

import (
	"context"
	"io"

	"berth/shim"
)

// Attach connects a client to a container's own input and output until the container or ctx ends.
// terminal says whether the container has a terminal. Without takesInput, Attach reads Stdin and
// discards it. The error is Unavailable when berth is stopping.
func (r runner) Attach(ctx context.Context, monitor *shim.Monitor, terminal, takesInput bool, s IO) error {
	session := shim.AttachIO{Stdout: s.Stdout, Stderr: s.Stderr}
	if terminal {
		session.Resize = s.Resize
	}
	if s.Stdin != nil {
		in, out := io.Pipe()
		if takesInput {
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
