// Package upgrade tests that a daemon takes over the state and the running monitors of earlier
// versions. Golden files in testdata contain the state directories. The monitors are built from the
// commits in the file "versions".
//
// A release adds its line to "versions" and its golden file:
//
//	go test ./integration/upgrade -run TestGoldenState -write
package upgrade
