// Package early takes the first steps to confine a berth-unpack that uses cgo. Capabilities and
// no_new_privs are attributes of a thread, and Go can change them on all threads only if C has made
// none. So these steps run before Go starts. Package jail takes the other steps and checks these.
//
// # Contract
//
// A program that imports this package, built with cgo and the tag isal, enters the tree at its
// descriptor 3 and drops its capabilities when it starts, or exits. In other builds package jail
// takes all steps.
package early
