// Package taskapi runs containers with a shim of containerd's task API ("shim v2"), such as
// Kata's. Its Main is the program berth-task. It has the command line of an OCI runtime, so
// launchers and daemon use it like runsc (package ociruntime), and link no ttrpc.
//
// # Contract
//
// The create of a pod's sandbox starts one shim, in the mount namespace of its launcher and in a
// cgroup beside the sandbox's. The other containers of the pod use the same shim. Before the shim
// is started, its record is in the runtime's state directory, so delete can end it at any time.
// With the systemd cgroup driver the shim has no cgroup of its own, and delete finds it when its
// sandbox exists.
//
//	create  starts the shim of a sandbox, and creates a task
//	start   starts the task of a sandbox
//	run     starts the task of another container, and stays: it copies the streams between the
//	        shim's FIFOs and its own descriptors, and reports the exit like runsc's wait
//	exec    starts a process. A copy of this program stays for it, as with run
//	update  changes limits inside of a virtual machine
//	usage   prints the usage of a container
//	watch   receives the shim's events until the shim has ended
//	kill, state, delete
//
// Every call to a shim except Wait has a timeout. A shim that leaves kills or deletes unanswered
// for hungAfter is killed with its cgroup. The shim's own command delete then removes the
// containers.
//
// # Files
//
// The state directory of a pod contains shim.json, and a directory for each task with its FIFOs.
// The bundle, in which the shim works, is berth's directory of the container.
package taskapi
