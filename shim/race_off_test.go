//go:build !race

package shim

var monitorOptions []string
