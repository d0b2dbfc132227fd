package journal

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/internal/testutil"
)

var discard = slog.New(slog.DiscardHandler)

const (
	created = runtimeapi.ContainerEventType_CONTAINER_CREATED_EVENT
	stopped = runtimeapi.ContainerEventType_CONTAINER_STOPPED_EVENT
	deleted = runtimeapi.ContainerEventType_CONTAINER_DELETED_EVENT
)

func testEvent(id string, kind runtimeapi.ContainerEventType) *runtimeapi.ContainerEventResponse {
	return &runtimeapi.ContainerEventResponse{
		ContainerId: id, ContainerEventType: kind, CreatedAt: 7,
		PodSandboxStatus:   &runtimeapi.PodSandboxStatus{Id: "p", Metadata: &runtimeapi.PodSandboxMetadata{Uid: "u"}},
		ContainersStatuses: []*runtimeapi.ContainerStatus{{Id: id, Message: strings.Repeat("x", 100)}},
	}
}

func appendAll(t *testing.T, j *Journal, ids ...string) {
	t.Helper()
	for _, id := range ids {
		testutil.Must(t, j.Append(testEvent(id, stopped)))
	}
}

// following returns the IDs of the events after number n that exist now, and the error after them.
func following(t *testing.T, j *Journal, n uint64) (ids string, err error) {
	t.Helper()
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	for reader := j.Follow(n); ; {
		number, data, err := reader.Next(ended)
		if err != nil {
			if errors.Is(err, context.Canceled) {
				err = nil
			}
			return ids, err
		}
		event := &runtimeapi.ContainerEventResponse{}
		testutil.Must(t, proto.Unmarshal(data, event))
		if !proto.Equal(event, testEvent(event.ContainerId, event.ContainerEventType)) {
			t.Errorf("event %d is %v", number, event)
		}
		ids += fmt.Sprintf("%s%d ", event.ContainerId, number)
	}
}

func wantFollowing(t *testing.T, j *Journal, n uint64, want string, wantErr error) {
	t.Helper()
	if ids, err := following(t, j, n); ids != want || !errors.Is(err, wantErr) {
		t.Errorf("after %d: %q, %v; want %q, %v", n, ids, err, want, wantErr)
	}
}

// A later daemon continues the numbers, and its clients get what they have not got.
func TestJournalOutlivesDaemon(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	j := Open(dir, 0, discard)
	appendAll(t, j, "a", "b")
	// It begins with 2, because no client can have seen an earlier event.
	wantFollowing(t, j, 0, "", ErrBehind)
	wantFollowing(t, j, 1, "a2 b3 ", nil)
	testutil.Must(t, j.Close())
	j = Open(dir, 3, discard)
	defer j.Close()
	appendAll(t, j, "c")
	wantFollowing(t, j, 1, "a2 b3 c4 ", nil)
	wantFollowing(t, j, 3, "c4 ", nil)
	wantFollowing(t, j, 4, "", nil)
}

// A reader that waits gets an event when it is appended.
func TestNextWaits(t *testing.T) {
	t.Parallel()
	j := Open(t.TempDir(), 0, discard)
	defer j.Close()
	reader, got := j.Follow(j.Last()), make(chan error, 1)
	go func() {
		_, _, err := reader.Next(t.Context())
		got <- err
	}()
	appendAll(t, j, "a")
	testutil.Must(t, <-got)
}

