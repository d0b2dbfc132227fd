// Package crash kills the daemon at every one of its failpoints (berth/internal/failpoint),
// during every operation that changes something, and asks what remains.
//
// An operation is run once without a crash. That tells which points it reaches, how often, and what
// it leaves: processes, mounts, namespaces, cgroups, addresses, files and listed objects
// (harness.FullState). Then it is run once for each point that was reached: the daemon is killed
// there, started again, and asked again as kubelet asks. What is there then must be what was
// left without the crash, and once everything was removed, nothing at all. No difference is allowed.
//
// The daemon's start is such an operation, too: on what a killed daemon has left, and on records, layers, addresses and
// programs that were lost or damaged meanwhile.
//
// With BERTH_TORTURE=1 each point is tried every time that it is reached, for all variants of each
// operation and each way in which kubelet tries again; and a point at which no operation had the daemon killed is a
// failure, but for a list with reasons. Otherwise each point is tried the first time that it is reached, of the plain
// operations only, and kubelet asks the same again. Of the answers that the daemon gives the first one is tried: later ones are
// to those who look what the operation has left.
package crash
