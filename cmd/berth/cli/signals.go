package cli

import (
	"context"
	"errors"
	"os"
	"os/signal"
	"syscall"
)

// Interrupted is the cause of a context that a signal cancelled.
type Interrupted struct{ Signal syscall.Signal }

func (i *Interrupted) Error() string { return "interrupted" }

// Status returns the error that makes berth exit with 128 plus the signal, as shells do.
func (i *Interrupted) Status(cause error) *ExitStatus {
	return &ExitStatus{Code: 128 + int(i.Signal), Cause: cause}
}

// Interruptible returns a context that the first SIGINT or SIGTERM cancels with the cause
// *Interrupted. The second signal ends berth. The caller must call stop.
func Interruptible(parent context.Context) (ctx context.Context, stop func()) {
	ctx, interrupt := context.WithCancelCause(parent)
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, syscall.SIGINT, syscall.SIGTERM)
	finished := make(chan struct{})
	go func() {
		defer close(finished)
		defer signal.Stop(signals)
		select {
		case s := <-signals:
			interrupt(&Interrupted{s.(syscall.Signal)}) // Linux has no other type of signal
		case <-ctx.Done():
		}
	}()
	return ctx, func() {
		interrupt(nil)
		<-finished
	}
}

// InterruptStatus replaces an error that an interrupt of ctx caused by the matching ExitStatus. It
// returns other errors unchanged.
func InterruptStatus(ctx context.Context, err error) error {
	var cause *Interrupted
	if !errors.As(context.Cause(ctx), &cause) || !(errors.Is(err, context.Canceled) || errors.Is(err, cause)) {
		return err
	}
	return cause.Status(cause)
}

// TwoStageInterruptible returns two contexts. The first SIGINT, SIGTERM or SIGHUP cancels ctx with
// the cause *Interrupted. The second signal cancels now, and the third ends berth. The context now
// does not end with parent. Until stop is called, a write to a closed pipe fails instead of killing
// berth, so that the caller can still clean up. The caller must call stop.
func TwoStageInterruptible(parent context.Context) (ctx, now context.Context, stop func()) {
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
		for _, cancel := range []context.CancelCauseFunc{interrupt, kill} {
			select {
			case s := <-signals:
				cancel(&Interrupted{s.(syscall.Signal)}) // Linux has no other type of signal
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
