// Package scarcity tests berth where what it depends on fails: CNI plugins that
// misbehave, full and read-only disks, too little memory, too few descriptors and processes, clocks
// that are wrong. docs/reliability.md has tables of the cases.
package scarcity
