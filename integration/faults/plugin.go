// Package faults provides components that fail on demand: a CNI plugin that wraps one of the
// distribution's plugins, and a volume whose server does not answer.
package faults

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"berth/integration/harness"
	"berth/integration/machine"
)

// Plugin is a CNI plugin that fails in a chosen way, before or after the wrapped plugin runs. It
// records its calls.
type Plugin struct {
	Name string
	dir  string // holds the program, the fault of each verb, and the records
}

// Faults of a plugin. Faults that begin with Work happen after the wrapped plugin has run.
const (
	Hang        = "hang" // with one child in its process group and one in a new session
	WorkHang    = "work hang"
	Die         = "die" // by SIGKILL
	WorkDie     = "work die"
	Crash       = "crash" // exit code 2, no CNI error
	Garbage     = "garbage"
	WorkGarbage = "work garbage" // exit code 0
	WorkNothing = "work nothing" // exit code 0, prints nothing
	WorkFlood   = "work flood"   // 2 MiB
	WorkKill    = "work kill"    // kills the daemon with SIGKILL
	WorkLeave   = "work leave"   // leaves two children and succeeds
	WorkPause   = "work pause"   // waits until the fault changes, then succeeds; see Resumed
	failPrefix  = "fail "        // returns a CNI error a number of times
)

// Fail returns the fault that makes n calls return a CNI error. Later calls succeed.
func Fail(n int) string { return fmt.Sprintf(failPrefix+"%d", n) }

const script = `#!/bin/bash
# Runs the real plugin, with the fault that the file named after the verb holds.
dir=%[1]q; real=%[2]q; name=%[3]q
printf '%%s %%s\n' "$CNI_COMMAND" "$CNI_CONTAINERID" >>$dir/calls
fault=$(cat $dir/$CNI_COMMAND 2>/dev/null)
case $fault in
work*)
	result=$($real) || { echo "$result"; exit 1; }
	fault=${fault#work } ;;
'')
	exec $real ;;
esac
leave() {
	sleep 100000 >/dev/null 2>&1 &
	setsid sleep 100001 >/dev/null 2>&1 &
	echo "$CNI_CONTAINERID" >>$dir/left
}
case $fault in
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
	n=${fault#fail }
	if [ $n -gt 1 ]; then echo "fail $((n - 1))" >$dir/$CNI_COMMAND; else rm $dir/$CNI_COMMAND; fi
	echo '{"cniVersion": "1.0.0", "code": 11, "msg": "no room in the inn", "details": "come back later"}'
	exit 1 ;;
esac
`

// NewPlugin makes a plugin that wraps the distribution's plugin of that name. It has no fault at
// first.
func NewPlugin(t *testing.T, name string) *Plugin {
	t.Helper()
	p := &Plugin{Name: name, dir: t.TempDir()}
	harness.Must(t, os.WriteFile(filepath.Join(p.dir, name), fmt.Appendf(nil, script, p.dir, filepath.Join(harness.PluginDir, name), name), 0o700))
	return p
}

// Option configures a daemon to use the plugin.
func (p *Plugin) Option(_ *testing.T, d *harness.Daemon) {
	d.BinDirs = append([]string{p.dir}, d.BinDirs...)
}

// Inject sets the fault of a CNI verb; "" removes it.
func (p *Plugin) Inject(t *testing.T, verb, fault string) {
	t.Helper()
	harness.Must(t, os.WriteFile(filepath.Join(p.dir, verb+".new"), []byte(fault), 0o600))
	harness.Must(t, os.Rename(filepath.Join(p.dir, verb+".new"), filepath.Join(p.dir, verb)))
}

// Calls returns the pod IDs of the plugin's calls with a verb.
func (p *Plugin) Calls(verb string) (ids []string) {
	for _, line := range machine.ReadLines(filepath.Join(p.dir, "calls")) {
		if id, ok := strings.CutPrefix(line, verb+" "); ok {
			ids = append(ids, id)
		}
	}
	return ids
}

// AwaitChildren waits until the plugin has left children behind or paused more than n times.
func (p *Plugin) AwaitChildren(t *testing.T, n int) {
	t.Helper()
	harness.EventuallyGot(t, "plugin "+p.Name+" injects its fault", func() (bool, any) { got := p.Left(); return got > n, got })
}

// Resumed returns the number of calls that have ended after a pause.
func (p *Plugin) Resumed() int { return len(machine.ReadLines(filepath.Join(p.dir, "resumed"))) }

// Left returns the number of calls that have left children behind or paused.
func (p *Plugin) Left() int { return len(machine.ReadLines(filepath.Join(p.dir, "left"))) }
