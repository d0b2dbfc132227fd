// Package early takes the first steps to confine a berth-unpack that uses cgo. Capabilities and
// no_new_privs are attributes of a thread. Go can change capabilities on all threads only if C code
// has created no threads. So these steps run before Go starts. Package jail checks these steps and
// takes the others.
//
// # Contract
//
// If a program imports this package and is built with cgo and the tag isal, it does two things when
// it starts. It enters the tree at its descriptor 3, and drops its capabilities. If a step fails,
// it exits. In other builds package jail takes all steps. The package is separate from jail because
// the daemon imports jail, and a C constructor runs in each program that links it.
package early
