package lsm

import (
	"context"
	"fmt"
	"log/slog"
	"os/exec"
	"sync/atomic"
	"time"

	"github.com/moby/profiles/apparmor"

	"berth/internal/errdefs"
	"berth/internal/host"
	"berth/internal/task"
	"berth/oci/confine"
)

// profileLoader asks the kernel for AppArmor profiles and loads berth's own.
type profileLoader struct {
	loaded func(name string) (bool, error)
	load   func(name string) error
}

// hostProfiles are the host's: apparmor_parser loads what moby/profiles has written, which
// is the default profile of Docker, containerd and Podman too.
var hostProfiles = profileLoader{loaded: host.Files{}.AppArmorLoaded, load: installProfile}

func installProfile(name string) error {
	if _, err := exec.LookPath("apparmor_parser"); err != nil {
		return fmt.Errorf("install apparmor_parser (package apparmor): %w", err)
	}
	return apparmor.InstallDefault(name)
}

// ensure loads the profile if the kernel does not have it. fresh tells that it was loaded now.
func (l profileLoader) ensure(name string) (fresh bool, err error) {
	there, err := l.loaded(name)
	if there || err != nil {
		return false, err
	}
	if err := l.load(name); err != nil {
		return false, fmt.Errorf("load AppArmor profile %s: %w", name, err)
	}
	if there, err = l.loaded(name); err == nil && !there {
		err = fmt.Errorf("AppArmor profile %s was loaded, but the kernel does not list it", name)
	}
	return err == nil, err
}

// appArmorRetry is how long nothing is tried after a failure: a host without
// apparmor_parser would have it told at each launch.
const appArmorRetry = time.Minute

// appArmorLimit is how long a launch waits for the profile. The parser compiles it within a second.
const appArmorLimit = 15 * time.Second

// AppArmor has the default profile loaded.
type AppArmor struct {
	enabled bool
	tasks   *task.Runner
	log     *slog.Logger
	kernel  profileLoader
	turn    task.Turn                      // of the one load under way
	failed  atomic.Pointer[profileFailure] // why it failed last
}

type profileFailure struct {
	at  time.Time
	err error
}

// NewAppArmor returns the host's; enabled tells whether it has AppArmor. What takes too long goes on
// in the background of tasks.
func NewAppArmor(enabled bool, tasks *task.Runner, log *slog.Logger) *AppArmor {
	return &AppArmor{enabled: enabled, tasks: tasks, log: log, kernel: hostProfiles, turn: task.NewTurn()}
}

// Problem is why the default profile can't be had; empty if it can, or that is not known.
func (a *AppArmor) Problem() string {
	if f := a.failed.Load(); f != nil {
		return f.err.Error()
	}
	return ""
}

// Ensure sees to it that the profile that RuntimeDefault stands for is
// loaded. It is called before each launch: reloading AppArmor on a host takes away
// all profiles that are not in /etc/apparmor.d. Where it can't be loaded, containers that
// ask for it are refused (package oci), those that ask for nothing run without, as on a host
// without AppArmor, and the log says so.
func (a *AppArmor) Ensure(ctx context.Context) {
	if !a.enabled {
		return
	}
	if f := a.failed.Load(); f != nil && time.Since(f.at) < appArmorRetry {
		return
	}
	there, err := a.kernel.loaded(confine.DefaultAppArmorProfile)
	if err == nil && !there {
		err = a.loadDefault(ctx)
	}
	if err == nil {
		a.failed.Store(nil)
		return
	}
	if ctx.Err() != nil {
		return // it says nothing about the profile that the caller has no time left
	}
	a.failed.Store(&profileFailure{at: time.Now(), err: err})
	a.log.Error("the default AppArmor profile can't be had: containers that ask for it are refused, those that name none run without one", "error", err)
}

// loadDefault loads the default profile, once for all who want it at the same time. What
// takes longer than appArmorLimit goes on in the background, and nothing else is loaded meanwhile: the
// library has no way to end the parser.
func (a *AppArmor) loadDefault(ctx context.Context) error {
	const what, profile = "load AppArmor profile", confine.DefaultAppArmorProfile
	ctx, cancel := context.WithTimeout(ctx, appArmorLimit)
	defer cancel()
	pass, err := a.tasks.Take(ctx, a.turn, what, profile)
	if err != nil {
		return err
	}
	done := make(chan error, 1)
	if !a.tasks.Background.Spawn(func() {
		defer pass()
		done <- a.tasks.Guard(what, profile, func() error {
			fresh, err := a.kernel.ensure(profile)
			if fresh {
				a.log.Info("loaded the default AppArmor profile", "profile", profile)
			}
			return err
		})
	}) {
		pass()
		return errdefs.Unavailable("%s %s: berth is stopping", what, profile)
	}
	defer a.tasks.Begin("apparmor_parser", profile)()
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
		return fmt.Errorf("%s %s: apparmor_parser does not end: %w", what, profile, ctx.Err())
	}
}
