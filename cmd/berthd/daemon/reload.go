package daemon

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"strings"
	"sync/atomic"

	systemd "github.com/coreos/go-systemd/v22/daemon"
	"golang.org/x/sys/unix"

	"berth/cmd/berthd/exporter"
	"berth/cmd/config"
	"berth/cmd/node"
	"berth/cni"
	"berth/image"
	"berth/image/registry"
	"berth/image/trust"
	"berth/internal/errdefs"
	"berth/internal/host"
	"berth/internal/nri"
	"berth/oci"
	"berth/oci/confine"
	"berth/sandbox"
	"berth/sandbox/ownership"
	"berth/sandbox/state"
)

// reloader applies a changed configuration to the running daemon.
type reloader struct {
	load     func() (*config.Config, []string, error)
	requests chan struct{} // capacity 1
	running  atomic.Pointer[config.Config]
	level    *slog.LevelVar
	log      *slog.Logger
	reloaded func(error) // called with the result of each reload; set before run

	// The parts that take new options. They are set before run.
	images  *image.Store
	network *cni.Network
	pods    *sandbox.Manager
	plugins *nri.Plugins // nil: NRI is off
	servers *exporter.Servers
}

// newReloader returns a reloader for a daemon that starts with cfg.
func newReloader(cfg *config.Config, load func() (*config.Config, []string, error), level *slog.LevelVar,
	log *slog.Logger) *reloader {
	r := &reloader{load: load, requests: make(chan struct{}, 1), level: level, log: log, reloaded: func(error) {}}
	r.running.Store(cfg)
	return r
}

// use sets the parts that take new options.
func (r *reloader) use(p parts, a *assembly) {
	r.images, r.network, r.pods, r.plugins = p.images.Store(), p.network, p.pods, p.plugins
	r.servers, r.reloaded = a.servers, a.metrics.Reloaded
}

// request asks for a reload. It does not block. Several requests before a reload starts count as
// one.
func (r *reloader) request() {
	select {
	case r.requests <- struct{}{}:
	default:
	}
}

// run reloads on request until ctx ends.
func (r *reloader) run(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-r.requests:
			r.notifyReloading()
			r.reload(ctx)
			notify(r.log, systemd.SdNotifyReady)
		}
	}
}

// notifyReloading announces a reload to systemd: see Type=notify-reload in systemd.service(5).
func (r *reloader) notifyReloading() {
	var now unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &now); err != nil {
		r.log.Warn("read the monotonic clock", "error", err)
		return
	}
	notify(r.log, fmt.Sprintf("%s\nMONOTONIC_USEC=%d", systemd.SdNotifyReloading, now.Nano()/1000))
}

// settings returns the present configuration for verbose Status.
func (r *reloader) settings() any { return r.running.Load() }

// reload reads the configuration and applies the options that can change. It applies all of them,
// or none if the configuration is refused.
func (r *reloader) reload(ctx context.Context) {
	err := r.apply(ctx)
	r.reloaded(err)
	if err != nil {
		r.log.Error("configuration not reloaded, the daemon keeps its own", "error", err)
	}
}

func (r *reloader) apply(ctx context.Context) error {
	read, warnings, err := r.load()
	if err != nil {
		return err
	}
	for _, w := range warnings {
		r.log.Warn("obsolete configuration", "key", w)
	}
	running := r.running.Load()
	changed, restart := config.Changes(running, read)
	next := config.Reloaded(running, read)
	if err := r.checkDirectories(running, read); err != nil {
		return err
	}
	level, err := logLevel(next)
	if err != nil {
		return err
	}
	setImages, err := r.images.Prepare(imageSettings(next))
	if err != nil {
		return err
	}
	setNetwork, err := r.network.Prepare(next.CNIConfDir, next.CNIBinDirs)
	if err != nil {
		return err
	}
	moveMetrics, err := r.servers.Prepare(next.MetricsAddress) // the last request, which must be applied
	if err != nil {
		return err
	}
	// From here on the reload cannot be refused, so Status shows next even if a program cannot be
	// probed.
	r.running.Store(next)
	r.level.Set(level)
	setImages()
	setNetwork()
	moveMetrics()
	r.servers.SetGroups(next.MetricsCollectors)
	if r.plugins != nil {
		r.plugins.SetRequestTimeout(next.NRIRequestTimeout.Duration)
	}
	if err := r.pods.SetHandlers(ctx, node.Handlers(next), next.DefaultHandler); err != nil {
		r.log.Error("probe runtime handlers after a reload", "error", err)
	}
	r.log.Info("configuration reloaded", "changed", strings.Join(changed, " "))
	if len(restart) > 0 {
		r.log.Warn("changed options take effect after a restart of berth; pods keep running",
			"options", strings.Join(restart, " "))
	}
	return nil
}

