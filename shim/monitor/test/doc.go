// Package test tests the C code of the monitor, and fuzzes its parsers of untrusted bytes. A
// program made of that code and testdata/driver.c answers the tests' questions. It is built
// with the address and undefined-behaviour sanitizers.
//
// Package shim tests the monitor as a whole. In builds with the race detector it uses a monitor
// with the sanitizers.
package test
