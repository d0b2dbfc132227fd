// Package process has the files of checkpoints: those that a save writes besides CRIU's images, and
// those that a restore compares.
//
// # Contract
//
// A checkpoint is a directory that belongs to berth or to a client (Outputs), or a file that is
// packed from such a directory (WriteArchive). Package archive defines and seals the directory, and
// package dump copies directory trees. Compare refuses a container that is not the saved one.
//
// The package knows files, not pods or containers, and touches no process. Package sandbox holds
// the locks, and orders the steps of a save and a restore. Package sandbox/runtime freezes and
// dumps the processes, and fills writable layers. shim/launcher/criu runs CRIU.
package process
