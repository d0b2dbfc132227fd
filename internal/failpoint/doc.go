// Package failpoint marks the steps between which a program may die.
//
// Reach stands before and after each step that has an effect outside the process:
//
//	failpoint.Reach("netns.pin")
//	err := unix.Mount(source, path, "", unix.MS_BIND, "")
//	failpoint.Reach("netns.pinned")
//
// Releases are built without the tag "failpoints". Then Reach is an empty function, which the
// compiler removes together with the names.
//
// If the program has the tag, and the variable BERTH_FAILPOINTS names a directory, a test controls
// the program through two files in this directory:
//
//   - trace: if it exists, each point reached appends a line with its name, the process ID and the
//     program's name.
//   - armed: "NAME N ACTION PROCESS". PROCESS is a process ID or a program name. At the Nth time
//     that a process of that name reaches the point, the file is removed. The process is killed
//     (action "kill", SIGKILL) or stopped (action "stop", SIGSTOP). N in the file counts down.
//     Tests must create the file by a rename.
//
// Names are literals of the form "area.what-happened". Each name is used in one place only, so that
// a name in a test's report leads to its line. A test checks both. The monitor, which is written in
// C, does the same in shim/monitor/failpoint.c.
package failpoint
