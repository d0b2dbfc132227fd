// Package harness runs a real berth for tests.
//
// The tests run as root in a machine of their own (contrib/machine): Main, which is
// a test package's TestMain, enters one unless it is in one already, so that
// `go test ./integration` works. Each test starts a daemon of its own:
//
//	d := harness.StartDaemon(t)
//	pod := d.RunPod(t, harness.PodLabel("app", "web"))
//	c := pod.Run(t, harness.Command("sleep", "1000"))
//
// When a test ends, everything it left is removed through CRI, and then the leak
// check compares the machine and the daemon with what they were.
package harness
