package main

import (
	"context"
	"errors"
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

// interrupted is the cause of what ended by a signal.
type interrupted struct{ signal syscall.Signal }

func (i *interrupted) Error() string { return "interrupted" }

// interruptible returns a context that ends with Ctrl-C or SIGTERM, its cause being
// *interrupted; a second one ends berth at once. stop must be called.
func interruptible(parent context.Context) (ctx context.Context, stop func()) {
	ctx, interrupt := context.WithCancelCause(parent)
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, syscall.SIGINT, syscall.SIGTERM)
	finished := make(chan struct{})
	go func() {
		defer close(finished)
		defer signal.Stop(signals)
		select {
		case s := <-signals:
			interrupt(&interrupted{s.(syscall.Signal)}) // the only kind there is on Linux
		case <-ctx.Done():
		}
	}()
	return ctx, func() {
		interrupt(nil)
		<-finished
	}
}

// interruptStatus gives an error that is due to an interrupt of ctx the words and the
// exit code for it. Other errors it returns as they are.
func interruptStatus(ctx context.Context, err error) error {
	var cause *interrupted
	if !errors.As(context.Cause(ctx), &cause) || !(errors.Is(err, context.Canceled) || errors.Is(err, cause)) {
		return err
	}
	return &exitStatus{code: 128 + int(cause.signal), cause: cause}
}

// patient returns a context that ends with the first Ctrl-C, SIGTERM or SIGHUP, its
// cause being *interrupted, and one that ends with the second. The third ends
// berth. Until stop is called, which it must be, a closed pipe is an error of the
// write and no end without goodbye.
func patient(parent context.Context) (ctx, now context.Context, stop func()) {
	ctx, interrupt := context.WithCancelCause(parent)
	now, kill := context.WithCancelCause(context.WithoutCancel(parent))
	signals := make(chan os.Signal, 2)
	signal.Notify(signals, syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP)
	pipes := make(chan os.Signal, 1)
	signal.Notify(pipes, syscall.SIGPIPE)
	done, finished := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(finished)
		defer signal.Stop(signals)
		for _, end := range []context.CancelCauseFunc{interrupt, kill} {
			select {
			case s := <-signals:
				end(&interrupted{s.(syscall.Signal)}) // the only kind there is on Linux
			case <-done:
				return
			}
		}
	}()
	return ctx, now, func() {
		close(done)
		<-finished
		signal.Stop(pipes)
		interrupt(nil)
		kill(nil)
	}
}
