// Package failpoint marks the steps between which a program may die.
//
// Reach stands before and after each step that has an effect outside of the process:
//
//	failpoint.Reach("netns.pin")
//	err := unix.Mount(source, path, "", unix.MS_BIND, "")
//	failpoint.Reach("netns.pinned")
//
// In binaries built without the tag "failpoints", all that are released among them, it is
// an empty function that the compiler removes together with the names.
//
// With the tag, and with the variable BERTH_FAILPOINTS naming a directory, a test
// controls the program by two files in that directory:
//
//   - trace: if it exists, the name of each point reached, the process ID and the program's name are appended to it, a line each.
//   - armed: "NAME N ACTION PROCESS". The Nth time that the point is reached from now on by the
//     process with the ID PROCESS, or by any process of the program with the name PROCESS, the
//     file is removed and the process that is there is killed (action "kill": SIGKILL) or
//     stopped ("stop": SIGSTOP). The file counts down; it is to be put in its place by a rename.
//
// Names are "area.what-happened", literals, and each is used in one place only (a test
// of this package sees to both), so that a name in a test's report leads to the line.
// The monitor, which is in C, does the same by shim/monitor/failpoint.c.
package failpoint
