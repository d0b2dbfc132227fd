package cli

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"
	"unicode"

	"github.com/spf13/pflag"
)

func TestExitCode(t *testing.T) {
	t.Parallel()
	cause := errors.New("y")
	for name, tc := range map[string]struct {
		err     error
		code    int
		printed string
	}{
		"success":             {nil, 0, ""},
		"plain error":         {errors.New("x"), 1, "berth: x\n"},
		"status, no cause":    {&ExitStatus{Code: 42}, 42, ""},
		"wrapped status":      {fmt.Errorf("wrapped: %w", &ExitStatus{Code: 3, Cause: cause}), 3, "berth: wrapped: y\n"},
		"interrupt":           {(&Interrupted{syscall.SIGINT}).Status(&Interrupted{}), 130, "berth: interrupted\n"},
		"interrupt, silenced": {Silent((&Interrupted{syscall.SIGINT}).Status(&Interrupted{})), 130, ""},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var printed bytes.Buffer
			if got := ExitCode(tc.err, &printed); got != tc.code || printed.String() != tc.printed {
				t.Errorf("exit code %d, printed %q; want %d, %q", got, printed.String(), tc.code, tc.printed)
			}
		})
	}
}

func raise(t *testing.T, s syscall.Signal) {
	t.Helper()
	if err := syscall.Kill(os.Getpid(), s); err != nil {
		t.Error(err)
	}
}

func TestTwoStageInterruptible(t *testing.T) {
	ctx, now, stop := TwoStageInterruptible(t.Context())
	defer stop()
	raise(t, syscall.SIGTERM)
	<-ctx.Done()
	var cause *Interrupted
	if !errors.As(context.Cause(ctx), &cause) || cause.Signal != syscall.SIGTERM {
		t.Errorf("cause of the cancellation: %v", context.Cause(ctx))
	}
	if now.Err() != nil {
		t.Error("the first signal cancelled the second context")
	}
	raise(t, syscall.SIGINT)
	<-now.Done()
}

// A run keeps its grace period when the context of its command ends.
func TestSecondContextOutlivesParent(t *testing.T) {
	parent, cancel := context.WithCancel(t.Context())
	ctx, now, stop := TwoStageInterruptible(parent)
	defer stop()
	cancel()
	<-ctx.Done()
	if now.Err() != nil {
		t.Error("the second context ended with its parent")
	}
}

func TestDurationsWithoutUnitAreSeconds(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]time.Duration{
		"10": 10 * time.Second, "0": 0, "0.5": time.Second / 2, "1m30s": 90 * time.Second, "250ms": 250 * time.Millisecond,
		"-1": -1, "-1s": -1, "": -1, "x": -1, "10 s": -1, "1e300": -1, "NaN": -1, "Inf": -1,
	} {
		var d time.Duration
		flags := pflag.NewFlagSet("x", pflag.ContinueOnError)
		flags.SetOutput(io.Discard)
		DurationVarP(flags, &d, "timeout", "t", time.Minute, "")
		err := flags.Parse([]string{"-t", text})
		if want < 0 && err == nil || want >= 0 && (err != nil || d != want) {
			t.Errorf("%q is %v, %v; want %v", text, d, err, want)
		}
	}
}

// JSON must be safe for a terminal and decode to the original data.
func TestPrintJSON(t *testing.T) {
	t.Parallel()
	const hostile = "a\x1b[31m\u009b\u202e\U000e0001é\n<b>"
	var out strings.Builder
	if err := PrintJSON(&out, []string{hostile}); err != nil {
		t.Fatal(err)
	}
	if i := strings.IndexFunc(out.String(), func(r rune) bool { return r != '\n' && !unicode.IsPrint(r) }); i >= 0 {
		t.Errorf("printed: %q", out.String()[i:])
	}
	var back []string
	if err := json.Unmarshal([]byte(out.String()), &back); err != nil || len(back) != 1 || back[0] != hostile {
		t.Errorf("it is %+v; %v", back, err)
	}
}
