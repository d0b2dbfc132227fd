// Package early takes the first steps to confine a berth-unpack that uses cgo. Capabilities and
// no_new_privs are attributes of a thread. Go can change them on all threads only if C has created
// none, so these steps run before Go starts. Package jail checks these steps and takes the others.
//
// # Contract
//
// A program that imports this package, built with cgo and the tag isal, enters the tree at its
// descriptor 3 and drops its capabilities when it starts. If a step fails, it exits. In other
// builds package jail takes all steps. The package is separate from jail because the daemon imports
// jail, and a C constructor runs in each program that links it.
package early
