// Package isal reads gzip by ISA-L, a library of C and assembly that takes a third of the time of
// Go's implementations. It is there in builds with cgo and the tag isal, which need the library's headers,
// where libisal.so.2 can be loaded when the program starts.
//
// # Contract
//
// Loaded tells whether it is there, and says the same for as long as the program runs: nothing is loaded later, when the program may be confined.
// Works tells whether it can be used, and has it inflate something to find out, the first time: what is wrong with a library concerns those who
// have a gzip to read.
//
// Reader reads what gzip.Reader reads: all members, each verified by its checksum and length. It is an error if
// anything follows the last one.
//
// The library is not memory-safe. Only berth-unpack, which is confined, may give it an image's bytes.
package isal
