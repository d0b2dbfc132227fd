// Package streams is what Exec, ExecSync, Attach and PortForward do.
//
// # Contract
//
// It finds what a client wants to be connected to, refuses what can't be, notes the wait, and leaves the
// connection to package session. Pods and containers are asked for each time (Targets), so a session begins only
// with one that runs now; its end, and that of the client, end the session. Nothing here takes a turn or changes a pod
// or container. Check functions tell beforehand what the others would refuse, for CRI hands out a URL first.
package streams
