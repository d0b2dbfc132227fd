package main

import (
	"context"
	"os"
	"os/signal"
	"syscall"
)

// interrupted is the cause of what ended by a signal.
type interrupted struct{ signal syscall.Signal }

func (i *interrupted) Error() string { return "interrupted" }

// interruptible returns a context that ends with Ctrl-C or SIGTERM.
func interruptible(ctx context.Context) (context.Context, context.CancelFunc) {
	return signal.NotifyContext(ctx, syscall.SIGINT, syscall.SIGTERM)
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
