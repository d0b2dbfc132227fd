package launcher

import (
	"errors"
	"fmt"
	"os"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

func TestParseTimer(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct {
		text    string
		want    timer
		ok      bool
		stalled bool
	}{
		"expired":  {"pos:\t0\nclockid: 1\nticks: 2\nsettime flags: 00\nit_value: (0, 0)\nit_interval: (1, 5)\n", timer{2, 0, time.Second + 5}, true, true},
		"running":  {"ticks: 0\nit_value: (0, 7)\nit_interval: (0, 9)\n", timer{0, 7, 9}, true, false},
		"disarmed": {"ticks: 0\nit_value: (0, 0)\nit_interval: (0, 9)\n", timer{0, 0, 9}, true, false},
		"once":     {"ticks: 1\nit_value: (0, 0)\nit_interval: (0, 0)\n", timer{1, 0, 0}, true, false},
		"other":    {"pos:\t0\nflags:\t02\n", timer{}, false, false},
		"broken":   {"ticks: x\nit_value: (0, 0)\nit_interval: (0, 0)\n", timer{}, false, false},
	} {
		t.Run(name, func(t *testing.T) {
			got, ok := parseTimer(tc.text)
			if ok != tc.ok || ok && (got != tc.want || got.stalled() != tc.stalled) {
				t.Errorf("got %+v, %v, stalled %v", got, ok, got.stalled())
			}
		})
	}
}

// A timer as CRIU restores it: it has expired, and it is disarmed.
func TestRearmTimers(t *testing.T) {
	fd, err := unix.TimerfdCreate(unix.CLOCK_MONOTONIC, unix.TFD_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	interval := unix.NsecToTimespec(int64(time.Millisecond))
	err = errors.Join(unix.TimerfdSettime(fd, 0, &unix.ItimerSpec{Interval: interval}, nil), setTimerTicks(fd, 3))
	if errors.Is(err, unix.ENOTTY) {
		t.Skip("NOT TESTED: the kernel has no CONFIG_CHECKPOINT_RESTORE")
	}
	if err != nil {
		t.Fatal(err)
	}
	if err := rearmTimers(os.Getpid()); err != nil {
		t.Fatal(err)
	}
	var buf [8]byte
	if _, err := unix.Read(fd, buf[:]); err != nil || buf[0] < 3 {
		t.Fatalf("%d expirations, %v", buf[0], err)
	}
	if _, err := unix.Read(fd, buf[:]); err != nil || buf[0] == 0 {
		t.Errorf("the timer does not run: %d, %v", buf[0], err)
	}
	data, err := os.ReadFile(fmt.Sprintf("/proc/self/fdinfo/%d", fd))
	if err != nil {
		t.Fatal(err)
	}
	if now, ok := parseTimer(string(data)); !ok || now.interval != time.Millisecond {
		t.Errorf("the timer is %+v, %v", now, ok)
	}
}
