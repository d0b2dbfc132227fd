// Package stream implements Exec, ExecSync, Attach and PortForward: it connects clients to processes and ports of pods.
//
// # Contract
//
// A Service looks containers and pods up through Targets for each request, so a session starts only with a target that is
// running. It takes no lock of a pod or container and changes neither. The Check functions report in advance the errors
// of a session, because CRI returns a URL before the session starts.
//
// A session ends when the process or connection ends, when its context ends, or when the client accepts no more output.
// All output that a command wrote before its exit is delivered first. Background processes that keep the output open are
// not waited for. A read from a client cannot be interrupted. It runs in a goroutine of the caller (runner.Spawn), and
// ends when the client's connection is closed.
package stream
