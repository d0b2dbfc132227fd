// Package crash kills the daemon at each of its failpoints (berth/internal/failpoint) during each
// operation that changes something, and compares the result.
//
// An operation first runs without a crash. That run yields the points that the operation reaches,
// how often it reaches them, and its result: processes, mounts, namespaces, cgroups, addresses,
// files and listed objects (harness.FullState). Then the operation runs once for each point. The
// daemon is killed there and started again, and the test repeats the request as kubelet does. The
// result must equal that of the run without a crash. After the removal of all objects, nothing may
// be left. No difference is allowed.
//
// The start of the daemon is such an operation, too. It runs on the state of a killed daemon, also
// with lost or damaged records, layers, addresses and programs.
//
// BERTH_TORTURE=1 tries each occurrence of each point, all variants of each operation, and each way
// in which kubelet repeats the request. A point that never killed the daemon then fails the test,
// unless a list gives the reason. The default tries the first occurrence of each point, only plain
// operations, and only the same request. Of the points before an answer it tries only the first,
// because later answers belong to the inventory.
package crash
