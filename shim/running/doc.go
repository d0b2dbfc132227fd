// Package running has the owner's side of an exec that runs, and of an attached client. The daemon
// owns the execs without a client. The program berth-stream owns the others.
//
// # Contract
//
// An exec belongs to the process that has the connection to its launcher. [Exec.HandOver] gives it
// to another process, and [Adopt] takes it there. The end of the connection kills the exec. The
// package links no gRPC: errors have the codes of package coded.
package running
