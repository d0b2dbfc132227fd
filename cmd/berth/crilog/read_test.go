package crilog

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
)

var start = time.Date(2026, 1, 2, 0, 0, 0, 0, time.UTC)

// record returns a line of a log file, n seconds after start.
func record(n int, tag, content string) string {
	return fmt.Sprintf("%s stdout %s %s\n", start.Add(time.Duration(n)*time.Second).Format(time.RFC3339Nano), tag, content)
}

func write(t *testing.T, path string, records ...string) {
	t.Helper()
	file, err := os.OpenFile(path, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	_, err = file.WriteString(strings.Join(records, ""))
	if err := errors.Join(err, file.Close()); err != nil {
		t.Fatal(err)
	}
}

func TestReadOnce(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "0.log")
	write(t, path, record(1, "F", "one"), record(2, "P", "t"), record(3, "F", "wo"), record(4, "F", "three"), record(5, "P", "open"))
	for _, test := range []struct {
		name string
		o    Options
		want string
	}{
		{"all", Options{Tail: All}, "one two three open"},
		{"tail", Options{Tail: 2}, "three open"},
		{"tail 0", Options{Tail: 0}, ""},
		{"tail more than there is", Options{Tail: 9}, "one two three open"},
		{"since", Options{Tail: All, Since: start.Add(2 * time.Second)}, "two three open"},
		{"since inside a line", Options{Tail: All, Since: start.Add(3 * time.Second)}, "three open"},
		{"since and tail", Options{Tail: 2, Since: start.Add(5 * time.Second)}, "open"},
	} {
		t.Run(test.name, func(t *testing.T) {
			var got []string
			err := Read(t.Context(), path, test.o, func(r Record) error {
				got = append(got, string(r.Content))
				return nil
			})
			if err != nil || strings.Join(got, " ") != test.want {
				t.Errorf("%q, %v; want %q", got, err, test.want)
			}
		})
	}
}

func TestReadErrors(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	path := filepath.Join(dir, "0.log")
	nothing := func(Record) error { return nil }
	if err := Read(t.Context(), path, Options{Tail: All}, nothing); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("missing file: %v", err)
	}
	if err := Read(t.Context(), dir, Options{Tail: All}, nothing); err == nil {
		t.Error("Read accepted a directory")
	}
	write(t, path, "nonsense\n", record(1, "F", "good"), "more nonsense\n", strings.Repeat("x", 3*maxRecord)+"\n")
	var got []string
	err := Read(t.Context(), path, Options{Tail: All}, func(r Record) error {
		got = append(got, string(r.Content))
		return nil
	})
	if err == nil || !strings.Contains(err.Error(), `3 malformed record(s), the first: log record "nonsense`) || len(err.Error()) > 500 {
		t.Errorf("malformed records: %v", err)
	}
	if !slices.Equal(got, []string{"good"}) {
		t.Errorf("lines %q", got)
	}
	full := errors.New("disk full")
	if err := Read(t.Context(), path, Options{Tail: All}, func(Record) error { return full }); !errors.Is(err, full) {
		t.Errorf("error of emit: %v", err)
	}
}

// follower runs Read in the background and receives its lines.
type follower struct {
	t     *testing.T
	lines chan string
	ended chan struct{}
	done  chan error
}

func follow(t *testing.T, ctx context.Context, path string, tail int) *follower {
	f := &follower{t, make(chan string), make(chan struct{}), make(chan error, 1)}
	go func() {
		f.done <- Read(ctx, path, Options{Tail: tail, Follow: true, Ended: f.ended}, func(r Record) error {
			f.lines <- string(r.Content)
			return nil
		})
		close(f.lines)
	}()
	return f
}

// want waits for the next lines.
func (f *follower) want(lines ...string) {
	f.t.Helper()
	for _, want := range lines {
		if got, ok := <-f.lines; !ok || got != want {
			f.t.Fatalf("line %q (%t), want %q", got, ok, want)
		}
	}
}

// end closes Ended and returns the remaining lines and Read's error.
func (f *follower) end() ([]string, error) {
	close(f.ended)
	var rest []string
	for line := range f.lines {
		rest = append(rest, line)
	}
	return rest, <-f.done
}

