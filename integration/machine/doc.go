// Package machine is the machine that tests run in, as its kernel shows it: processes, mounts, cgroups, files. It knows no
// daemon and no pods.
package machine

import "testing"

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
