// Package integration holds the tests that start the real binaries and talk CRI
// to them as kubelet does. It has no code of its own outside tests: what they share
// is in package harness, what the demo and the benchmark need too in package fixture, and
// the attacks of the past are in package attacks.
//
// TestKubelet… start a kubelet too (kubelet_node_test.go), built from the module in kubelet/.
package integration
