package lsm

import (
	"bytes"
	"context"
	_ "embed"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync/atomic"
	"time"

	"berth/internal/errdefs"
	"berth/internal/host"
	"berth/internal/task"
	"berth/oci/confine"
)

// profileLoader queries and loads AppArmor profiles.
type profileLoader struct {
	loaded func(name string) (bool, error)
	load   func(name string) error
}

// hostProfiles uses the kernel's list and apparmor_parser.
var hostProfiles = profileLoader{loaded: host.Files{}.AppArmorLoaded, load: installProfile}

func installProfile(name string) error {
	if _, err := exec.LookPath("apparmor_parser"); err != nil {
		return fmt.Errorf("install apparmor_parser (package apparmor): %w", err)
	}
	cmd := exec.Command("apparmor_parser", "-Kr") // -K: no cache, because a cache needs a writable filesystem
	cmd.Stdin = strings.NewReader(defaultProfile(name))
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("apparmor_parser: %w: %s", err, bytes.TrimSpace(out))
	}
	return nil
}

// template is the profile of moby/profiles, which is also the default of Docker, containerd and
// Podman. It is a copy, because moby's function uses text/template. With text/template the linker
// cannot remove unused methods of the whole daemon (4.7 MB).
//
//go:embed default.apparmor
var template string

// profileDir has the files that profiles include.
const profileDir = "/etc/apparmor.d"

// defaultProfile returns the profile under a name. It permits signals from the daemon.
func defaultProfile(name string) string {
	daemon := "unconfined"
	// The kernel appends the mode: "NAME (enforce)".
	if own, err := os.ReadFile("/proc/self/attr/current"); err == nil && len(own) > 0 {
		daemon, _, _ = strings.Cut(string(own), " ")
	}
	tunables, abstractions := "@{PROC}=/proc/", ""
	if _, err := os.Stat(filepath.Join(profileDir, "tunables/global")); err == nil {
		tunables = "#include <tunables/global>"
	}
	if _, err := os.Stat(filepath.Join(profileDir, "abstractions/base")); err == nil {
		abstractions = "#include <abstractions/base>"
	}
	return strings.NewReplacer("NAME", name, "DAEMON", daemon, "TUNABLES", tunables, "ABSTRACTIONS", abstractions).
		Replace(template)
}

// ensure loads a missing profile. fresh reports that this call loaded it.
func (l profileLoader) ensure(name string) (fresh bool, err error) {
	there, err := l.loaded(name)
	if there || err != nil {
		return false, err
	}
	if err := l.load(name); err != nil {
		return false, fmt.Errorf("load AppArmor profile %s: %w", name, err)
	}
	if there, err = l.loaded(name); err == nil && !there {
		err = fmt.Errorf("load AppArmor profile %s: apparmor_parser succeeded, but the kernel does not list the profile",
			name)
	}
	return err == nil, err
}

// appArmorRetry is the pause after a failed load. It prevents that every launch logs the failure on
// a host without apparmor_parser.
const appArmorRetry = time.Minute

// appArmorTimeout limits how long a launch waits for the profile. The parser compiles it in a
// second.
const appArmorTimeout = 15 * time.Second

// AppArmor keeps the default profile loaded.
type AppArmor struct {
	enabled bool
	tasks   *task.Runner
	log     *slog.Logger
	kernel  profileLoader
	loading task.Lock                      // held while a load runs
	failed  atomic.Pointer[profileFailure] // last failure
}

type profileFailure struct {
	at  time.Time
	err error
}

// NewAppArmor returns the host's AppArmor. enabled reports whether the kernel supports it. A load
// that takes too long continues in the background of tasks.
func NewAppArmor(enabled bool, tasks *task.Runner, log *slog.Logger) *AppArmor {
	return &AppArmor{enabled: enabled, tasks: tasks, log: log, kernel: hostProfiles, loading: task.NewLock()}
}

// Problem returns why the default profile cannot be loaded. If no load has failed, it returns "".
func (a *AppArmor) Problem() string {
	if f := a.failed.Load(); f != nil {
		return f.err.Error()
	}
	return ""
}

// Ensure loads the profile of RuntimeDefault if the kernel does not have it. It runs before each
// launch, because a reload of AppArmor on the host removes all profiles outside of /etc/apparmor.d.
// If the load fails, package oci refuses containers that request the profile. Other containers run
// without a profile, as on a host without AppArmor.
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
		return // the caller's deadline is no failure of the profile
	}
	a.failed.Store(&profileFailure{at: time.Now(), err: err})
	a.log.Error("load default AppArmor profile: containers that request it are refused, others run without it",
		"error", err)
}

// loadDefault loads the default profile once for all concurrent callers. A load that takes longer
// than appArmorTimeout continues in the background and blocks further loads, because the library
// cannot interrupt the parser.
func (a *AppArmor) loadDefault(ctx context.Context) error {
	const what, profile = "load AppArmor profile", confine.DefaultAppArmorProfile
	ctx, cancel := context.WithTimeout(ctx, appArmorTimeout)
	defer cancel()
	pass, err := a.tasks.Acquire(ctx, a.loading, what, profile)
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
		return fmt.Errorf("%s %s: wait for apparmor_parser: %w", what, profile, ctx.Err())
	}
}
