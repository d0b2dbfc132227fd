// Package watchdog feeds systemd's watchdog, if the unit says WatchdogSec.
//
// # Contract
//
// systemd is told that the daemon is well as long as it answers at its own socket and its watch of waits makes progress. A daemon of
// which systemd hears nothing is aborted, which logs all stacks, and started anew; its containers run on.
package watchdog

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"sync"
	"time"

	"github.com/coreos/go-systemd/v22/daemon"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/cmd/berth/client"
	"berth/internal/task"
)

// Start feeds it for a daemon that serves CRI at listener and waits for these waits. It ends with stop, which waits for that, or when ctx
// does: a daemon that stops has TimeoutStopSec.
func Start(ctx context.Context, listener net.Listener, waits *task.Waits, log *slog.Logger) (stop func()) {
	period, err := daemon.SdWatchdogEnabled(false)
	if err != nil {
		log.Warn("systemd's watchdog is not served", "error", err)
	}
	if err != nil || period == 0 {
		return func() {}
	}
	w := &watchdog{period: period, began: time.Now(), socket: listener.Addr().String(), waits: waits, log: log}
	ctx, cancel := context.WithCancel(ctx)
	var running sync.WaitGroup
	running.Go(func() { w.run(ctx) })
	return func() {
		cancel()
		running.Wait()
	}
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
			w.feed()
		}
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
	}
}

func (w *watchdog) feed() {
	if _, err := daemon.SdNotify(false, daemon.SdNotifyWatchdog); err != nil {
		w.log.Warn("systemd was not told that the daemon is well", "error", err)
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
