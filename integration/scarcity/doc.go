// Package scarcity tests berth when its dependencies fail: CNI plugins, full and read-only disks,
// too little memory, too few descriptors and processes, and wrong clocks. docs/reliability.md lists
// the cases.
package scarcity
