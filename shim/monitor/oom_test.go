package main

import "testing"

func TestOOMKills(t *testing.T) {
	for _, tt := range []struct {
		data string
		want uint64
		ok   bool
	}{
		{"low 0\nhigh 0\nmax 12\noom 3\noom_kill 2\noom_group_kill 0\n", 2, true}, // v2
		{"oom_kill_disable 0\nunder_oom 0\noom_kill 7\n", 7, true},                // v1
		{"oom_kill_disable 0\nunder_oom 0\n", 0, false},                           // v1 before Linux 4.13
		{"oom_kill x\n", 0, false},
		{"", 0, false},
	} {
		if got, ok := oomKills([]byte(tt.data)); got != tt.want || ok != tt.ok {
			t.Errorf("oomKills(%q) = %d, %v", tt.data, got, ok)
		}
	}
}
