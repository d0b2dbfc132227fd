// Package fair keeps slow users of a shared resource from holding up the others.
//
// # Contract
//
// Slots share a number of places, such as processes that unpack. An owner gets a slot only if it
// holds fewer slots than are free. So owners that keep their slots for long do not starve others.
// The first owner gets at most half of the slots, the next a quarter, and so on.
//
// A Meter decides whether a transfer is too slow: its rate stays below a limit for a whole window.
// Only the time that the other side takes counts, so a slow receiver in this process does not
// matter. A Body applies a Meter to a response body, and also ends a Read that takes a whole window
// by itself.
package fair
