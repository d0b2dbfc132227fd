// Package moody has what misbehaves as it is told: a CNI plugin that stands before one of the distribution, hangs, dies,
// talks nonsense or kills its caller, before that one has done its work or after, and notes what it was called for; and a volume
// whose server does not answer.
package moody

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"berth/integration/harness"
	"berth/integration/machine"
)

// Plugin is such a plugin.
type Plugin struct {
	Name string
	dir  string // of the program, its moods and what it notes
}

// Moods of a plugin. Those that begin with Work come after the real plugin has done its work.
const (
	Hang          = "hang" // with a child in its process group and one in a session of its own
	WorkHang      = "work hang"
	Die           = "die" // by SIGKILL
	WorkDie       = "work die"
	Crash         = "crash" // exit code 2, no CNI error
	Garbage       = "garbage"
	WorkGarbage   = "work garbage" // exit code 0
	WorkNothing   = "work nothing" // exit code 0, prints nothing
	WorkFlood     = "work flood"   // 2 MiB
	WorkKill      = "work kill"    // kills the daemon with SIGKILL
	WorkLeave     = "work leave"   // leaves a child and ends well
	WorkPause     = "work pause"   // until its mood is another one; then it ends well, see Resumed
	failMoodStart = "fail "        // an error of the plugin's own, a number of times
)

// Fail is the mood to fail n times with an error of the plugin's own, and to behave then.
func Fail(n int) string { return fmt.Sprintf(failMoodStart+"%d", n) }

const script = `#!/bin/bash
# Does what the file NAME.VERB says, or else what the real plugin does.
dir=%[1]q; real=%[2]q; name=%[3]q
printf '%%s %%s\n' "$CNI_COMMAND" "$CNI_CONTAINERID" >>$dir/calls
mood=$(cat $dir/$CNI_COMMAND 2>/dev/null)
case $mood in
work*)
	result=$($real) || { echo "$result"; exit 1; }
	mood=${mood#work } ;;
'')
	exec $real ;;
esac
leave() {
	sleep 100000 >/dev/null 2>&1 &
	setsid sleep 100001 >/dev/null 2>&1 &
	echo "$CNI_CONTAINERID" >>$dir/left
}
case $mood in
hang) leave; wait ;;
die) leave; kill -KILL $$ ;;
crash) echo "out of cheese" >&2; exit 2 ;;
garbage) echo '<html>not found</html>' ;;
nothing) ;;
flood) head -c 2097152 /dev/zero ;;
kill) leave; kill -KILL $PPID; wait ;;
leave) leave; echo "$result" ;;
pause)
	echo "$CNI_CONTAINERID" >>$dir/left
	while [ "$(cat $dir/$CNI_COMMAND)" = "work pause" ]; do sleep 0.05; done
	echo "$CNI_CONTAINERID" >>$dir/resumed
	echo "$result" ;;
fail*)
	n=${mood#fail }
	if [ $n -gt 1 ]; then echo "fail $((n - 1))" >$dir/$CNI_COMMAND; else rm $dir/$CNI_COMMAND; fi
	echo '{"cniVersion": "1.0.0", "code": 11, "msg": "no room in the inn", "details": "come back later"}'
	exit 1 ;;
esac
`

// NewPlugin makes a plugin of that name that stands before the distribution's; it is
// in a good mood.
func NewPlugin(t *testing.T, name string) *Plugin {
	t.Helper()
	p := &Plugin{Name: name, dir: t.TempDir()}
	harness.Must(t, os.WriteFile(filepath.Join(p.dir, name), fmt.Appendf(nil, script, p.dir, filepath.Join(harness.PluginDir, name), name), 0o700))
	return p
}

// Option makes a daemon use the plugin.
func (p *Plugin) Option(_ *testing.T, d *harness.Daemon) {
	d.BinDirs = append([]string{p.dir}, d.BinDirs...)
}

// Is sets the plugin's mood for a verb; "" is a good one.
func (p *Plugin) Is(t *testing.T, verb, mood string) {
	t.Helper()
	harness.Must(t, os.WriteFile(filepath.Join(p.dir, verb+".new"), []byte(mood), 0o600))
	harness.Must(t, os.Rename(filepath.Join(p.dir, verb+".new"), filepath.Join(p.dir, verb)))
}

// Calls returns for which pods the plugin was called with a verb.
func (p *Plugin) Calls(verb string) (ids []string) {
	for _, line := range machine.ReadLines(filepath.Join(p.dir, "calls")) {
		if id, ok := strings.CutPrefix(line, verb+" "); ok {
			ids = append(ids, id)
		}
	}
	return ids
}

// AwaitChildren waits until the plugin has left its children behind, or paused, once more than n times.
func (p *Plugin) AwaitChildren(t *testing.T, n int) {
	t.Helper()
	harness.Eventually(t, "the plugin "+p.Name+" misbehaves", func() error {
		if got := p.Left(); got <= n {
			return harness.Unexpected("how often it left children", got, n+1)
		}
		return nil
	})
}

// Resumed is how often the plugin has ended after a pause.
func (p *Plugin) Resumed() int { return len(machine.ReadLines(filepath.Join(p.dir, "resumed"))) }

// Left is how often the plugin has left children behind, or paused.
func (p *Plugin) Left() int { return len(machine.ReadLines(filepath.Join(p.dir, "left"))) }
