package test

import (
	"os"
	"regexp"
	"testing"
)

var (
	section  = regexp.MustCompile(`(?m)^/\* (\w+\.c)\b`)
	declared = regexp.MustCompile(`(?m)^[a-z][\w *]*?(\w+)\(.*[;}]$`)
	comment  = regexp.MustCompile(`(?s)/\*.*?\*/`)
	called   = regexp.MustCompile(`\b(\w+)\(`)
)

// The files of the monitor call each other in one direction: monitor.h lists the functions of each
// file, and a file calls only functions of its own section and of later ones.
func TestFilesCallDown(t *testing.T) {
	header, err := os.ReadFile("../monitor.h")
	if err != nil {
		t.Fatal(err)
	}
	home, rank := map[string]string{}, map[string]int{} // file of each function, place of each file
	starts := section.FindAllSubmatchIndex(header, -1)
	for i, at := range starts {
		file, end := string(header[at[2]:at[3]]), len(header)
		if i+1 < len(starts) {
			end = starts[i+1][0]
		}
		rank[file] = i
		for _, f := range declared.FindAllSubmatch(header[at[0]:end], -1) {
			home[string(f[1])] = file
		}
	}
	if len(rank) < 10 || home["broadcast"] != "queue.c" || home["watch"] != "events.c" {
		t.Fatalf("monitor.h: files %v, functions %v", rank, home)
	}
	for file := range rank {
		source, err := os.ReadFile("../" + file)
		if err != nil {
			t.Error(err)
			continue
		}
		for _, call := range called.FindAllStringSubmatch(comment.ReplaceAllString(string(source), ""), -1) {
			callee, ok := home[call[1]]
			if ok && rank[callee] < rank[file] {
				t.Errorf("%s calls %s of %s, which is above it in monitor.h", file, call[1], callee)
			}
		}
	}
}
