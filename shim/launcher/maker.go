package launcher

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"

	"github.com/opencontainers/runc/libcontainer"
	"github.com/opencontainers/runc/libcontainer/configs"
	"github.com/opencontainers/runc/libcontainer/specconv"
	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"berth/internal/failpoint"
	"berth/shim/launcher/pause"
	"berth/shim/proto"
)

// maker is what makes the container of a launch: libcontainer in this process,
// the program of an OCI runtime, or pause itself. Its methods are called in this order.
type maker interface {
	// prepare finds out whether the spec can be carried out, and makes no more than files in Dir.
	// InvalidArgument if it can't.
	prepare() error
	// hostRoot returns who the container's root is on the host.
	hostRoot() (uid, gid int, err error)
	// create makes the container, with the container's ends of the launch's io. Its
	// init waits for execute. What is made is entered in the launch's undo list. The
	// process is a child of ours; 0: there is none that stands for the container until it runs.
	create() (pid int, err error)
	// execute lets init execute its command, and returns when it has.
	execute() error
	// follow returns a child of ours that ends when the container, which runs, does,
	// and writes to verdict how that ended. It is for containers that create returned no process of.
	follow() (pid int, verdict *os.File, err error)
	// destroy removes what create has made.
	destroy() error
}

func (c *launch) newMaker() maker {
	switch {
	case c.Runtime != nil:
		return &programMaker{launch: c}
	case pause.Plain(c.Launch):
		return &pauseMaker{launch: c}
	}
	return &libraryMaker{launch: c}
}

// libraryMaker is libcontainer.
type libraryMaker struct {
	*launch
	config    *configs.Config
	container *libcontainer.Container
	process   *libcontainer.Process
}

func (m *libraryMaker) prepare() (err error) {
	m.config, err = specconv.CreateLibcontainerConfig(&specconv.CreateOpts{
		CgroupName:       m.ID,
		UseSystemdCgroup: m.SystemdCgroup,
		Spec:             withoutMappings(m.Spec),
	})
	if err != nil {
		return proto.Errorf(proto.InvalidArgument, "runtime spec: %v", err)
	}
	if m.Spec.Hooks != nil {
		if err := m.writeBundle(); err != nil {
			return err
		}
	}
	m.process, err = newProcess(m.Spec.Process)
	if err != nil {
		return err
	}
	m.process.Init = true
	return nil
}

// withoutMappings is the spec without the mappings of a user namespace that is joined:
// libcontainer reads them there, and warns each time they are given as well.
func withoutMappings(spec *specs.Spec) *specs.Spec {
	joins := func(ns specs.LinuxNamespace) bool { return ns.Type == specs.UserNamespace && ns.Path != "" }
	if !slices.ContainsFunc(spec.Linux.Namespaces, joins) {
		return spec
	}
	changed, linux := *spec, *spec.Linux
	linux.UIDMappings, linux.GIDMappings = nil, nil
	changed.Linux = &linux
	return &changed
}

func (m *libraryMaker) hostRoot() (uid, gid int, err error) { return hostRootOf(m.config) }

func hostRootOf(config *configs.Config) (uid, gid int, err error) {
	if uid, err = config.HostRootUID(); err != nil {
		return 0, 0, err
	}
	gid, err = config.HostRootGID()
	return uid, gid, err
}

// create runs libcontainer's part: when it returns, the container's init waits
// in its namespaces for the word to execute the command.
func (m *libraryMaker) create() (pid int, err error) {
	failpoint.Reach("launcher.create")
	m.container, err = libcontainer.Create(m.l.settings.StateRoot, m.ID, m.config)
	if err != nil {
		return 0, err
	}
	failpoint.Reach("launcher.created")
	m.timed("libcontainer create")
	m.undo.Add("destroy container "+m.ID, m.destroy)
	m.io.give(m.process)
	defer m.l.lendFilter(m.process, m.config)()
	if err := m.container.Start(m.process); err != nil {
		return 0, err
	}
	failpoint.Reach("launcher.init-started")
	m.timed("libcontainer start")
	return m.process.Pid()
}

func (m *libraryMaker) execute() error {
	if err := m.container.Exec(); err != nil {
		return err
	}
	return m.explainNotExecuted(m.awaitCommand(always))
}

func (m *libraryMaker) follow() (int, *os.File, error) {
	return 0, nil, errors.New("libcontainer's init is followed from the beginning")
}

func (m *libraryMaker) destroy() error {
	failpoint.Reach("launcher.destroy")
	if m.process.Signal(unix.SIGKILL) == nil {
		_, _ = m.process.Wait() // it was killed: how it ended is of no interest
	}
	ctx, cancel := context.WithTimeout(context.Background(), destroyPatience)
	defer cancel()
	err := errors.Join(m.group.Kill(ctx), m.container.Destroy())
	failpoint.Reach("launcher.container-destroyed")
	err = errors.Join(err, m.group.Destroy(ctx), os.RemoveAll(filepath.Join(m.l.settings.StateRoot, m.ID)))
	failpoint.Reach("launcher.destroyed")
	return err
}

// pauseMaker is berth's own pause.
type pauseMaker struct {
	*launch
	pause pause.Maker
}

func (m *pauseMaker) prepare() error {
	return m.pause.Prepare(m.l.settings.StateRoot, m.Launch, m.group, m.undo)
}
func (m *pauseMaker) hostRoot() (uid, gid int, err error) { return 0, 0, nil }
func (m *pauseMaker) create() (pid int, err error)        { return m.pause.Create() }
func (m *pauseMaker) execute() error                      { return m.pause.Execute() }
func (m *pauseMaker) destroy() error                      { return m.pause.Destroy() }
func (m *pauseMaker) follow() (int, *os.File, error) {
	return 0, nil, errors.New("pause is followed from the beginning")
}

// give hands the container's ends to libcontainer.
func (s *stdio) give(p *libcontainer.Process) {
	// A nil *os.File in the interface would not be nil.
	if s.theirs.stdin != nil {
		p.Stdin = s.theirs.stdin
	}
	if s.theirs.stdout != nil {
		p.Stdout = s.theirs.stdout
	}
	if s.theirs.stderr != nil {
		p.Stderr = s.theirs.stderr
	}
	p.ConsoleSocket = s.theirs.console
}
