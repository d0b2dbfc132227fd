// Package state defines the records and snapshots of pods and containers.
//
// # Contract
//
// A pod or container consists of an immutable Spec and a mutable Status. The Spec is decided when
// the object is planned: identity, config, handler, cgroup path, namespaces, labels, image, layers
// and volumes. It is recorded before the first outside effect, and no later step derives these
// values again. The Status holds the phase, the pause, the addresses, the resources in force and
// the exit. Only the holder of the object's lock can access the Status.
//
// The phase changes along one table of transitions (phase.go). A missing transition is a bug and is
// refused.
//
// Readers get snapshots, Pod and Container. A snapshot holds the Spec and a copy of the Status and
// never changes. Events are steps from one snapshot to the next.
//
// Records are versioned JSON documents with a checksum (package checkpoint/record). Records of
// earlier versions stay readable: missing fields are derived once, when the record is loaded. A
// record that fails its checks is moved to record.SetAsideDir.
//
// Dirs names every path on the host. All paths derive from an ID, so undoing an operation needs no
// memory of its completed steps. The checks of requests are pure: they use only the config and the
// facts of the host.
package state
