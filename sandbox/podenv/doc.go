// Package podenv creates and removes the environment of a pod: files, user and network namespaces,
// network attachment. It also finds and removes environments without a record.
// # Contract
//
// The pod's record is on disk before the first step, and holds every name that does not derive from
// the pod's ID. Removal needs only record and ID. Each step may be repeated, and succeeds if there
// is nothing to remove. The caller holds the pod's lock.
//
// Network: the CNI configuration and IP ranges of a pod are chosen and recorded before ADD, and DEL
// gets the same values. CNI GC releases the addresses of pods whose records are lost.
//
// Files: resolv.conf, hosts, hostname and /dev/shm are on a tmpfs of the pod. Containers can write
// to them. The size of the tmpfs limits these files, and their memory is charged to the container
// that writes. Every value of a request is checked before it is written, so that no value can add a
// line or a word.
//
// Namespaces: a pod's user namespace is pinned under a name that derives from its ID, and owns the
// pod's network namespace. Pause and containers join both by path.
package podenv
