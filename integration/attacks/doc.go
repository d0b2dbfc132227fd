// Package attacks repeats known attacks on a real berth, one test each, named after the CVE or
// another runtime's issue. Each test protects something on the host, and states whether the attack
// is refused or has no effect.
//
// CVE-2025-47291, a pod in a user namespace that leaves its cgroup, is tested in package
// integration with user namespaces.
package attacks
