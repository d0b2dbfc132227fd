package daemon

import (
	"context"
	"log/slog"

	"berth/cmd/berthd/memory"
	"berth/cmd/config"
	"berth/cmd/node"
	"berth/sandbox"
	"berth/sandbox/ownership"
)

// Offline opens the pods of a stopped daemon, calls use, and closes them. It continues unfinished
// work as a daemon does, but serves no client, starts no NRI plugins and keeps no launchers ready.
// It also removes running pods that have no record below root. A daemon refuses to remove them. It
// fails with FailedPrecondition while a daemon uses the directories of cfg.
func Offline(
	ctx context.Context, cfg *config.Config, log *slog.Logger, use func(context.Context, *sandbox.Manager) error,
) (err error) {
	offline := *cfg
	offline.IdleLaunchers = 0
	a := newAssembly(&offline, log)
	defer a.closing.Run(&err)
	if err := a.takeDirectories(ownership.Identify); err != nil {
		return err
	}
	n, err := node.Discover(a.cfg)
	if err != nil {
		return err
	}
	a.watchWaits()
	images, err := a.openImages(ctx, n, memory.SetLimit(log))
	if err != nil {
		return err
	}
	network, err := a.openNetwork()
	if err != nil {
		return err
	}
	pods, err := a.openPods(ctx, n, parts{images: images, network: network})
	if err != nil {
		return err
	}
	return use(ctx, pods)
}
