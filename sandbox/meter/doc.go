// Package meter measures what containers and pods use: cgroups, the network interfaces of
// a namespace, and from two samples how much CPU time a second.
//
// # Contract
//
// A meter is made when processes start and closed by who watches their end. In between
// anybody may read it at any time: that reads the kernel's files through open descriptors, waits for
// nobody, and takes no lock that is held across anything else. What is gone is cgstats.ErrGone, no
// failure. What can't be known is said to be unknown, never zero.
package meter