// What a new daemon makes of the file of the previous one.
func TestOpen(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		spoil   func(content []byte) []byte
		highest uint64
		told    string
		after   uint64
		want    string // after an event of "c"
		wantErr error
	}{
		"unchanged":            {spoil: bytes.Clone, told: "a", after: 2, want: "b3 b4 c5 "},
		"a torn event":         {spoil: func(c []byte) []byte { return append(c, 1, 2, 3) }, told: "a", after: 4, want: "c5 "},
		"the last event torn":  {spoil: func(c []byte) []byte { return c[:len(c)-1] }, told: "a b", after: 3, want: "c4 "},
		"a client has got it":  {spoil: func(c []byte) []byte { return c[:len(c)-1] }, highest: 4, told: "a b", after: 4, wantErr: ErrBehind},
		"damaged":              {spoil: func(c []byte) []byte { c[headerSize+40] ^= 1; return c }, highest: 4, after: 4, wantErr: ErrBehind},
		"no header":            {spoil: func(c []byte) []byte { return c[1:] }, highest: 4, after: 4, wantErr: ErrBehind},
		"lost":                 {spoil: func([]byte) []byte { return nil }, highest: 4, after: 4, wantErr: ErrBehind},
		"of a new client":      {spoil: func([]byte) []byte { return nil }, highest: 4, after: 5, want: "c6 "},
		"the first number 1":   {spoil: func([]byte) []byte { return header(1) }, after: 1, want: "c2 "},
		"an impossible number": {spoil: func([]byte) []byte { return header(1 << 63) }, after: 1, want: "c2 "},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			dir := t.TempDir()
			j := Open(dir, 0, discard)
			appendAll(t, j, "a", "b")
			testutil.Must(t, j.Append(testEvent("b", deleted)))
			testutil.Must(t, j.Close())
			path := filepath.Join(dir, "journal")
			content, err := os.ReadFile(path)
			testutil.Must(t, err)
			testutil.Must(t, os.WriteFile(path, test.spoil(content), 0o600))
			j = Open(dir, test.highest, discard)
			defer j.Close()
			for _, id := range strings.Fields(test.told) {
				if event := j.Told()[id]; event.GetPodSandboxStatus().GetMetadata().GetUid() != "u" || event.ContainerEventType != stopped {
					t.Errorf("told of %s: %v", id, event)
				}
			}
			if len(j.Told()) != len(strings.Fields(test.told)) {
				t.Errorf("told %v, want %s", j.Told(), test.told)
			}
			wantFollowing(t, j, 0, "", ErrBehind) // the position in an incomplete file
			appendAll(t, j, "c")
			wantFollowing(t, j, test.after, test.want, test.wantErr)
		})
	}
}

// The file stays small. A slow reader learns that events are gone, and the last event of an
// existing object is kept for the next daemon.
func TestJournalIsBounded(t *testing.T) {
	t.Parallel()
	const limit = 4096
	dir := t.TempDir()
	j := open(dir, 0, limit, discard)
	testutil.Must(t, j.Append(testEvent("old", created)))
	slow, fast := j.Follow(1), j.Follow(1)
	for n := range 200 {
		testutil.Must(t, j.Append(testEvent(fmt.Sprint(n), stopped)))
		testutil.Must(t, j.Append(testEvent(fmt.Sprint(n), deleted)))
		for range 2 {
			_, _, err := fast.Next(t.Context())
			testutil.Must(t, err)
		}
	}
	info, err := os.Stat(filepath.Join(dir, "journal"))
	testutil.Must(t, err)
	if info.Size() > limit {
		t.Errorf("%d bytes, want at most %d", info.Size(), limit)
	}
	if _, _, err := slow.Next(t.Context()); !errors.Is(err, ErrBehind) {
		t.Errorf("the slow reader got %v", err)
	}
	testutil.Must(t, j.Close())
	j = open(dir, j.Last(), limit, discard)
	defer j.Close()
	if told := j.Told(); len(told) != 1 || told["old"].GetContainerEventType() != created {
		t.Errorf("told %v", told)
	}
}

// Without a usable directory events continue in memory.
func TestJournalWithoutDirectory(t *testing.T) {
	t.Parallel()
	dir := filepath.Join(t.TempDir(), "missing")
	j := Open(dir, 0, discard)
	defer j.Close()
	appendAll(t, j, "a", "b")
	wantFollowing(t, j, 1, "a2 b3 ", nil)
}

// While the file cannot be written, no event is lost. Later it is a file again, with all events.
func TestJournalMovesToMemory(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	j := Open(dir, 0, discard)
	defer j.Close()
	appendAll(t, j, "a")
	v := *j.view.Load()
	readOnly, err := os.Open(j.path)
	testutil.Must(t, err)
	testutil.Must(t, v.file.Close())
	v.file = readOnly
	j.view.Store(&v)
	testutil.Must(t, os.MkdirAll(j.path+".tmp/obstacle", 0o700)) // no file can be created
	appendAll(t, j, "b", "c")
	wantFollowing(t, j, 1, "a2 b3 c4 ", nil)
	if _, err := os.Stat(j.path); err == nil {
		t.Error("the file without the last events is still there")
	}
	testutil.Must(t, os.RemoveAll(j.path+".tmp"))
	appendAll(t, j, "d")
	wantFollowing(t, j, 1, "a2 b3 c4 d5 ", nil)
	next := Open(dir, 5, discard)
	defer next.Close()
	wantFollowing(t, next, 1, "a2 b3 c4 d5 ", nil)
}

