package integration

import (
	"errors"
	"os"
	"strings"
	"syscall"
	"testing"

	"berth/integration/harness"
)

// Signals that make other daemons reload or report do not stop berth.
func TestSignalsThatDoNotEndTheDaemon(t *testing.T) {
	tests := []struct {
		name   string
		signal syscall.Signal
		said   string // text in the log; empty: none
	}{
		{"SIGHUP", syscall.SIGHUP, "SIGHUP does not reload the configuration"},
		{"SIGUSR1", syscall.SIGUSR1, "goroutine 1 ["},
		{"SIGUSR2", syscall.SIGUSR2, ""},
		{"SIGPIPE", syscall.SIGPIPE, ""},
	}
	d := harness.StartDaemon(t)
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			harness.Must(t, d.Cmd.Process.Signal(test.signal))
			harness.Eventually(t, "the daemon logs the signal", func() error {
				log, err := os.ReadFile(d.LogFile())
				if err == nil && !strings.Contains(string(log), test.said) {
					err = errors.New("not in the daemon's log: " + test.said)
				}
				return err
			})
			if _, err := d.Cri.Version(t.Context(), ""); err != nil || d.Gone() {
				t.Errorf("the daemon no longer answers: %v", err)
			}
		})
	}
}
