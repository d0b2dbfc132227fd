// Package attacks repeats known attacks on a real berth. Each test is named after a CVE or another
// runtime's issue, protects something on the host, and states whether berth refuses the attack or
// the attack has no effect.
//
// Package integration tests CVE-2025-47291, a pod in a user namespace that leaves its cgroup, with
// user namespaces.
package attacks
