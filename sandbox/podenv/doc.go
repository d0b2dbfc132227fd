// Package podenv creates and removes the environment of a pod: its files, its user and network namespaces, its network
// and its pause process. It also finds and removes environments without a record.
//
// # Contract
//
// The pod's record is on disk before Make is called, and it holds every name that does not follow from the pod's ID. All
// removal is by record and ID, not by what Make has done, so each step may be repeated and succeeds when there is nothing
// to remove. Containers are not part of the environment, but RemoveUnrecorded also removes what a container left. The
// caller holds the pod's lock.
//
// Network: the CNI configuration and IP ranges of a pod are chosen and recorded before ADD, and DEL gets the same ones.
// Addresses of unknown pods are given back.
//
// Files: resolv.conf, hosts, hostname and /dev/shm are on a tmpfs of the pod. Containers can write to them; the size of
// the tmpfs limits them, and the memory is charged to the writer. Every value from a request is checked before it is
// written, so that none can add a line or a word. Files of the node are read up to a limit.
//
// Namespaces: a pod's user namespace is pinned under a name that follows from its ID. Its network namespace belongs to
// it. Pause and containers join both by path.
package podenv
