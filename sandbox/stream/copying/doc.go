// Package copying connects a client's streams to a process, a container or a port.
//
// # Contract
//
// A session ends when the process or connection ends, when its context ends, or when the client
// accepts no more output. Output that a command wrote before its exit is delivered first. A session
// does not wait for background processes that keep the output open. A read from a client cannot be
// interrupted. It runs in a goroutine that the caller owns ([Spawn]), and ends when the client's
// connection is closed.
//
// The package links no gRPC, because the program berth-stream uses it: errors have the codes of
// package coded.
package copying
