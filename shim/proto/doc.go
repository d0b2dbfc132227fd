// Package proto defines everything that crosses a process boundary of a shim:
//
//   - the daemon's requests to a launcher and its replies (Request, Reply, Conn),
//   - the frames of a monitor's socket (Frame),
//   - the files that launcher and monitor leave in a shim directory (PIDs, Exit),
//   - the command line of the monitor, which replaces the launcher (MonitorParams).
//
// A launcher runs the code of the daemon that started it, so requests and replies have no versions.
// A monitor may be older than the daemon: frames and files must stay readable for all releases.
// Their other implementation is in C, in shim/monitor.
package proto
