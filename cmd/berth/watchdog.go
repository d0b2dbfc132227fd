package main

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"time"

	"github.com/coreos/go-systemd/v22/daemon"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/internal/cleanup"
	"berth/internal/client"
	"berth/internal/config"
	"berth/internal/task"
)

// watchWaits returns the set of all waits of the daemon, which is watched until closing runs.
func watchWaits(cfg *config.Config, closing *cleanup.List, log *slog.Logger) *task.Waits {
	waits := &task.Waits{}
	waits.SetLimit(cfg.WaitLimit.Duration)
	closing.Add("stop watching waits", whileServing(func(ctx context.Context) { waits.Watch(ctx, log) }))
	return waits
}

// whileServing runs a goroutine and returns the function that ends it and waits for that.
func whileServing(run func(context.Context)) (stop func() error) {
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan struct{})
	go func() { defer close(ended); run(ctx) }()
	return func() error { cancel(); <-ended; return nil }
}

// startWatchdog tells systemd regularly that the daemon is well, if the unit says WatchdogSec: as long as it
// answers at its own socket and its watch of waits makes progress. A daemon of which systemd hears nothing is
// aborted, which logs all stacks, and started anew; its containers run on. It ends with stop, or when ctx does:
// a daemon that stops has TimeoutStopSec.
func startWatchdog(ctx context.Context, listener net.Listener, waits *task.Waits, log *slog.Logger) (stop func()) {
	period, err := daemon.SdWatchdogEnabled(false)
	if err != nil {
		log.Warn("systemd's watchdog is not served", "error", err)
	}
	if err != nil || period == 0 {
		return func() {}
	}
	w := &watchdog{period: period, began: time.Now(), socket: listener.Addr().String(), waits: waits, log: log}
	end := whileServing(func(own context.Context) {
		own, cancel := context.WithCancel(own)
		defer cancel()
		defer context.AfterFunc(ctx, cancel)()
		w.run(own)
	})
	return func() { _ = end() } // it has no error
}

// watchdog is what systemd's is fed by.
type watchdog struct {
	period time.Duration // in which systemd wants to hear of us
	began  time.Time
	socket string // our own
	waits  *task.Waits
	log    *slog.Logger
}

// perPeriod is how often it looks in a period, so that one late look does no harm.
const perPeriod = 3

func (w *watchdog) run(ctx context.Context) {
	ticker := time.NewTicker(w.period / perPeriod)
	defer ticker.Stop()
	for {
		switch err := w.look(ctx); {
		case ctx.Err() != nil:
			return
		case err != nil:
			w.log.Error("the daemon is not well, systemd will restart it if that lasts", "error", err)
		default:
			notify(w.log, daemon.SdNotifyWatchdog)
		}
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
	}
}

// look returns nil if the daemon is well.
func (w *watchdog) look(ctx context.Context) error {
	w.waits.LookSoon() // where nothing is waited for it sleeps
	looked := w.waits.Looked()
	if looked.Before(w.began) { // nobody has asked it to before
		looked = w.began
	}
	if age := time.Since(looked); age > w.period+task.WatchPeriod {
		return fmt.Errorf("waits have not been watched for %v", age)
	}
	ctx, cancel := context.WithTimeout(ctx, w.period/perPeriod)
	defer cancel()
	if err := askOwnSocket(ctx, w.socket); err != nil {
		return fmt.Errorf("ask at our own socket: %w", err)
	}
	return nil
}

// askOwnSocket makes a call as kubelet's most frequent one goes: through the socket, to the objects in memory.
func askOwnSocket(ctx context.Context, socket string) error {
	c, err := client.Dial(ctx, socket)
	if err != nil {
		return err
	}
	defer c.Close() // nothing is under way any more
	_, err = c.ListPodSandbox(ctx, &runtimeapi.ListPodSandboxRequest{})
	return err
}
