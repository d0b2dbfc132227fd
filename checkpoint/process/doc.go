// Package process has the files of checkpoints of processes: what a save writes besides CRIU's
// images, and what a restore compares.
//
// # Contract
//
// A checkpoint is a directory of berth's own or of a client (Outputs), or a file that is packed
// from it (WriteArchive). Package archive defines and seals it, and package dump copies directory
// trees. Compare refuses a container that is not the saved one.
//
// The package knows files, not pods or containers, and touches no process. Package sandbox holds
// the locks, and orders the steps of a save and a restore. sandbox/runtime freezes and dumps the
// processes, and fills writable layers. shim/launcher/criu runs CRIU.
package process
