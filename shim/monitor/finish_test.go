package main

import "testing"

func TestExitStatus(t *testing.T) {
	for text, want := range map[string]int32{
		`{"id":"c","exitStatus":0}` + "\n":       0,
		`{"id":"c", "exitStatus" : 137 , "x":1}`: 137,
		`{"exitStatus":255}`:                     255,
	} {
		if got, ok := exitStatus([]byte(text)); got != want || !ok {
			t.Errorf("%s: %d, %v", text, got, ok)
		}
	}
	for _, text := range []string{"", `{"id":"c"}`, `{"exitStatus":}`, `{"exitStatus":-1}`, `{"exitStatus":256}`, `{"exitStatus":"3"}`, `{"exitStatus":3`, `"exitStatus"`} {
		if got, ok := exitStatus([]byte(text)); ok {
			t.Errorf("%s: %d", text, got)
		}
	}
}
