package fill

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"berth/image/blobindex"
	"berth/internal/failpoint"
	"berth/internal/pidfd"
	"berth/internal/testutil"
)

// daemonVar makes the test binary a daemon. Its value: the process that keeps group and ring, their
// numbers there, a directory for the probe, and the directories of the layers, separated by spaces.
const daemonVar = "BERTH_LAZY_DAEMON"

// runDaemon is a daemon that only fills layers. It prints "ready", and "complete" for each layer.
func runDaemon(order string) int {
	fail := func(err error) int { fmt.Fprintln(os.Stderr, "daemon:", err); return 1 }
	fields := strings.Fields(order)
	var numbers [3]int
	for i := range numbers {
		numbers[i], _ = strconv.Atoi(fields[i])
	}
	keeper, err := pidfd.Open(numbers[0])
	if err != nil {
		return fail(err)
	}
	cfg := Config{Dir: fields[3], Retry: time.Millisecond, Sync: time.Millisecond,
		Log: slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelWarn}))}
	if cfg.Group, err = pidfd.GetFile(keeper, numbers[1], "group"); err != nil {
		return fail(err)
	}
	if cfg.Ring, err = pidfd.GetFile(keeper, numbers[2], "ring"); err != nil {
		return fail(err)
	}
	e, err := Open(cfg)
	if err != nil {
		return fail(err)
	}
	var layers []*Layer
	for _, dir := range fields[4:] {
		l, err := addFromDisk(e, dir)
		if err != nil {
			return fail(err)
		}
		layers = append(layers, l)
	}
	fmt.Println("ready")
	e.Start()
	for _, l := range layers {
		<-l.Done()
		if err := l.Err(); err != nil {
			return fail(err)
		}
		fmt.Println("complete")
	}
	select {} // until it is killed
}

// addFromDisk adds a layer whose directory has its blob and index, too.
func addFromDisk(e *Engine, dir string) (*Layer, error) {
	encoded, err := os.ReadFile(filepath.Join(dir, "index"))
	if err != nil {
		return nil, err
	}
	x, err := decodeTestIndex(encoded)
	if err != nil {
		return nil, err
	}
	if x.Record, err = os.ReadFile(filepath.Join(dir, RecordFile)); err != nil {
		return nil, err
	}
	blob, err := os.ReadFile(filepath.Join(dir, "blob"))
	if err != nil {
		return nil, err
	}
	var open atomic.Int64
	return e.Add(dir, x, &fakeSource{blob: blob}, func() (Inflater, error) { return &fakeInflater{open: &open}, nil }, nil)
}

// points are the failpoints at which daemons are killed.
var points = []string{
	"lazy.read-event", "lazy.event-read", "lazy.answer", "lazy.answered", "lazy.fill", "lazy.span-filled",
	"lazy.write-bitmap", "lazy.bitmap-written", "lazy.sync-data", "lazy.data-synced", "lazy.complete", "lazy.unmark",
	"lazy.unmarked", "lazy.mark-incomplete",
}

// relay runs daemons one after the other, each killed at a random point.
type relay struct {
	t         *testing.T
	random    *rand.Rand
	group     *group
	ring      *ring
	root      string // of the layers
	failpoint string // directory
	kills     map[string]int
}

// daemon starts a daemon for layers and returns when it serves, or has been killed.
func (r *relay) daemon(dirs []string, point string, n int) (cmd *exec.Cmd, lines *bufio.Scanner) {
	r.t.Helper()
	armed := filepath.Join(r.failpoint, "armed")
	if err := os.Remove(armed); err != nil && !errors.Is(err, os.ErrNotExist) {
		r.t.Fatal(err)
	}
	if point != "" {
		text := fmt.Sprintf("%s %d kill %s\n", point, n, filepath.Base(os.Args[0]))
		testutil.Must(r.t, os.WriteFile(armed+".new", []byte(text), 0o600))
		testutil.Must(r.t, os.Rename(armed+".new", armed))
	}
	cmd = exec.Command("/proc/self/exe")
	cmd.Args[0] = os.Args[0]
	cmd.Env = append(os.Environ(), "BERTH_FAILPOINTS="+r.failpoint, fmt.Sprintf("%s=%d %d %d %s %s", daemonVar, os.Getpid(),
		r.group.file.Fd(), r.ring.file.Fd(), r.root, strings.Join(dirs, " ")))
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	testutil.Must(r.t, err)
	testutil.Must(r.t, cmd.Start())
	return cmd, bufio.NewScanner(out)
}