// A file that could not be placed leaves nothing behind.
func TestCreateLeavesNoDraft(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	path := filepath.Join(dir, "journal")
	testutil.Must(t, os.Mkdir(path, 0o700)) // no file can replace it
	if _, err := create(path, header(2)); err == nil {
		t.Error("no error")
	}
	if files, err := os.ReadDir(dir); err != nil || len(files) > 0 {
		t.Errorf("left behind: %v, %v", files, err)
	}
}

func TestCursors(t *testing.T) {
	t.Parallel()
	self, err := ProcessOf(os.Getpid())
	testutil.Must(t, err)
	for name, test := range map[string]struct {
		files map[string]string // below the directory
		want  uint64            // position of this process's next stream, which else begins at 9
	}{
		"unknown client":         {want: 9},
		"known client":           {files: map[string]string{fmt.Sprintf("%d-%d-3", self.PID, self.StartTime): "\x05\x00\x00\x00\x00\x00\x00\x00"}, want: 5},
		"the oldest of two":      {files: map[string]string{fmt.Sprintf("%d-%d-3", self.PID, self.StartTime): "\x05\x00\x00\x00\x00\x00\x00\x00", fmt.Sprintf("%d-%d-4", self.PID, self.StartTime): "\x04\x00\x00\x00\x00\x00\x00\x00"}, want: 4},
		"another start time":     {files: map[string]string{fmt.Sprintf("%d-%d-3", self.PID, self.StartTime+1): "\x05\x00\x00\x00\x00\x00\x00\x00"}, want: 9},
		"another process":        {files: map[string]string{"1-1-1": "\x05\x00\x00\x00\x00\x00\x00\x00"}, want: 9},
		"incomplete":             {files: map[string]string{fmt.Sprintf("%d-%d-3", self.PID, self.StartTime): "\x05"}, want: 0},
		"empty":                  {files: map[string]string{fmt.Sprintf("%d-%d-3", self.PID, self.StartTime): ""}, want: 0},
		"a file of another kind": {files: map[string]string{"README": "x"}, want: 9},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			dir := t.TempDir()
			for name, content := range test.files {
				testutil.Must(t, os.WriteFile(filepath.Join(dir, name), []byte(content), 0o600))
			}
			cursors, _ := OpenCursors(dir, discard)
			cursor := cursors.Take(self, 9)
			defer cursor.Close()
			if got := cursor.Position(); got != test.want {
				t.Errorf("position %d, want %d", got, test.want)
			}
			if next := cursors.Take(self, 9); next.path == cursor.path {
				t.Error("two streams have the same file")
			} else {
				next.Remove()
			}
			cursor.Set(20)
			cursor.Set(19) // late
			if _, highest := OpenCursors(dir, discard); highest != 20 {
				t.Errorf("the next daemon finds %d", highest)
			}
			cursor.Remove()
			if files, err := filepath.Glob(filepath.Join(dir, fmt.Sprintf("%d-*-3", self.PID))); err != nil || len(files) > 0 {
				t.Errorf("files of clients that are gone: %v, %v", files, err)
			}
		})
	}
}

// FuzzParse checks that the undamaged part of any file is what its entries encode to.
func FuzzParse(f *testing.F) {
	entry, err := newEntry(3, testEvent("a", stopped))
	testutil.Must(f, err)
	next, err := newEntry(4, testEvent("a", deleted))
	testutil.Must(f, err)
	file := append(append(header(3), entry...), next...)
	for _, seed := range [][]byte{nil, file, file[:len(file)-1], header(4), append(header(4), entry...), append(header(2), next...)} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		found := parse(data)
		if found.size == 0 {
			return
		}
		again := header(found.first)
		for _, e := range found.entries {
			again = append(again, pack(e.number(), e.short(), e.event()[len(e.short()):])...)
		}
		if !bytes.Equal(again, data[:found.size]) {
			t.Errorf("%x is read as %x", data[:found.size], again)
		}
		lastOfEach(found.entries)
	})
}

// BenchmarkAppend is the cost of an event of a pod with one container.
func BenchmarkAppend(b *testing.B) {
	j := Open(b.TempDir(), 0, discard)
	defer j.Close()
	event := testEvent("a", stopped)
	event.CreatedAt = time.Now().UnixNano()
	for b.Loop() {
		testutil.Must(b, j.Append(event))
	}
}
