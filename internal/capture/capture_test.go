package capture

import (
	"os/exec"
	"strings"
	"testing"

	"berth/internal/testutil"
)

func newOutput(t *testing.T, limit int) *Output {
	t.Helper()
	o, err := New(limit)
	testutil.Must(t, err)
	return o
}

func end(t *testing.T, o *Output) {
	t.Helper()
	testutil.Must(t, o.End())
}

func TestOutputBeforeEndIsComplete(t *testing.T) {
	text := strings.Repeat("x", 60<<10)
	for range 1000 {
		o := newOutput(t, 1<<20)
		if _, err := o.File().WriteString(text); err != nil {
			t.Fatal(err)
		}
		end(t, o)
		if string(o.Bytes()) != text || o.Total() != len(text) {
			t.Fatalf("kept %d bytes of %d", len(o.Bytes()), len(text))
		}
	}
}

func TestOutputOfPrograms(t *testing.T) {
	for _, tt := range []struct {
		name, script string
		limit        int
		kept         string
		most         bool // the program writes more than any limit
	}{
		{name: "nothing", script: "exit 1", limit: 10},
		{name: "less than the limit", script: "echo one; echo two", limit: 100, kept: "one\ntwo\n"},
		{name: "more", script: "echo one; echo two", limit: 5, kept: "one\nt"},
		{name: "more than a pipe holds", script: "head -c 300000 /dev/zero | tr '\\0' x", limit: 300000, kept: strings.Repeat("x", 300000)},
		{name: "a child has the output", script: "sleep 1000 & echo $! >&2; echo done", limit: 100, kept: "done\n"},
		{name: "a child goes on printing", script: "echo y; echo y; yes & echo $! >&2; sleep 0.1", limit: 4, kept: "y\ny\n", most: true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			o, child := newOutput(t, tt.limit), newOutput(t, 100)
			cmd := exec.Command("sh", "-c", tt.script)
			cmd.Stdout, cmd.Stderr = o.File(), child.File()
			testutil.Must(t, cmd.Start())
			testutil.Must(t, o.Started())
			_ = cmd.Wait() // some scripts fail
			end(t, o)
			end(t, child)
			if pid := strings.TrimSpace(string(child.Bytes())); pid != "" {
				_ = exec.Command("kill", "-9", pid).Run() // without a reader, yes may have exited
			}
			if string(o.Bytes()) != tt.kept || !tt.most && tt.name != "more" && o.Total() != len(tt.kept) {
				t.Errorf("kept %.40q of %d bytes, want %.40q", o.Bytes(), o.Total(), tt.kept)
			}
		})
	}
}

func TestEndWithoutStart(t *testing.T) {
	o := newOutput(t, 10)
	end(t, o)
	if len(o.Bytes()) != 0 {
		t.Errorf("%q", o.Bytes())
	}
}
