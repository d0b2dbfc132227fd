// Package crash kills the daemon at every one of its failpoints (berth/internal/failpoint),
// during every operation that changes something, and asks what remains.
//
// An operation is run once without a crash. That tells which points it reaches, how often, and what
// it leaves: processes, mounts, namespaces, cgroups, addresses, files and listed objects
// (harness.FullState). Then it is run once for each point that was reached: the daemon is killed
// there, started again, and asked again as kubelet asks. What is there then must be what was
// left without the crash, and once everything was removed, nothing at all. No difference is allowed.
//
// With BERTH_TORTURE=1 each point is tried every time that it is reached, for all variants of each
// operation and each way in which kubelet tries again; otherwise each point once an operation.
package crash
