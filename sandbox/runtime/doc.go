// Package runtime runs pauses and containers: runtime-spec, root filesystem, launch, signals, exit,
// removal.
//
// # Contract
//
// A launch holds the layers of the image, makes the writable layer and the shim directory, and
// builds the runtime-spec. It hands all of it to a launcher. Everything it makes is found by the
// ID, so removal works however far the launch got. Layers are held in the image store under the
// container's ID until they are released. Holding and releasing may be repeated. No container can
// change a layer.
//
// The runtime-spec follows from the recorded Spec and from the node. Annotations of users reach no
// runtime.
//
// Images are inspected (users, subpaths) through a mount that belongs to no mount namespace. Reads
// stay inside the image and are bounded. A fault of the image is InvalidArgument.
//
// A pidfd decides whether a process has ended. The exit record of the shim holds the container's
// exit. If the shim was lost, the daemon kills every surviving process of the container before it
// publishes the exit. So no second instance runs beside the first. Stopping is level-triggered:
// look, signal, look again. No caller that waits here holds the container's lock, because the exit
// is published under it. A shutdown of the daemon interrupts a wait and says nothing about the
// container; the next daemon finds out.
package runtime
