package launcher

import (
	"os"

	"berth/shim/proto"
)

// backend creates the container of a launch. The backends are libcontainer in this process, an OCI
// runtime, and berth's pause program. launch calls the methods in this order.
type backend interface {
	// prepare checks the spec, and makes nothing but files in Dir. It returns InvalidArgument for a
	// spec that cannot be carried out.
	prepare() error
	// hostRoot returns the user and group on the host that are the container's root.
	hostRoot() (uid, gid int, err error)
	// create makes the container. Its init, a child of this process, waits for execute. create adds
	// everything it makes to the launch's undo list. pid is 0 if no process on the host stands for
	// the container yet; then follow returns one.
	create() (pid int, err error)
	// execute makes init execute the command, and returns when it has.
	execute() error
	// follow starts a child of this process that ends together with the running container. verdict
	// is a pipe on which it reports how the container ended. launch calls it if create returned 0.
	follow() (pid int, verdict *os.File, err error)
	// destroy removes everything that create has made.
	destroy() error
}

func (c *launch) newBackend() backend {
	switch {
	case c.Runtime != nil:
		return &ociBackend{launch: c}
	case c.Pause == proto.PlainPause:
		return &pauseBackend{launch: c}
	}
	return &libcontainerBackend{launch: c}
}
