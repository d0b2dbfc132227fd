// Package shim starts containers and watches over them.
//
// A separate process, berth-shim, launches each container with libcontainer (package
// shim/launcher). After the launch, it replaces itself with the monitor by execve (shim/monitor, in
// C). The process keeps its pid and its children, and needs a fraction of the memory. This package
// is the daemon's side. Launchers starts launcher processes ahead of need. Monitor talks to a
// running monitor, even one from an earlier daemon.
//
// # Contract
//
// The container's shim directory (Dir) holds all state of a monitor, so a new daemon needs no other
// files:
//
//	Dir/shim   "<shim pid> <shim starttime> <init pid> <init starttime> <started, unix ns>\n", init
//	           fields 0 until the container's init exists; replaced by rename. The daemon writes it
//	           before it sends the request. The launcher removes it after it has undone a failed
//	           launch
//	Dir/sock   the monitor's unix socket: attach, log reopen, resize, close stdin
//	Dir/oci    the OCI runtime that made the container, unless that was libcontainer (JSON)
//	Dir/signalled
//	           empty; the daemon makes it when it has sent the stop signal
//	Dir/exit   the exit record, renamed into place after init has ended and its output is on disk;
//	           then the monitor exits
//
// A container has ended when its monitor process has exited (pidfd). If Dir/exit is missing then,
// the monitor was killed or has crashed, and the container is lost.
package shim
