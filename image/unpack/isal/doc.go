// Package isal decompresses gzip with ISA-L, a library in C and assembly that takes a third of the
// time of Go's implementations. It is available in builds with cgo and the tag isal, which need the
// library's headers. When the program starts, it must be able to load libisal.so.2.
//
// # Contract
//
// Loaded reports whether the library was loaded at the start. Its result never changes, because a
// confined program can load nothing later. The first call of Works decompresses a sample, so a
// broken library affects only users of gzip.
//
// Reader reads what gzip.Reader reads: all members, each verified by checksum and length. Zeros
// after the last member are padding. Other trailing data is an error.
//
// The library is not memory-safe. Only the confined berth-unpack may pass it an image's bytes. The
// package is separate from inflate because it has C code, a build tag and a constructor that loads
// the library.
package isal
