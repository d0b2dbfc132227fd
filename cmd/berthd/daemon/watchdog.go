package daemon

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"sync"
	"time"

	systemd "github.com/coreos/go-systemd/v22/daemon"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/internal/task"
	"berth/server"
)

// startWatchdog feeds systemd's watchdog, if the unit sets WatchdogSec. The daemon serves CRI on
// listener and records its waits in waits. The daemon counts as healthy while it answers on its own
// socket and its watch of waits makes progress. If it does not report for WatchdogSec, systemd
// aborts and restarts it. The abort logs all stacks, and containers keep running.
//
// startWatchdog calls checked with the result of each check. It ends when stop is called or ctx
// ends. During a shutdown TimeoutStopSec applies instead. stop waits for the end.
func startWatchdog(ctx context.Context, listener net.Listener, waits *task.Waits, checked func(error),
	log *slog.Logger) (stop func()) {
	period, err := systemd.SdWatchdogEnabled(false)
	if err != nil {
		log.Warn("cannot feed systemd's watchdog", "error", err)
	}
	if err != nil || period == 0 {
		return func() {}
	}
	w := &watchdog{period: period, began: time.Now(), socket: listener.Addr().String(), waits: waits,
		checked: checked, log: log}
	ctx, cancel := context.WithCancel(ctx)
	var running sync.WaitGroup
	running.Go(func() { w.run(ctx) })
	return func() {
		cancel()
		running.Wait()
	}
}

// watchdog checks the daemon and reports to systemd.
type watchdog struct {
	period  time.Duration // systemd expects a report in each period
	began   time.Time
	socket  string // the daemon's own
	waits   *task.Waits
	checked func(error) // called with the result of each check
	log     *slog.Logger
}

// perPeriod is the number of checks per period, so that one late check does no harm.
const perPeriod = 3

func (w *watchdog) run(ctx context.Context) {
	ticker := time.NewTicker(w.period / perPeriod)
	defer ticker.Stop()
	for {
		err := w.look(ctx)
		if ctx.Err() != nil {
			return
		}
		w.checked(err)
		if err != nil {
			w.log.Error("the daemon is unhealthy, systemd will restart it if this lasts", "error", err)
		} else {
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
	if _, err := systemd.SdNotify(false, systemd.SdNotifyWatchdog); err != nil {
		w.log.Warn("notify systemd's watchdog", "error", err)
	}
}

// look returns nil if the daemon is healthy.
func (w *watchdog) look(ctx context.Context) error {
	w.waits.CheckSoon() // the watch sleeps if no wait has a limit
	looked := w.waits.LastCheck()
	if looked.Before(w.began) { // the watch was not woken by an earlier check
		looked = w.began
	}
	if age := time.Since(looked); age > w.period+task.WatchPeriod {
		return fmt.Errorf("waits have not been watched for %v", age)
	}
	ctx, cancel := context.WithTimeout(ctx, w.period/perPeriod)
	defer cancel()
	if err := askOwnSocket(ctx, w.socket); err != nil {
		return fmt.Errorf("call the daemon's own socket: %w", err)
	}
	return nil
}

// askOwnSocket makes kubelet's most frequent call, through the socket to the objects in memory.
func askOwnSocket(ctx context.Context, socket string) error {
	conn, err := grpc.NewClient("unix://"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(server.MaxMessage)))
	if err != nil {
		return err
	}
	defer conn.Close() // no call is in progress
	_, err = runtimeapi.NewRuntimeServiceClient(conn).ListPodSandbox(ctx, &runtimeapi.ListPodSandboxRequest{})
	return err
}
