package statecheck

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"berth/sandbox/state"
	"berth/shim"
	"berth/shim/proto"
)

// Shims: each shim directory, and each directory of a runtime's state, belongs to a recorded object
// that may have been launched. If the object's monitor lives, the monitor's socket answers. The
// shim directory of a running pod names its pause.

// shimDir is a shim directory.
type shimDir struct {
	launched proto.PIDs // noLaunch: no launch has left a record that can be read
	unread   error      // why the record cannot be read
	exit     error      // why there is no exit record; nil: there is one
	listens  error      // why the socket does not answer; nil: it answers
}

var noLaunch proto.PIDs

// answerTimeout bounds the connection to a monitor.
const answerTimeout = time.Second

func (f *facts) readShims() error {
	ids, err := namesIn(f.dirs.Shim(""))
	if err != nil {
		return fmt.Errorf("read shim directories: %w", err)
	}
	f.shims = map[string]*shimDir{}
	for _, id := range ids {
		f.shims[id] = f.readShim(filepath.Join(f.dirs.Shim(""), id))
	}
	return nil
}

func (f *facts) readShim(dir string) *shimDir {
	s := &shimDir{}
	if s.launched, s.unread = shim.ReadShim(dir); errors.Is(s.unread, fs.ErrNotExist) {
		s.unread = nil
	}
	_, s.exit = shim.ReadExit(dir)
	if s.launched.MonitorPID != 0 && s.launched.InitPID != 0 {
		ctx, cancel := context.WithTimeout(context.Background(), answerTimeout)
		defer cancel()
		s.listens = shim.OpenMonitor(dir).Listens(ctx)
	}
	return s
}

func compareShims(f *facts, d *finder) {
	for id, s := range f.shims {
		f.compareLaunch(d, filepath.Join(f.dirs.Shim(""), id), id)
		if c := f.containers[id]; c != nil && f.containerRuns(c) {
			f.compareMonitorOf(d, c, s)
		}
	}
	for _, p := range f.pods {
		f.comparePauseShim(d, p)
	}
	for _, dir := range []string{f.dirs.Libcontainer(), f.dirs.OCI("")} {
		names, err := namesIn(dir)
		if err != nil {
			d.differ(dir, "the state of runtimes", "%v", err)
		}
		for _, id := range names {
			f.compareLaunch(d, filepath.Join(dir, id), id)
		}
	}
}

// compareLaunch compares the remains of a launch in a directory named after its object.
func (f *facts) compareLaunch(d *finder, path, id string) {
	pod, container := f.pods[id], f.containers[id]
	switch {
	case !f.known(id):
		d.differ(path, "a recorded pod or container", "no record of it")
	case pod != nil && f.podIsOver(pod) && filepath.Dir(path) != filepath.Clean(f.dirs.OCI("")): // a runtime program's state is removed with the pod
		d.differ(podName(id), "nothing of a launch, since the pod was stopped", "%s", path)
	case container != nil && f.containerIsIdle(container):
		d.differ(containerName(id), "nothing of a launch, since the container does not run", "%s", path)
	}
}

func (f *facts) compareMonitorOf(d *finder, c *state.FoundContainer, s *shimDir) {
	monitor := f.processes[s.launched.MonitorPID]
	switch {
	case s.unread != nil:
		d.differ(containerName(c.ID), "a shim record", "%v", s.unread)
	case f.alive(s.launched.MonitorPID, s.launched.MonitorStartTime) != nil && monitor.isMonitor() && s.listens != nil &&
		s.exit != nil:
		d.differ(containerName(c.ID), "a socket at which its monitor answers", "%v", s.listens)
	}
}

func (f *facts) comparePauseShim(d *finder, p *state.FoundPod) {
	if !f.podRuns(p) {
		return
	}
	s := f.shims[p.ID]
	switch {
	case s == nil:
		d.differ(podName(p.ID), "a shim directory", "none")
	case s.unread != nil:
		d.differ(podName(p.ID), "a shim record", "%v", s.unread)
	case s.launched.InitPID != p.PausePID || s.launched.InitStartTime != p.PauseStart:
		d.differ(podName(p.ID), fmt.Sprintf("a shim record that names its pause, process %d", p.PausePID),
			"process %d", s.launched.InitPID)
	}
	if _, err := os.Stat(filepath.Join(f.dirs.Libcontainer(), p.ID)); !p.Program && errors.Is(err, fs.ErrNotExist) {
		d.differ(podName(p.ID), "libcontainer's state", "none")
	}
}
