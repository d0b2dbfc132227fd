package serve

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"runtime"
	"syscall"
)

// maxStacks bounds what SIGUSR1 prints, in bytes.
const maxStacks = 1 << 20

// watchSignals answers the signals by which the daemon does not end, until stop is called. SIGHUP
// reloads the configuration of other daemons; of this one it is logged that a restart does. SIGUSR1
// writes the stacks of all goroutines to w, as with containerd and CRI-O. Both are caught, not
// ignored: children inherit what is ignored. Go's runtime ignores SIGUSR2.
func watchSignals(w io.Writer, log *slog.Logger) (stop func() error) {
	signals := make(chan os.Signal, 2)
	signal.Notify(signals, syscall.SIGHUP, syscall.SIGUSR1)
	return whileServing(func(ctx context.Context) {
		for {
			select {
			case <-ctx.Done(): // Notify stays: SIGHUP must not end a daemon that is ending well
				return
			case s := <-signals:
				answer(s, w, log)
			}
		}
	})
}

func answer(s os.Signal, w io.Writer, log *slog.Logger) {
	if s == syscall.SIGHUP {
		log.Warn("SIGHUP does not reload the configuration; restart berth to use another one, pods keep running")
		return
	}
	stacks := make([]byte, maxStacks)
	stacks = stacks[:runtime.Stack(stacks, true)]
	if _, err := fmt.Fprintf(w, "goroutines, as SIGUSR1 asks for:\n%s\n", stacks); err != nil {
		log.Error("write goroutine stacks", "error", err)
	}
}
