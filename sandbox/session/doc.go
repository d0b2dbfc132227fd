// Package session connects clients to processes: the pipes or terminal of a command that is
// run in a container, a container's own input and output, a connection to a port in a
// pod's network namespace.
//
// # Contract
//
// A session ends with what it is a session of, when its context ends, or when the client takes no
// more; all that a command has written before its exit is delivered first, and whatever else
// has its output open is not waited for. It is told what to run and where, and knows
// neither pods nor containers. Reading from a client can't be interrupted: it is done in goroutines whose
// owner is the caller (Runner.Spawn), and ends with the client's connection.
package session
