package sandbox

import (
	"fmt"
	"sync/atomic"
	"time"

	"github.com/moby/profiles/apparmor"

	"berth/internal/host"
	"berth/oci"
)

// profileLoader asks the kernel for AppArmor profiles and loads berth's own.
type profileLoader struct {
	loaded func(name string) (bool, error)
	load   func(name string) error
}

// hostProfiles are the host's: apparmor_parser loads what moby/profiles has written, which
// is the default profile of Docker, containerd and Podman too.
var hostProfiles = profileLoader{loaded: host.Files{}.AppArmorLoaded, load: apparmor.InstallDefault}

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

// appArmor is the manager's loader, and when it last failed.
type appArmor struct {
	profileLoader
	failed atomic.Pointer[time.Time]
}

// ensureAppArmor sees to it that the profile that RuntimeDefault stands for is
// loaded. It is called before each launch as well: reloading AppArmor on a host takes away
// all profiles that are not in /etc/apparmor.d. Where it can't be loaded, containers that
// did not ask for another run without, as on a host without AppArmor, and the log says so.
func (m *Manager) ensureAppArmor() {
	if !m.cfg.Host.AppArmor {
		return
	}
	if failed := m.appArmor.failed.Load(); failed != nil && time.Since(*failed) < appArmorRetry {
		return
	}
	defer m.tasks.Begin("its AppArmor profile", oci.DefaultAppArmorProfile)()
	fresh, err := m.appArmor.ensure(oci.DefaultAppArmorProfile)
	switch {
	case err != nil:
		now := time.Now()
		m.appArmor.failed.Store(&now)
		m.log.Error("the default AppArmor profile can't be had: containers run without one unless they name one", "error", err)
	case fresh:
		m.log.Info("loaded the default AppArmor profile", "profile", oci.DefaultAppArmorProfile)
	}
}
