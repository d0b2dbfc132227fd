// Package integration starts the real binaries and sends them CRI requests as kubelet does. All its
// code is in tests. Package harness holds code shared by tests. Package fixture also serves the
// demo and the benchmark. Package attacks repeats known attacks.
//
// TestKubelet… also starts a kubelet (kubelet_node_test.go), built from the module in kubelet/.
package integration
