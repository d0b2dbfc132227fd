package daemon

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

// maxStacks bounds the stacks that SIGUSR1 prints, in bytes.
const maxStacks = 1 << 20

// watchSignals handles SIGHUP and SIGUSR1 until stop is called. SIGHUP calls reload, which must not
// block. SIGUSR1 writes the stacks of all goroutines to w, as in containerd and CRI-O. Both signals
// are caught rather than ignored, because children inherit ignored signals. Go's runtime ignores
// SIGUSR2.
func watchSignals(w io.Writer, reload func(), log *slog.Logger) (stop func() error) {
	signals := make(chan os.Signal, 2)
	signal.Notify(signals, syscall.SIGHUP, syscall.SIGUSR1)
	return whileServing(func(ctx context.Context) {
		for {
			select {
			case <-ctx.Done(): // no signal.Stop: SIGHUP must not kill a daemon that is shutting down
				return
			case s := <-signals:
				answer(s, w, reload, log)
			}
		}
	})
}

func answer(s os.Signal, w io.Writer, reload func(), log *slog.Logger) {
	if s == syscall.SIGHUP {
		reload()
		return
	}
	stacks := make([]byte, maxStacks)
	stacks = stacks[:runtime.Stack(stacks, true)]
	if _, err := fmt.Fprintf(w, "goroutines, as SIGUSR1 asks for:\n%s\n", stacks); err != nil {
		log.Error("write goroutine stacks", "error", err)
	}
}
