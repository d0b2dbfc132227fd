//go:build race

package shim

// monitorOptions builds the monitor with sanitizers if the tests run with the race detector.
var monitorOptions = []string{"-sanitize"}
