//go:build race

package shim

// monitorOptions has the monitor checked, too, where the tests are.
var monitorOptions = []string{"-sanitize"}
