// Package sandbox owns pods and their containers: their state, their resources on the host, and
// their lifecycle.
//
// # Contract
//
// Every pod and every container is one object (objects.go). One operation at a time holds its lock
// and changes it. Readers never wait: Pods, Containers, Pod and Container return immutable
// snapshots from atomic pointers, without lock, disk or RPC.
//
// The manager writes an object's record before the object's first outside effect (network
// namespace, CNI ADD, cgroup, mount, process). The names of all outside effects derive from the
// object's ID. Undoing therefore needs no memory of completed steps: it repeats all idempotent
// removal steps and removes the record last. A failed removal is retried until it succeeds, by this
// daemon or the next one.
//
// Creation is idempotent: a second RunPodSandbox or CreateContainer with the same identity and
// content joins the running operation or returns its result. Operations continue when the caller
// leaves.
//
// A container ends when its shim ends, which a pidfd reports. The exit record then gives the
// reason. Stopping is level-triggered: check, signal, check again.
//
// This package orders the steps, and records and publishes the states between them. The manager
// commands the host through the interfaces of interfaces.go. The packages that implement them do
// not import this package.
package sandbox
