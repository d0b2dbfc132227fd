package testutil

import "testing"

func TestAllTestsFollowsEnvironment(t *testing.T) {
	for value, want := range map[string]bool{"": false, "0": false, "1": true} {
		t.Run("value "+value, func(t *testing.T) {
			t.Setenv(allVar, value)
			if got := AllTests(); got != want {
				t.Errorf("AllTests() = %t with %s=%q, want %t", got, allVar, value, want)
			}
		})
	}
}
