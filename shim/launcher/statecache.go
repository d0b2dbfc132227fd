package launcher

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"sync"

	"github.com/opencontainers/cgroups"
	"github.com/opencontainers/runc/libcontainer"
	"github.com/opencontainers/runc/libcontainer/configs"

	"berth/internal/cgroup"
)

// loaded is a container as libcontainer's state file describes it. It does not say whether the
// container still runs.
type loaded struct {
	file      string
	info      fs.FileInfo // of the file when it was read
	container *libcontainer.Container
	config    configs.Config
	initPID   int
	cgroups   map[string]string // directories by v1 controller; "" is v2
}

// load returns a container that another process has made. It caches the last container until the
// state file is replaced, because probes come every few seconds. Reading the file (tens of KB with
// a seccomp profile) takes longer than the rest of the launcher's work. The error wraps
// libcontainer.ErrNotExist if the container does not exist.
func (l *launcher) load(root, id string) (*loaded, error) {
	file := filepath.Join(root, id, "state.json")
	info, err := os.Stat(file) // before reading, so that a file that is replaced meanwhile is read again next time
	if errors.Is(err, fs.ErrNotExist) {
		return nil, libcontainer.ErrNotExist
	}
	if err != nil {
		return nil, err
	}
	if last := l.last; last != nil && last.file == file && os.SameFile(last.info, info) &&
		last.info.ModTime().Equal(info.ModTime()) {
		return last, nil
	}
	l.last = nil
	container, err := libcontainer.Load(root, id)
	if err != nil {
		return nil, err
	}
	state, err := container.State()
	if err != nil {
		return nil, err
	}
	l.last = &loaded{file: file, info: info, container: container, config: container.Config(),
		initPID: state.InitProcessPid, cgroups: state.CgroupPaths}
	return l.last, nil
}

// ownAnchor is this process in its cgroup, where it stays. It is nil on cgroup v2.
var ownAnchor = sync.OnceValue(func() *cgroup.Anchor {
	if cgroups.IsCgroup2UnifiedMode() {
		return nil // processes start in their cgroups, without a move
	}
	stay, err := cgroup.AnchorOf(os.Getpid())
	if err != nil {
		return nil
	}
	return stay
})

// prepareMove makes the coming move of an exec's process to its cgroups faster.
func prepareMove() {
	if stay := ownAnchor(); stay != nil {
		_ = stay.Move() // if it fails, the move takes longer
	}
}
