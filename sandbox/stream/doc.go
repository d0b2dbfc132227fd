// Package stream implements Exec, ExecSync, Attach and PortForward. It connects clients to
// processes and ports of pods.
//
// # Contract
//
// A Service looks up containers and pods through Targets for each request, so a session starts only
// with a running target. It takes no lock of a pod or container and does not change them. The Check
// methods report the errors of a session in advance, because CRI returns a URL before the session
// starts.
//
// The session of a client runs in another process (package server/sessions), which outlives the
// daemon. Package copying connects the client there. This package begins the session, and counts it
// until its end.
package stream
