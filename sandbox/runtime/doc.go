// Package runtime runs pauses and containers. It builds their runtime-specs and root filesystems,
// launches, signals and removes them, and reports their exits.
//
// # Contract
//
// A launch holds the layers of the image, creates the writable layer and the shim directory, and
// builds the runtime-spec. It passes them to a launcher process. All names derive from the ID, so
// removal needs no memory of completed steps. The image store holds layers under the container's ID
// until they are released. Holding and releasing may be repeated. No container can change a layer.
//
// The runtime-spec is a function of the recorded Spec and the node. It is built when a container is
// planned, and once more if plugins have changed the container. A start gets that spec. If a daemon
// has only the record, it builds the spec again. It also does so for display and for checkpoints.
// Annotations of users do not affect the runtime.
//
// Images are inspected (users, subpaths) through a mount that belongs to no mount namespace. Reads
// stay inside the image and are bounded. A fault of the image is InvalidArgument.
//
// A pidfd decides whether a process has exited. The exit record of the shim holds the container's
// exit. If the shim was lost, the daemon kills every surviving process of the container before it
// publishes the exit. So kubelet cannot start a second instance beside the first. A stop checks the
// state, sends a signal, and checks again. No caller that waits here holds the container's lock,
// because the exit is published under it. A shutdown of the daemon interrupts a wait and does not
// affect the container. The next daemon continues the wait.
package runtime
