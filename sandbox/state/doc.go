// Package state holds what berth records about pods and containers, and what readers see of them.
//
// # Contract
//
// A pod or container consists of an immutable Spec and a mutable Status. The Spec is decided when the object is
// planned: identity, config, handler, cgroup path, namespaces, labels, image, layers and volumes. It is recorded before
// the first outside effect, and no later step derives any of it again. The Status is what changes: the phase, the pause,
// the addresses, the resources in force, the exit. Only the holder of the object's lock reaches the Status.
//
// The phase moves along one table of transitions (see phase.go). A transition that the table lacks is a bug and is
// refused.
//
// Readers get snapshots, Pod and Container. A snapshot holds the Spec and a copy of the Status and never changes. Events
// are steps from one snapshot to the next.
//
// Records are versioned JSON documents with a checksum (package checkpoint). Records of earlier versions stay readable:
// fields that they lack are derived once, when the record is loaded. A record that fails its checks is moved aside.
//
// Dirs names every path on the host. All of them follow from an ID, so undoing an operation needs no memory of how far it
// got. The checks of requests are pure: they look at the config and the facts of the host, and at nothing else.
package state
