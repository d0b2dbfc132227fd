package harness

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"berth/integration/machine"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
)

// State is what exists, by kind.
type State = snapshot

// FullState takes all that there is of a daemon's pods, containers and images, on the machine and
// in its lists: processes, mounts, namespaces, cgroups, addresses, files and what they
// contain. What has to differ between two runs of the same requests is made equal: IDs, addresses, times.
// The daemon's own descriptors and goroutines are not part of it.
func (d *Daemon) FullState(t *testing.T) State {
	t.Helper()
	s := snapshot{}
	for kind, names := range MachineSnapshot(d) {
		for name, n := range names {
			for range n {
				s.add(kind, alike(name))
			}
		}
	}
	for _, m := range machine.Mountpoints(t, d.Cmd.Process.Pid) {
		s.add("mount of the daemon", alike(m))
	}
	addFiles(s, "below root", d.Root)
	addFiles(s, "below state", d.State)
	addFiles(s, "of logs", d.LogDir)
	d.addLists(t, s)
	return s
}

// Settled waits until nothing changes any more and the launchers are there, and returns the state.
func (d *Daemon) Settled(t *testing.T) State {
	t.Helper()
	d.WaitIdle(t)
	last := d.FullState(t)
	Eventually(t, "the state stays the same", func() error {
		time.Sleep(30 * time.Millisecond) // between the two looks
		now := d.FullState(t)
		diff := now.Differences(last)
		if last = now; len(diff) > 0 {
			return fmt.Errorf("%s", strings.Join(Summary(diff), "\n  "))
		}
		return nil
	})
	return last
}

// Becomes waits for the state to be the wanted one, and returns what differs if it does not get there.
func (d *Daemon) Becomes(t *testing.T, want State) (differences []string) {
	t.Helper()
	_ = PollUpTo(leakPatience, 100*time.Millisecond, func() error {
		if differences = d.FullState(t).Differences(want); len(differences) > 0 {
			return fmt.Errorf("there are %d differences", len(differences))
		}
		return nil
	})
	return differences
}

// Differences names what there is more or less of than in want.
func (s snapshot) Differences(want State) []string {
	var out []string
	for _, line := range s.Grown(want) {
		out = append(out, "too much: "+line)
	}
	for _, line := range want.Grown(s) {
		out = append(out, "missing: "+line)
	}
	return out
}

var deviceName = regexp.MustCompile(`veth[0-9a-f]{8}`)

// alike makes names equal that differ in IDs, addresses and numbers.
func alike(name string) string {
	return idPattern.ReplaceAllString(deviceName.ReplaceAllString(name, "veth#"), "#")
}

// addFiles adds the files of a tree, each with its type, mode, owner and, where that is the same in every
// run, its content.
func addFiles(s snapshot, where, root string) {
	_ = filepath.WalkDir(root, func(path string, entry fs.DirEntry, err error) error {
		if err != nil {
			return nil // gone meanwhile: there will be another look
		}
		info, err := entry.Info()
		if err != nil {
			return nil
		}
		stat := info.Sys().(*syscall.Stat_t)
		below := strings.TrimPrefix(path, root)
		s.add("file "+where, strings.TrimSpace(fmt.Sprintf("%s %v %d:%d %s", alike(below), info.Mode(), stat.Uid, stat.Gid, contentOf(path, below, info))))
		return nil
	})
}

// Files below a daemon's root whose content tells more than their name.
var (
	exactContent = regexp.MustCompile(`^/(images/(layers|joins|empty-[a-z]+)|bin|rootfs)/`)
	alikeContent = regexp.MustCompile(`^/sandboxes/`)
)

func contentOf(path, below string, info fs.FileInfo) string {
	switch {
	case info.Mode().Type() == fs.ModeSymlink:
		target, err := os.Readlink(path)
		return fmt.Sprint("to ", target, err)
	case !info.Mode().IsRegular():
		return ""
	case exactContent.MatchString(below):
		return sums.of(path, info)
	case alikeContent.MatchString(below):
		content, err := os.ReadFile(path)
		if err != nil {
			return err.Error()
		}
		return fmt.Sprintf("%q", alike(string(content)))
	}
	return ""
}

// sums remembers the content of files that have not changed since.
var sums = contentSums{known: map[string]string{}}

type contentSums struct {
	mu    sync.Mutex // guards known
	known map[string]string
}

func (c *contentSums) of(path string, info fs.FileInfo) string {
	stat := info.Sys().(*syscall.Stat_t)
	key := fmt.Sprintf("%d %d %d %v", stat.Dev, stat.Ino, stat.Size, stat.Ctim)
	c.mu.Lock()
	defer c.mu.Unlock()
	if sum := c.known[key]; sum != "" {
		return sum
	}
	content, err := os.ReadFile(path)
	if err != nil {
		return err.Error()
	}
	sum := sha256.Sum256(content)
	c.known[key] = hex.EncodeToString(sum[:8])
	return c.known[key]
}

// addLists adds what the daemon tells of each of its objects.
func (d *Daemon) addLists(t *testing.T, s snapshot) {
	t.Helper()
	ctx := context.Background() // of a test that has ended, too
	pods, err := d.Cri.ListPodSandbox(ctx, nil)
	Must(t, err)
	for _, p := range pods {
		s.add("listed pod", told(t, p))
		if status, err := d.Cri.PodSandboxStatus(ctx, p.Id, false); err == nil { // else it is gone by now
			s.add("status of pod", told(t, status.Status))
		}
	}
	containers, err := d.Cri.ListContainers(ctx, nil)
	Must(t, err)
	for _, c := range containers {
		s.add("listed container", told(t, c))
		if status, err := d.Cri.ContainerStatus(ctx, c.Id, false); err == nil {
			s.add("status of container", told(t, status.Status))
		}
	}
	images, err := d.Images.ListImages(ctx, nil)
	Must(t, err)
	for _, i := range images {
		s.add("listed image", told(t, i))
	}
	usage, err := d.Images.ImageFsInfo(ctx)
	Must(t, err)
	for _, u := range usage.ImageFilesystems {
		s.add("usage of images", told(t, u))
	}
}

// What differs in messages about the same object.
var differs = []struct {
	pattern *regexp.Regexp
	with    string
}{
	{regexp.MustCompile(`(^|[^:])[0-9a-f]{64}`), "$1#"},            // IDs of pods and containers, not digests
	{regexp.MustCompile(`"\d{19}"`), `"T"`},                        // times in nanoseconds
	{regexp.MustCompile(`,"(attempt|podSandboxAttempt)":\d+`), ""}, // of who tried again
	{regexp.MustCompile(`\b\d{1,3}\.\d{1,3}\.\d{1,3}\.\d{1,3}\b`), "IP"},
	{regexp.MustCompile(`/\d+\.log`), "/#.log"},
}

// told is a message without what differs from run to run.
func told(t *testing.T, m proto.Message) string {
	t.Helper()
	data, err := protojson.Marshal(m)
	Must(t, err)
	var compact bytes.Buffer // protojson puts blanks where it likes
	Must(t, json.Compact(&compact, data))
	text := compact.String()
	for _, d := range differs {
		text = d.pattern.ReplaceAllString(text, d.with)
	}
	return text
}
