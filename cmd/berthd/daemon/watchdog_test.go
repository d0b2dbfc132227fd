package daemon

import (
	"bytes"
	"context"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"berth/cmd/berth/client/clienttest"
	"berth/internal/task"
)

// fakeSystemd returns the socket for the daemon's report in each period.
func fakeSystemd(t *testing.T, period time.Duration) *net.UnixConn {
	t.Helper()
	path := filepath.Join(t.TempDir(), "notify")
	systemd, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: path, Net: "unixgram"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { systemd.Close() })
	t.Setenv("NOTIFY_SOCKET", path)
	t.Setenv("WATCHDOG_USEC", strconv.FormatInt(period.Microseconds(), 10))
	t.Setenv("WATCHDOG_PID", strconv.Itoa(os.Getpid()))
	return systemd
}

// message returns the next message to systemd.
func message(t *testing.T, systemd *net.UnixConn) string {
	t.Helper()
	text := make([]byte, 100)
	n, err := systemd.Read(text)
	if err != nil {
		t.Fatal(err)
	}
	return string(text[:n])
}

// watch watches waits until the test ends.
func watch(t *testing.T, waits *task.Waits) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	var watching sync.WaitGroup
	watching.Go(func() { waits.Watch(ctx, discardLog) })
	t.Cleanup(func() { cancel(); watching.Wait() })
	for waits.LastCheck().Unix() <= 0 { // until the watch runs
		time.Sleep(time.Millisecond)
	}
}

// addressOf is a listener with nothing but an address.
type addressOf struct {
	net.Listener
	path string
}

func (a addressOf) Addr() net.Addr { return &net.UnixAddr{Name: a.path, Net: "unix"} }

func TestWatchdogIsFedWhileHealthy(t *testing.T) {
	systemd := fakeSystemd(t, 30*time.Second/1000)
	socket := strings.TrimPrefix(clienttest.Start(t, &clienttest.Server{}), "unix://")
	waits := new(task.Waits)
	watch(t, waits)
	stop := startWatchdog(t.Context(), addressOf{path: socket}, waits, func(error) {}, discardLog)
	for range 3 {
		if got := message(t, systemd); got != "WATCHDOG=1" {
			t.Errorf("message %q", got)
		}
	}
	stop()
}

func TestWatchdogIsNotFedWhileUnhealthy(t *testing.T) {
	silent, err := net.Listen("unix", filepath.Join(t.TempDir(), "silent")) // accepts connections and never answers
	if err != nil {
		t.Fatal(err)
	}
	defer silent.Close()
	answers := strings.TrimPrefix(clienttest.Start(t, &clienttest.Server{}), "unix://")
	watched := new(task.Waits)
	watch(t, watched)
	for _, tt := range []struct {
		name, socket string
		waits        *task.Waits
		want         string
	}{
		{"silent", silent.Addr().String(), watched, "call the daemon's own socket"},
		{"unresponsive", answers + ".none", watched, "call the daemon's own socket"},
		{"stuck", answers, new(task.Waits), "waits have not been watched"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			systemd := fakeSystemd(t, 300*time.Millisecond)
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			log := &callingOff{cancel: cancel}
			var began time.Time
			if tt.waits == watched {
				began = time.Now().Add(time.Hour) // the watch may start late in this test
			}
			w := &watchdog{period: 300 * time.Millisecond, began: began, socket: tt.socket, waits: tt.waits, checked: func(error) {}, log: slog.New(slog.NewTextHandler(log, nil))}
			if err := w.look(t.Context()); err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("look: %v", err)
			}
			w.run(ctx)
			if err := systemd.SetReadDeadline(time.Now().Add(time.Millisecond)); err != nil {
				t.Fatal(err)
			}
			if n, _ := systemd.Read(make([]byte, 100)); n > 0 {
				t.Error("systemd's watchdog was fed")
			}
			if !strings.Contains(log.String(), "the daemon is unhealthy") {
				t.Errorf("log: %s", log)
			}
		})
	}
}

// callingOff keeps the log, and ends a context at the second line.
type callingOff struct {
	bytes.Buffer
	cancel context.CancelFunc
}

func (c *callingOff) Write(line []byte) (int, error) {
	if c.Len() > 0 {
		c.cancel()
	}
	return c.Buffer.Write(line)
}

func TestWatchdogIsOffByDefault(t *testing.T) {
	t.Setenv("WATCHDOG_USEC", "")
	startWatchdog(t.Context(), nil, nil, nil, discardLog)()
}