func TestFollowWaitsForFileAndLines(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "0.log")
	f := follow(t, t.Context(), path, All) // before the file exists
	write(t, path, record(1, "F", "one"))
	f.want("one")
	whole := record(2, "F", "two")
	write(t, path, whole[:10])
	write(t, path, whole[10:])
	f.want("two")
	write(t, path, record(3, "P", "th"), record(4, "F", "ree"))
	f.want("three")
	write(t, path, record(5, "P", "unfinished"))
	rest, err := f.end()
	if err != nil || !slices.Equal(rest, []string{"unfinished"}) {
		t.Errorf("rest %q, %v", rest, err)
	}
}

func TestFollowTail(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "0.log")
	write(t, path, record(1, "F", "one"), record(2, "F", "two"), record(3, "F", "three"))
	f := follow(t, t.Context(), path, 1)
	f.want("three")
	write(t, path, record(4, "F", "four"), record(5, "F", "five"))
	f.want("four", "five")
	if rest, err := f.end(); err != nil || len(rest) > 0 {
		t.Errorf("rest %q, %v", rest, err)
	}
}

// A rotation as kubelet does it: rename, then the runtime reopens the file. Lines that the writer
// adds to the old file in between come first.
func TestFollowRotation(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "0.log")
	write(t, path, record(1, "F", "one"))
	f := follow(t, t.Context(), path, All)
	f.want("one")
	for i, name := range []string{path + ".20260102-000001", path + ".20260102-000002"} {
		if err := os.Rename(path, name); err != nil {
			t.Fatal(err)
		}
		write(t, name, record(2, "F", fmt.Sprintf("late %d", i)))
		f.want(fmt.Sprintf("late %d", i))
		write(t, path) // reopened and empty: the writer may not use it yet
		write(t, name, record(3, "F", fmt.Sprintf("later %d", i)))
		f.want(fmt.Sprintf("later %d", i))
		write(t, name, record(4, "F", fmt.Sprintf("last %d", i)))
		write(t, path, record(5, "F", fmt.Sprintf("new %d", i)))
		f.want(fmt.Sprintf("last %d", i), fmt.Sprintf("new %d", i))
	}
	if rest, err := f.end(); err != nil || len(rest) > 0 {
		t.Errorf("rest %q, %v", rest, err)
	}
}

func TestFollowRotationInsideALine(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "0.log")
	write(t, path, record(1, "P", "half "))
	f := follow(t, t.Context(), path, All)
	if err := os.Rename(path, path+".1"); err != nil {
		t.Fatal(err)
	}
	write(t, path, record(2, "F", "and half"))
	rest, err := f.end()
	// A follower that opened the file after the rename cannot see the first half.
	if err != nil || len(rest) != 1 || !strings.HasSuffix(rest[0], "and half") {
		t.Errorf("rest %q, %v", rest, err)
	}
}

func TestFollowTruncation(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "0.log")
	long := strings.Repeat("long ", 50)
	write(t, path, record(1, "F", long))
	f := follow(t, t.Context(), path, All)
	f.want(long)
	if err := os.Truncate(path, 0); err != nil {
		t.Fatal(err)
	}
	write(t, path, record(2, "F", "two"))
	if rest, err := f.end(); err != nil || !slices.Equal(rest, []string{"two"}) {
		t.Errorf("rest %q, %v", rest, err)
	}
}

func TestFollowEndsWithContext(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	for _, name := range []string{"there", "missing"} {
		ctx, cancel := context.WithCancel(t.Context())
		path := filepath.Join(dir, name)
		if name == "there" {
			write(t, path, record(1, "F", "one"))
		}
		f := follow(t, ctx, path, All)
		if name == "there" {
			f.want("one")
		}
		cancel()
		if err := <-f.done; !errors.Is(err, context.Canceled) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestFollowOfALogThatNeverCame(t *testing.T) {
	t.Parallel()
	f := follow(t, t.Context(), filepath.Join(t.TempDir(), "0.log"), All)
	if rest, err := f.end(); err != nil || len(rest) > 0 {
		t.Errorf("rest %q, %v", rest, err)
	}
}
