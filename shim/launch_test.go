package shim

import (
	"strings"
	"testing"
)

func TestExitCodes(t *testing.T) {
	e := newEnv(t)
	for _, tt := range []struct {
		name, script string
		want         Exit
	}{
		{"zero", "exit 0", Exit{}},
		{"three", "exit 3", Exit{Code: 3}},
		{"killed", "kill -9 $$", Exit{Code: 0}},
	} {
		got := e.run(tt.name, tt.script).wait()
		if got.Code != tt.want.Code || got.Signal != tt.want.Signal || got.OOMKilled {
			t.Errorf("%s: exit = %+v, want %+v", tt.name, got, tt.want)
		}
	}
}

func TestOutput(t *testing.T) {
	e := newEnv(t)
	c := e.run("output", "echo to stdout; echo to stderr >&2; printf unfinished")
	c.wait()
	if got := c.output("stdout"); got != "to stdout\nunfinished" {
		t.Errorf("stdout: %q", got)
	}
	if got := c.output("stderr"); got != "to stderr\n" {
		t.Errorf("stderr: %q", got)
	}
	if !strings.Contains(c.log(), " stdout P unfinished\n") {
		t.Errorf("log: %q", c.log())
	}
}
