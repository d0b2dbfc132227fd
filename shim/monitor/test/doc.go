// Package test tests the monitor's parts, which are C, and fuzzes those that read bytes from
// outside. A program made of them and of shim/monitor/driver.c answers questions; it is built
// with the address sanitizer and the sanitizer of undefined behaviour, which end it when they find something.
//
// How the monitor works as a whole is tested by package shim, with a monitor that is built with the
// sanitizers if the tests are built with the race detector.
package test
