// Package integration holds the tests that start the real binaries and talk CRI
// to them as kubelet does. It has no code of its own outside tests; what the demo
// and the benchmark need too is in package fixture.
//
// The tests run as root in a machine of their own (contrib/machine): TestMain
// enters one unless it is in one already, so `go test ./integration` works. Each
// test starts a daemon of its own:
//
//	d := startDaemon(t)
//	pod := d.runPod(t, withLabel("app", "web"))
//	c := pod.run(t, command("sleep", "1000"))
//
// TestKubelet… start a kubelet too (kubelet_node_test.go), built from the module in kubelet/.
//
// When a test ends, everything it left is removed through CRI, and then the leak
// check of leak_test.go compares the machine and the daemon with what they were.
package integration
