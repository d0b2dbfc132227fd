// Package process is the program berth-stream, which has the sessions of exec, attach and
// port-forward. The daemon starts it (package server/sessions).
//
// # Contract
//
// The process outlives the daemon, so its sessions do. It asks the daemon to begin a session
// (package wire), and waits for a daemon up to 30 s. After the begin a session needs no daemon: the
// process has the connection to the exec's launcher, to the container's monitor or to the pod's
// port.
//
// The process ends when it has no session and no unused URL: at once without a daemon, otherwise
// after 10 s. A process that has given its listener to a newer one, or that has no daemon for 30 s,
// offers no URLs. It ends with its last session.
package process
