package harness

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"berth/integration/machine"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
)

// State is what exists, by kind.
type State = snapshot

// FullState takes all that there is of a daemon's pods, containers and images, on the machine and
// in its lists: processes, mounts with their options, namespaces, devices, the packet filter's rules, cgroups with their limits,
// addresses, files with all that can be seen of them, records, logs, the daemon's descriptors. What has to differ
// between two runs of the same requests is made equal: IDs, addresses, times. The daemon's goroutines are
// not part of it.
func (d *Daemon) FullState(t *testing.T) State {
	t.Helper()
	Registry.DropIdle()
	s := snapshot{}
	outside := MachineSnapshot(d)
	for kind, names := range outside {
		for name, n := range names {
			for range n {
				s.add(kind, alike(name))
			}
		}
	}
	pid := d.Cmd.Process.Pid
	for _, m := range machine.Mountpoints(t, pid) {
		s.add("mount of the daemon", alike(m))
	}
	addMountOptions(s, "of mount", 1)
	addMountOptions(s, "of mount of the daemon", pid)
	addLimits(s, slices.Collect(maps.Keys(outside["cgroup"])))
	addAllRules(s)
	addDescriptors(s, pid)
	addFiles(s, "below root", d.Root, rootPlaces)
	addFiles(s, "below state", d.State, statePlaces)
	addFiles(s, "of logs", d.LogDir, logPlaces)
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
	return d.BecomesWithin(t, want, leakPatience)
}

// BecomesWithin is Becomes with another limit.
func (d *Daemon) BecomesWithin(t *testing.T, want State, limit time.Duration) (differences []string) {
	t.Helper()
	_ = PollUpTo(limit, 100*time.Millisecond, func() error {
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
	{regexp.MustCompile(`(^|[^:]|[^6]:)[0-9a-f]{64}`), "$1#"},      // IDs of pods and containers, not digests (sha256:)
	{regexp.MustCompile(`"\d{19}"`), `"T"`},                        // times in nanoseconds
	{regexp.MustCompile(`"\d{4}-\d\d-\d\dT[^"]*"`), `"T"`},         // and in words
	{regexp.MustCompile(`,"(attempt|podSandboxAttempt)":\d+`), ""}, // of who tried again
	{regexp.MustCompile(`\b\d{1,3}\.\d{1,3}\.\d{1,3}\.\d{1,3}\b`), "IP"},
	{regexp.MustCompile(`/\d+\.log`), "/#.log"},
	{regexp.MustCompile(`/proc/\d+/`), "/proc/#/"},
}

// told is a message without what differs from run to run.
func told(t *testing.T, m proto.Message) string {
	t.Helper()
	text, err := compact(m)
	Must(t, err)
	return withoutDiffering(text)
}

func withoutDiffering(text string) string {
	for _, d := range differs {
		text = d.pattern.ReplaceAllString(text, d.with)
	}
	return text
}

// compact is a message as JSON.
func compact(m proto.Message) (string, error) {
	data, err := protojson.Marshal(m)
	if err != nil {
		return "", err
	}
	var text bytes.Buffer // protojson puts blanks where it likes
	err = json.Compact(&text, data)
	return text.String(), err
}

// Map returns the state with other names.
func (s snapshot) Map(rename func(kind, name string) string) State {
	out := snapshot{}
	for kind, names := range s {
		for name, n := range names {
			for range n {
				out.add(kind, rename(kind, name))
			}
		}
	}
	return out
}