// kill waits until the failpoint has killed the daemon, or kills it: after a while or once its
// layers are complete.
func (r *relay) kill(cmd *exec.Cmd, lines *bufio.Scanner, point string, layers int, after time.Duration) (complete bool) {
	r.t.Helper()
	timer := time.AfterFunc(after, func() { _ = cmd.Process.Kill() })
	defer timer.Stop()
	n := 0
	for lines.Scan() {
		if lines.Text() == "complete" {
			if n++; n == layers {
				_ = cmd.Process.Kill()
			}
		}
	}
	err := cmd.Wait()
	var exit *exec.ExitError
	if !errors.As(err, &exit) || exit.Sys().(syscallStatus).Signal() != unix.SIGKILL {
		r.t.Fatalf("daemon ended: %v", err)
	}
	r.kills[point]++
	return n == layers
}

type syscallStatus interface{ Signal() unix.Signal }

// readAll reads all files of a layer in random order, in one of the ways to read.
func readAll(l *testLayer, root string, random *rand.Rand) error {
	ways := []func(string) ([]byte, error){os.ReadFile, readMap, readSplice, readSendfile, readParts(random)}
	read := ways[random.IntN(len(ways))]
	names := make([]string, 0, len(l.files))
	for name := range l.files {
		names = append(names, name)
	}
	slices.Sort(names)
	random.Shuffle(len(names), func(i, j int) { names[i], names[j] = names[j], names[i] })
	for _, name := range names {
		got, err := read(filepath.Join(root, name))
		if err != nil {
			return err
		}
		if want := l.files[name]; !bytes.Equal(got, want) {
			at := 0
			for at < min(len(got), len(want)) && got[at] == want[at] {
				at++
			}
			return fmt.Errorf("%s: wrong byte at %d of %d, read %d", name, at, len(want), len(got))
		}
	}
	return nil
}

// readParts reads a file in small parts.
func readParts(random *rand.Rand) func(string) ([]byte, error) {
	size := 1 + random.IntN(20_000)
	return func(path string) ([]byte, error) {
		f, err := os.Open(path)
		if err != nil {
			return nil, err
		}
		defer f.Close()
		var all []byte
		buf := make([]byte, size)
		for {
			n, err := f.Read(buf)
			all = append(all, buf[:n]...)
			if errors.Is(err, io.EOF) {
				return all, nil
			}
			if err != nil {
				return nil, err
			}
		}
	}
}

// Daemons are killed at random points while readers compare every byte. The test is the process
// that keeps the group and the ring, as a monitor does.
func TestTakeover(t *testing.T) {
	needKernel(t)
	kills := 20
	if testutil.AllTests() {
		kills = 300
	}
	seed := uint64(time.Now().UnixNano())
	t.Log("seed", seed)
	r := &relay{t: t, random: rand.New(rand.NewPCG(seed, 0)), failpoint: t.TempDir(), kills: map[string]int{}}
	var err error
	r.group, err = newGroup()
	testutil.Must(t, err)
	defer r.group.file.Close()
	r.ring, err = newRing()
	testutil.Must(t, err)
	defer func() { testutil.Must(t, r.ring.close()) }()
	r.root = testutil.DiskDir(t)
	done := 0
	for round := 0; done < kills; round++ {
		var rows []*testLayer
		var dirs []string
		for i := range 2 {
			l := makeLayer(t, uint64(round*2+i), 60, blobindex.Gzip)
			dir := l.write(t, filepath.Join(r.root, fmt.Sprintf("layer%d-%d", round, i)))
			testutil.Must(t, os.WriteFile(filepath.Join(dir, "blob"), l.blob, 0o600))
			testutil.Must(t, os.WriteFile(filepath.Join(dir, "index"), encodeTestIndex(l.x), 0o600))
			rows, dirs = append(rows, l), append(dirs, dir)
		}
		done += r.round(rows, dirs)
		for _, dir := range dirs {
			testutil.Must(t, os.RemoveAll(dir))
		}
	}
	t.Logf("%d daemons were killed: %v", done, r.kills)
}

