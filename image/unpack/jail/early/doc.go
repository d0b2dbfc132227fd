// Package early confines a berth-unpack that uses cgo as far as that has to be done before it has threads, which is
// before Go starts: capabilities and no_new_privs are attributes of each thread, and Go can change them on all
// of its threads only where C has made none. Package confine does the rest, and checks what was done here.
//
// # Contract
//
// A program that imports the package, built with cgo and the tag isal, enters the tree that is its descriptor 3 and gives up
// its capabilities when it starts, or exits. Other builds do nothing, and leave everything to package confine.
package early
