package endurance

import (
	"bufio"
	"fmt"
	"math/rand/v2"
	"os"
	"strings"
	"testing"

	"berth/integration/harness"
)

// A container writes numbered lines at full speed while the daemon is killed and the log is
// rotated. The log has every line once and in order.
func TestLogThroughKillsAndRotations(t *testing.T) {
	lines, kills, rotations := 100_000, 4, 10
	if harness.Thorough() {
		lines, kills, rotations = 1_000_000, 20, 50
	}
	d := harness.StartDaemon(t)
	pod := d.RunPod(t, harness.HostNetwork)
	c := pod.Run(t, harness.Script("i=0; while [ ! -e /tmp/enough ]; do seq $((i+1)) $((i+1000)); i=$((i+1000)); done; echo $i lines"))
	log := &rotatedLog{c: c}
	for i, kill := range shuffled(kills, rotations) {
		if kill {
			d.Kill(t)
			d.Start(t)
		} else {
			log.rotate(t)
		}
		log.waitSize(t, int64(i+1)*int64(lines)*lineBytes/int64(kills+rotations))
	}
	c.Release(t, "/tmp/enough")
	harness.Equal(t, "exit code", c.WaitExited(t).ExitCode, 0)
	written := log.check(t)
	if written < lines {
		t.Errorf("the container wrote %d lines, which is less than %d", written, lines)
	}
	t.Logf("%d lines, %d kills, %d rotations", written, kills, rotations)
	pod.Remove(t)
}

// shuffled returns yes true values and no false values, in random order.
func shuffled(yes, no int) []bool {
	all := make([]bool, yes+no)
	for i := range yes {
		all[i] = true
	}
	rand.Shuffle(len(all), func(i, j int) { all[i], all[j] = all[j], all[i] })
	return all
}

// lineBytes is the size of a numbered line in a log: time, stream, tag and number.
const lineBytes = 50

// rotatedLog is a container's log in several files. All but the last have been renamed, as by
// kubelet.
type rotatedLog struct {
	c    *harness.Container
	old  []string
	size int64 // of the renamed files
}

// rotate renames the log and calls ReopenContainerLog, as kubelet does.
func (l *rotatedLog) rotate(t *testing.T) {
	t.Helper()
	name := fmt.Sprintf("%s.%d", l.c.LogPath(), len(l.old))
	harness.Must(t, os.Rename(l.c.LogPath(), name))
	harness.Must(t, l.c.Pod.D.Cri.ReopenContainerLog(t.Context(), l.c.Id))
	l.old = append(l.old, name)
	l.size += sizeOf(name)
}

func (l *rotatedLog) waitSize(t *testing.T, want int64) {
	t.Helper()
	harness.EventuallyGot(t, fmt.Sprintf("%d bytes of log", want), func() (bool, any) {
		have := l.size + sizeOf(l.c.LogPath())
		return have >= want, have
	})
}

func sizeOf(path string) int64 {
	info, err := os.Stat(path)
	if err != nil {
		return 0
	}
	return info.Size()
}

// check reads all files and returns the number of lines. It expects that number in the last line.
func (l *rotatedLog) check(t *testing.T) int {
	t.Helper()
	next, end := 1, ""
	for _, path := range append(l.old, l.c.LogPath()) {
		file := harness.Get(os.Open(path))(t)
		for scanner := bufio.NewScanner(file); scanner.Scan(); {
			_, text, _ := strings.Cut(scanner.Text(), " F ")
			if end != "" {
				t.Fatalf("%s: after the last line comes %q", path, scanner.Text())
			}
			if text != fmt.Sprint(next) {
				if end = text; !strings.HasSuffix(end, " lines") {
					t.Fatalf("%s: line %d is %q", path, next, scanner.Text())
				}
				continue
			}
			next++
		}
		harness.Must(t, file.Close())
	}
	harness.Equal(t, "last line", end, fmt.Sprintf("%d lines", next-1))
	return next - 1
}