// round lets daemons fill two layers until they are complete. It returns how many were killed.
func (r *relay) round(layers []*testLayer, dirs []string) (kills int) {
	t := r.t
	cmd, lines := r.daemon(dirs, "", 0)
	if !lines.Scan() || lines.Text() != "ready" {
		t.Fatalf("the daemon says %q: %v", lines.Text(), cmd.Wait())
	}
	// This daemon may fill everything before a reader comes, so it is killed at once.
	var readers errgroup.Group
	for i, l := range layers {
		root, err := writeImage(t, dirs[i]).Open()
		testutil.Must(t, err)
		defer func() { testutil.Must(t, root.Close()) }()
		for range 6 {
			random := rand.New(rand.NewPCG(r.random.Uint64(), 0))
			readers.Go(func() error { return readAll(l, selfFD(root), random) })
		}
	}
	ended := make(chan error, 1)
	go func() { ended <- readers.Wait() }()
	complete := r.kill(cmd, lines, "early", len(layers), time.Duration(r.random.IntN(20))*time.Millisecond)
	kills++
	for !complete {
		point, after := points[r.random.IntN(len(points))], time.Minute
		if !failpoint.Enabled {
			point, after = "", time.Duration(r.random.IntN(300))*time.Millisecond
		}
		cmd, lines = r.daemon(dirs, point, 1+r.random.IntN(6))
		complete = r.kill(cmd, lines, point, len(layers), after)
		kills++
	}
	// Events that were raised before the mark was removed may still wait. For the last daemon the
	// layers are no longer lazy.
	cmd, lines = r.daemon(nil, "", 0)
	defer func() { _ = cmd.Process.Kill(); r.kill(cmd, lines, "last", 0, 0) }()
	select {
	case err := <-ended:
		testutil.Must(t, err)
	case <-time.After(time.Minute):
		pending, _ := r.ring.pending()
		t.Fatalf("readers are stuck; events in the ring: %+v", pending)
	}
	return kills
}

// An Engine continues events of an earlier one in the same process. The number of one of them is in
// use by something else, so it is answered before any new event is read.
func TestTakeoverWithOccupiedNumber(t *testing.T) {
	for _, known := range []bool{true, false} {
		t.Run(fmt.Sprintf("inode known %v", known), func(t *testing.T) {
			w := newWorld(t, 40, nil)
			root := mounted(t, w.dir)
			w.e.Start()
			var name string
			for name = range w.layer.files {
				if len(w.layer.files[name]) > 0 {
					break
				}
			}
			var readers errgroup.Group
			for range 3 {
				readers.Go(func() error { return w.layer.check(root, os.ReadFile) })
			}
			testutil.Eventually(t, "readers wait", func() bool { return w.e.Stats().Waiting > 0 })
			cfg := w.e.cfg
			cfg.Group, cfg.Ring = duplicate(t, w.e.group.file), duplicate(t, w.e.ring.file)
			testutil.Must(t, w.e.Close())

			r, err := mapRing(duplicate(t, cfg.Ring))
			testutil.Must(t, err)
			list, _ := r.pending()
			if len(list) == 0 {
				t.Fatal("no event is pending")
			}
			var thief *os.File
			for _, p := range list {
				if !known {
					r.setInode(p.slot, 0)
				}
				if thief == nil {
					testutil.Must(t, unix.Dup3(int(cfg.Ring.Fd()), int(p.fd), unix.O_CLOEXEC))
					thief = os.NewFile(uintptr(p.fd), "thief")
				}
			}
			testutil.Must(t, r.close())
			w.e, err = Open(cfg)
			testutil.Must(t, err)
			if !w.e.TookOver() {
				t.Error("it did not take over")
			}
			w.l, err = w.e.Add(w.dir, w.layer.x, w.source, func() (Inflater, error) { return w.inflate() }, nil)
			testutil.Must(t, err)
			w.e.Start()
			readers.Go(func() error { return w.layer.check(root, os.ReadFile) })
			testutil.Eventually(t, "the inherited events wait", func() bool { return w.e.Stats().Waiting == len(list) })
			testutil.Must(t, thief.Close()) // nothing keeps the number occupied now
			w.open()
			testutil.Must(t, readers.Wait())
			w.wait(t)
			testutil.Must(t, w.l.Err())
		})
	}
}

