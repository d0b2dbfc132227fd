// Package integration starts the real binaries and talks CRI to them as kubelet does. All its code
// is in tests. Package harness holds code shared by tests; package fixture serves the demo and the
// benchmark, too. Package attacks repeats known attacks.
//
// TestKubelet… also starts a kubelet (kubelet_node_test.go), built from the module in kubelet/.
package integration
