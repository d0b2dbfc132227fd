// Package upgrade tests that a daemon takes over what earlier versions left: their state
// directories, kept as golden files in testdata, and their running monitors, of
// programs built from the commits of these versions. The file "versions" names them.
//
// A release adds its line to "versions" and its golden file:
//
//	go test ./integration/upgrade -run TestGoldenState -write
package upgrade
