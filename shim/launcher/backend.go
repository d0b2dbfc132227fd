package launcher

import (
	"os"

	"berth/shim/proto"
)

// backend creates the container of a launch. The backends are libcontainer in this process, CRIU,
// an OCI runtime, and berth's pause program. launch calls the methods in this order.
type backend interface {
	// prepare checks the spec. It creates only files in Dir. It returns InvalidArgument for a
	// spec that cannot be carried out.
	prepare() error
	// hostRoot returns the host's user and group IDs of the container's root.
	hostRoot() (uid, gid int, err error)
	// create makes the container. Its init, a child of this process, waits for execute. create adds
	// its undo steps to the launch's list. pid is 0 if the host has no process of the container
	// yet. Then follow returns the process.
	create() (pid int, err error)
	// execute makes init execute the command, or continue a checkpoint, and waits until it has done
	// so.
	execute() error
	// follow returns a child of this process that ends together with the running container. If the
	// child is not the container's init, it writes the container's exit status to the pipe verdict.
	// launch calls it if create returned 0.
	follow() (pid int, verdict *os.File, err error)
	// destroy undoes create.
	destroy() error
}

func (c *launch) newBackend() backend {
	switch {
	case c.Runtime != nil:
		return &ociBackend{launch: c}
	case c.restoresInside():
		return &mappedRestore{restoreBackend: restoreBackend{libcontainerBackend: libcontainerBackend{launch: c}}}
	case c.Restore != nil:
		return &restoreBackend{libcontainerBackend: libcontainerBackend{launch: c}}
	case c.Pause == proto.PlainPause:
		return &pauseBackend{launch: c}
	}
	return &libcontainerBackend{launch: c}
}

// restoresInside returns whether CRIU runs in the pod's user namespace. A CRIU that was taken over
// can leave processes in the node's PID namespace.
func (c *launch) restoresInside() bool {
	return c.Runtime == nil && c.Restore != nil && isMapped(c.Spec)
}
