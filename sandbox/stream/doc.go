// Package stream implements Exec, ExecSync, Attach and PortForward. It connects clients to
// processes and ports of pods.
// # Contract
//
// A Service looks up containers and pods through Targets for each request, so a session starts only
// with a running target. It takes no lock of a pod or container and does not change them. The Check
// methods report the errors of a session in advance, because CRI returns a URL before the session
// starts.
//
// A session ends when the process or connection ends, when its context ends, or when the client
// accepts no more output. Output that a command wrote before its exit is delivered first. A session
// does not wait for background processes that keep the output open. A read from a client cannot be
// interrupted. It runs in a goroutine that the caller owns (runner.Spawn), and ends when the
// client's connection is closed.
package stream