// checkDirectories returns an error if the next daemon would not find the pods of this one.
func (r *reloader) checkDirectories(running, read *config.Config) error {
	if err := checkPods(read); err != nil {
		return err
	}
	if running.Root == read.Root || running.State == read.State || len(r.pods.Pods()) == 0 {
		return nil
	}
	return errdefs.FailedPrecondition("root and state are both changed while the node has pods: the next daemon would" +
		" not know them, and nothing would stop them. Remove all pods first")
}

// Check returns an error if a daemon would refuse a valid configuration. It checks the files,
// images and networks that the configuration names. As root, it also checks whether pods run that
// do not belong to the configuration's directories. A daemon also starts if the files of peers
// cannot be used, but Check reports them. It changes nothing.
func Check(cfg *config.Config) error {
	_, network := node.NetworkConfig(cfg, nil)
	err := errors.Join(imageSettings(cfg).Check(), network, checkPeers(cfg), checkSeccomp(cfg))
	if os.Geteuid() == 0 {
		err = errors.Join(err, checkPods(cfg))
	}
	return err
}

// checkPods returns FailedPrecondition if a daemon with these directories or this cgroup driver
// would lose running pods.
func checkPods(cfg *config.Config) error {
	if err := ownership.Check(dirs(cfg)); err != nil {
		return err
	}
	facts, err := host.Detect("/")
	if err != nil {
		return err
	}
	systemd, err := node.SystemdCgroup(cfg.CgroupDriver, facts.CgroupV2)
	if err != nil {
		return err
	}
	return checkDriver(cfg, systemd)
}

// checkDriver refuses a cgroup driver with which a daemon would not find the cgroups of pods of
// this boot.
func checkDriver(cfg *config.Config, systemd bool) error {
	found, err := state.Inspect(cfg.Root, cfg.State)
	if err != nil {
		return err
	}
	bootID, err := host.BootID()
	if err != nil {
		return err
	}
	for _, p := range found.Pods {
		if p.BootID != bootID || p.CgroupsPath == "" || oci.IsSystemdPath(p.CgroupsPath) == systemd {
			continue
		}
		drivers := map[bool]string{false: "cgroupfs", true: "systemd"}
		return errdefs.FailedPrecondition("cgroup_driver means %s, but pod %s has cgroups of %s: the next daemon would not"+
			" find them, and could neither limit nor stop the pod. Keep the driver, or remove all pods first",
			drivers[systemd], p.ID, drivers[!systemd])
	}
	return nil
}

// checkSeccomp refuses a seccomp profile of the node that no container could use.
func checkSeccomp(cfg *config.Config) error {
	if cfg.DefaultSeccomp == "" {
		return nil
	}
	if err := confine.CheckProfileFile(cfg.DefaultSeccomp, host.Files{}); err != nil {
		return fmt.Errorf("container.seccomp_profile: %w", err)
	}
	return nil
}

// logLevel returns the lowest level of logged messages.
func logLevel(cfg *config.Config) (slog.Level, error) {
	var level slog.Level
	err := level.UnmarshalText([]byte(cfg.LogLevel))
	return level, err
}

// imageSettings returns the options of the image store that can change.
func imageSettings(cfg *config.Config) image.Settings {
	pinned := cfg.PinnedImages
	if cfg.PauseImage != "" {
		pinned = append([]string{cfg.PauseImage}, pinned...)
	}
	verify, err := node.FindVerify(cfg.SignatureVerifyPath)
	if err != nil {
		verify = cfg.SignatureVerifyPath // trust.Config.Check reports it if it is needed
	}
	return image.Settings{
		Registries: Registries(cfg),
		Pinned:     pinned,
		Trust: trust.Config{
			Policy:        cfg.SignaturePolicy,
			PolicyDir:     cfg.SignaturePolicyDir,
			RegistriesDir: cfg.SignatureRegistriesDir,
			Program:       verify,
			PluginDir:     cfg.SignaturePluginDir,
			MaxPlugins:    cfg.SignatureMaxPlugins,
			PluginTimeout: cfg.SignaturePluginTimeout.Duration,
		},
	}
}

// Registries returns the options of registries.
func Registries(cfg *config.Config) registry.Sources {
	return registry.Sources{
		Dirs:           cfg.RegistryDirs,
		AuthFiles:      cfg.AuthFiles,
		DockerConfig:   cfg.DockerConfig,
		RegistriesConf: cfg.RegistriesConf,
	}
}
