package handoff

import (
	"slices"
	"testing"
)

func TestParseIsTheOppositeOfArgs(t *testing.T) {
	for _, p := range []Params{
		{},
		{ID: "a", Dir: "/run/berth/c/a", LogPath: "/var/log/with space=and equals/0.log", MaxLine: 16384, InitPID: 77,
			StdinOnce: true, Orphans: true, Init: 9, KillDir: "/sys/fs/cgroup/x", Listen: 3, Log: 4, Stdin: 5, Stdout: 6, Stderr: 7, Console: -1, Verdict: -1, OOM: 8, OOMNotify: -1, OOMParent: -1},
	} {
		if got, err := Parse(p.Args()); got != p || err != nil {
			t.Errorf("Parse(%q) = %+v, %v", p.Args(), got, err)
		}
	}
}

func TestParseRefuses(t *testing.T) {
	good := (&Params{}).Args()
	for i := range good {
		if p, err := Parse(slices.Delete(slices.Clone(good), i, i+1)); err == nil {
			t.Errorf("without %q: %+v", good[i], p)
		}
	}
	for _, bad := range []string{"init=x", "stdin-once=perhaps", "listen-fd="} {
		args := slices.Clone(good)
		for i, f := range (&Params{}).fields() {
			if len(bad) > len(f.name) && bad[:len(f.name)+1] == f.name+"=" {
				args[i] = bad
			}
		}
		if p, err := Parse(args); err == nil {
			t.Errorf("with %q: %+v", bad, p)
		}
	}
}

func TestFDs(t *testing.T) {
	p := Params{Init: -1, Listen: 3, Log: -1, Stdin: -1, Stdout: 5, Stderr: 6, Console: -1, Verdict: -1, OOM: -1, OOMNotify: -1, OOMParent: -1}
	if got := p.FDs(); !slices.Equal(got, []int{3, 5, 6}) {
		t.Errorf("FDs = %v", got)
	}
}
