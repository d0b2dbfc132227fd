// Package failpoint marks the steps between which a program may die.
//
// Reach stands before and after each step that has an effect outside the process:
//
//	failpoint.Reach("netns.pin")
//	err := unix.Mount(source, path, "", unix.MS_BIND, "")
//	failpoint.Reach("netns.pinned")
//
// In binaries built without the tag "failpoints", all releases among them, Reach is an empty
// function that the compiler removes together with the names.
//
// With the tag, and with the variable BERTH_FAILPOINTS naming a directory, a test controls the
// program through two files in that directory:
//
//   - trace: if it exists, each point reached appends a line with its name, the process ID and the
//     program's name.
//   - armed: "NAME N ACTION PROCESS". PROCESS is a process ID or a program name. At the Nth time
//     that such a process reaches the point, the file is removed and the process is killed (action
//     "kill": SIGKILL) or stopped ("stop": SIGSTOP). The file counts down; tests must create it by
//     a rename.
//
// Names are literals of the form "area.what-happened". Each is used in one place only, so that a
// name in a test's report leads to its line. A test checks both. The monitor, which is written in
// C, does the same in shim/monitor/failpoint.c.
package failpoint