func duplicate(t *testing.T, f *os.File) *os.File {
	t.Helper()
	fd, err := unix.FcntlInt(f.Fd(), unix.F_DUPFD_CLOEXEC, 0)
	testutil.Must(t, err)
	return os.NewFile(uintptr(fd), f.Name())
}

// An answer that an Engine may have given is given again. A second answer does no harm.
func TestRepeatedAnswer(t *testing.T) {
	for _, given := range []bool{false, true} {
		t.Run(fmt.Sprintf("given %v", given), func(t *testing.T) {
			w := newWorld(t, 40, nil)
			root := mounted(t, w.dir)
			w.e.Start()
			var reader errgroup.Group
			reader.Go(func() error { return w.layer.check(root, os.ReadFile) })
			testutil.Eventually(t, "the reader waits", func() bool { return w.e.Stats().Waiting == 1 })
			cfg := w.e.cfg
			cfg.Group, cfg.Ring = duplicate(t, w.e.group.file), duplicate(t, w.e.ring.file)
			testutil.Must(t, w.e.Close())
			r, err := mapRing(duplicate(t, cfg.Ring))
			testutil.Must(t, err)
			list, _ := r.pending()
			g, err := openGroup(duplicate(t, cfg.Group))
			testutil.Must(t, err)
			for _, p := range list { // the answer is EIO, so that the reader shows that it came
				r.begin(p.slot, denyEIO)
				if given {
					testutil.Must(t, g.respond(p.fd, denyEIO))
				}
			}
			testutil.Must(t, r.close())
			testutil.Must(t, g.file.Close())
			w.e, err = Open(cfg)
			testutil.Must(t, err)
			if list, free := w.e.ring.pending(); len(list) > 0 || len(free) != ringSlots {
				t.Errorf("pending %+v, %d free slots", list, len(free))
			}
			w.e.Start() // the kernel reads again on its own: an unknown layer now
			if err := reader.Wait(); len(list) != 1 || !errors.Is(err, unix.EIO) {
				t.Errorf("%d events, reader: %v", len(list), err)
			}
		})
	}
}

// If nobody keeps the group, the next Engine says so.
func TestNobodyKeepsTheGroup(t *testing.T) {
	w := newWorld(t, 40, nil)
	root := mounted(t, w.dir)
	w.e.Start()
	testutil.Must(t, w.e.Close())
	var name string
	for name = range w.layer.files {
		if len(w.layer.files[name]) > 0 {
			break
		}
	}
	got, err := os.ReadFile(filepath.Join(root, name)) // this is what the rules of the package prevent
	if err != nil || bytes.Equal(got, w.layer.files[name]) {
		t.Errorf("without a group: %d bytes, %v", len(got), err)
	}
	cfg := w.e.cfg
	cfg.Group, cfg.Ring = nil, nil
	w.e, err = Open(cfg)
	testutil.Must(t, err)
	if w.e.TookOver() {
		t.Error("it has taken over a group that is gone")
	}
	w.l, err = w.e.Add(w.dir, w.layer.x, w.source, func() (Inflater, error) { return w.inflate() }, nil)
	testutil.Must(t, err)
	w.open()
	w.e.Start()
	testutil.Must(t, w.layer.check(mounted(t, w.dir), os.ReadFile)) // a new mount is right
}

// Files that are no group or no ring are refused, and closed.
func TestTakeoverRefusesOtherFiles(t *testing.T) {
	w := newWorld(t, 1, nil)
	null := func() *os.File {
		f, err := os.Open("/dev/null")
		testutil.Must(t, err)
		return f
	}
	for name, files := range map[string][2]*os.File{
		"group": {null(), duplicate(t, w.e.ring.file)},
		"ring":  {duplicate(t, w.e.group.file), null()},
	} {
		cfg := w.e.cfg
		cfg.Group, cfg.Ring = files[0], files[1]
		if _, err := Open(cfg); err == nil {
			t.Errorf("%s: opened", name)
		}
		for _, f := range files {
			if err := f.Close(); !errors.Is(err, os.ErrClosed) {
				t.Errorf("%s: %s is open: %v", name, f.Name(), err)
			}
		}
	}
}
