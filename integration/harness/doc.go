// Package harness runs a real berth for tests.
//
// The tests run as root in a private machine (contrib/machine). Main is a test package's TestMain.
// It enters such a machine unless it already runs in one, so `go test ./integration` works. Each
// test starts its own daemon:
//
//	d := harness.StartDaemon(t)
//	pod := d.RunPod(t, harness.PodLabel("app", "web"))
//	c := pod.Run(t, harness.Command("sleep", "1000"))
//
// When a test ends, the harness removes all pods and images through CRI. The leak check then
// compares the machine and the daemon with their state before the test.
package harness
