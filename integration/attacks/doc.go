// Package attacks tries the attacks of the past on a real berth, one test each, named by
// CVE or by the issue of another runtime. Each has something of the host that must stay as
// it is, and says whether the attack is to be refused or to come to nothing.
//
// CVE-2025-47291, a pod in a user namespace outside of its cgroup, is beside the other tests of user
// namespaces, in package integration.
package attacks
