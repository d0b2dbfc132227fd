// Package crash kills the daemon at each of its failpoints (berth/internal/failpoint) during each
// operation that changes something, and compares the result.
//
// An operation first runs without a crash. That run shows the points that the operation reaches,
// how often, and its result: processes, mounts, namespaces, cgroups, addresses, files and listed
// objects (harness.FullState). Then the operation runs once for each point. The daemon is killed
// there and started again, and the request is repeated as kubelet repeats it. The result must equal
// that of the run without a crash. After all objects are removed, nothing may be left. No
// difference is allowed.
//
// The daemon's start is such an operation, too. It runs on the state of a killed daemon, and on
// records, layers, addresses and programs that were lost or damaged meanwhile.
//
// With BERTH_TORTURE=1 each point is tried as often as it is reached, for all variants of each
// operation and each way in which kubelet repeats it. A point that never killed the daemon is then
// a failure unless it is in a list with reasons. By default each point is tried the first time that
// it is reached, for the plain operations only, and kubelet repeats the same request. Of the points
// that send an answer only the first is tried: later answers belong to the inventory.
package crash
