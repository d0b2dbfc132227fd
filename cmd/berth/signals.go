package main

import (
	"context"
	"errors"
	"os"
	"os/signal"
	"syscall"
)

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
