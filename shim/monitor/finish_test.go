package main

import (
	"encoding/json"
	"testing"
)

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

// FuzzExitStatus: what an encoder writes is understood, and what nobody has written
// is no exit code that there cannot be.
func FuzzExitStatus(f *testing.F) {
	f.Add([]byte(`{"id":"c","exitStatus":137}`), "c", uint8(137))
	f.Add([]byte(`{"exitStatus":300,"exitStatus":-1}`), `"exitStatus":1}`, uint8(0))
	f.Fuzz(func(t *testing.T, text []byte, id string, code uint8) {
		if got, ok := exitStatus(text); ok && (got < 0 || got > 255) {
			t.Errorf("%q: %d", text, got)
		}
		said, err := json.Marshal(map[string]any{"id": id, "exitStatus": code})
		if err != nil {
			t.Fatal(err)
		}
		if got, ok := exitStatus(said); !ok || got != int32(code) {
			t.Errorf("%s: %d, %t", said, got, ok)
		}
	})
}
