package shim

import (
	"errors"
	"net"
	"os"
	"strconv"
	"testing"

	"golang.org/x/sys/unix"

	"berth/shim/proto"
)

// If a monitor does not accept its clients in time, the kernel refuses more of them. These clients
// must wait and not fail.
func TestClientsWaitForABusyMonitor(t *testing.T) {
	e := newEnv(t)
	c := e.run("busy", "sleep 1000")
	if err := unix.Kill(c.MonitorPID, unix.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	dir, err := os.Open(c.Dir)
	if err != nil {
		t.Fatal(err)
	}
	defer dir.Close()
	address := &net.UnixAddr{Name: "/proc/self/fd/" + strconv.Itoa(int(dir.Fd())) + "/" + proto.SocketFile, Net: "unix"}
	var crowd []*net.UnixConn
	for {
		conn, err := net.DialUnix("unix", nil, address)
		if errors.Is(err, unix.EAGAIN) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		crowd = append(crowd, conn)
	}
	late := make(chan error, 1)
	go func() { late <- OpenMonitor(c.Dir).ReopenLog(e.ctx) }()
	if err := unix.Kill(c.MonitorPID, unix.SIGCONT); err != nil {
		t.Fatal(err)
	}
	for _, conn := range crowd {
		if err := conn.Close(); err != nil {
			t.Error(err)
		}
	}
	if err := <-late; err != nil {
		t.Errorf("a client that came when the monitor was busy: %v", err)
	}
}
