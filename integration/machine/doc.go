// Package machine gives tests access to the processes, mounts, cgroups and files of the machine
// they run in.
package machine

import "testing"

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
