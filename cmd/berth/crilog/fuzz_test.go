package crilog

import (
	"bytes"
	"context"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
)

// FuzzRead reads files of arbitrary bytes. The last lines must be the end of all lines, lines since
// a time must not be older, and a follower must read the same lines.
func FuzzRead(f *testing.F) {
	f.Add([]byte(record(1, "F", "one")+record(2, "P", "t")+record(3, "F", "wo")+record(4, "P", "open")), 2, int64(2))
	f.Add([]byte("no record\n"+record(1, "F", "")+strings.Replace(record(2, "P", "x"), "stdout", "stderr", 1)+record(3, "F:x", "y")), 0, int64(0))
	f.Add([]byte(record(5, "F", "newer first")+record(1, "F", "older")+"2026-01-02T00:00:09Z stdout F cut"), 1, int64(5))
	f.Fuzz(func(t *testing.T, content []byte, tail int, since int64) {
		path := filepath.Join(t.TempDir(), "0.log")
		if err := os.WriteFile(path, content, 0o600); err != nil {
			t.Fatal(err)
		}
		read := func(o Options) (lines []Record, failed bool) {
			err := Read(context.Background(), path, o, func(r Record) error { lines = append(lines, r); return nil })
			return lines, err != nil
		}
		all, failed := read(Options{Tail: All})
		for _, r := range all {
			if r.Stream != Stdout && r.Stream != Stderr || bytes.IndexByte(r.Content, '\n') >= 0 || len(r.Content) > maxLine+maxRecord {
				t.Fatalf("record %v", r)
			}
		}
		if n := bytes.Count(content, []byte("\n")) + 1; len(all) > n {
			t.Fatalf("%d lines of %d", len(all), n)
		}
		tail = int(uint(tail) % 8)
		got, badTail := read(Options{Tail: tail})
		equal(t, "the last lines", got, all[max(0, len(all)-tail):])
		from := start.Add(time.Duration(since%20) * time.Second)
		got, badSince := read(Options{Tail: All, Since: from})
		equal(t, "lines since a time", got, slices.DeleteFunc(slices.Clone(all), func(r Record) bool { return r.Time.Before(from) }))
		if failed != badTail || failed != badSince {
			t.Fatalf("malformed records: %t, %t, %t", failed, badTail, badSince)
		}
		if tail > 0 {
			return // following takes milliseconds in the kernel
		}
		ended := make(chan struct{})
		close(ended)
		got, _ = read(Options{Tail: All, Follow: true, Ended: ended})
		equal(t, "followed lines", got, all)
	})
}

func equal(t *testing.T, what string, got, want []Record) {
	t.Helper()
	if !slices.EqualFunc(got, want, func(a, b Record) bool {
		return a.Time.Equal(b.Time) && a.Stream == b.Stream && a.Partial == b.Partial && bytes.Equal(a.Content, b.Content)
	}) {
		t.Fatalf("%s: %v, want %v", what, got, want)
	}
}
