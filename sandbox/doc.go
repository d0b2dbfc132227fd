// Package sandbox owns pods and their containers: what they are, what exists for
// them on the host, and how they come and go.
//
// # Contract
//
// Every pod and every container is one object, changed by one writer at a time
// (its turn). Readers never wait: Pods, Containers, Pod and Container return
// immutable snapshots from atomic pointers, without lock, disk or RPC.
//
// Before the first outside effect of an object (network namespace, CNI ADD,
// cgroup, mount, process) its record is on disk. Every outside thing has a name
// that derives from the object's ID, so undoing needs no memory of how far the
// making got: teardown walks all of them, each step idempotent. The record is
// removed when everything it names is gone; an undo that fails is retried until
// it succeeds, by this daemon or the next one.
//
// Creating is idempotent: a second RunPodSandbox or CreateContainer with the same
// identity and content joins the running operation or returns its result.
// Operations run to their end even if the caller goes away.
//
// The end of a container is the end of its shim (a pidfd); the exit record then
// tells why. Stopping is level-triggered: look, signal, look again.
//
// Here is decided what happens when, and what is written down and told before and
// after. How each thing is done is in the packages below, which know no Manager: they are given IDs, configs
// and records.
package sandbox
