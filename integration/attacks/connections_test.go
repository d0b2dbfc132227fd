package attacks

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"k8s.io/client-go/tools/remotecommand"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/integration/harness"
	"berth/integration/machine"
	"berth/integration/sessions"
)

const (
	nobody = 65534 // user of the attacking processes
	// fewFiles is the daemon's descriptor limit in these tests. The daemon reserves a quarter of it
	// for CRI and itself.
	fewFiles     = 512
	reserved     = fewFiles / 4
	unidentified = fewFiles / 4 // connections without a token that the daemon keeps
	idleAttacker = 3000         // connections that an attacker holds
)

// streamPort is where the daemon serves sessions.
func streamPort(t *testing.T, address string) netip.AddrPort {
	t.Helper()
	return harness.Get(netip.ParseAddrPort(harness.Get(url.Parse(address))(t).Host))(t)
}

// attacker holds TCP connections to the daemon. At its limit it closes the oldest for each new one.
type attacker struct {
	target netip.AddrPort
	say    string // sent on each connection
	most   int
	held   []int
	made   int
}

// connect starts one more connection and does not wait until it is established.
func (a *attacker) connect() error {
	if len(a.held) >= a.most {
		if err := unix.Close(a.held[0]); err != nil {
			return err
		}
		a.held = a.held[1:]
	}
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return fmt.Errorf("socket: %w", err)
	}
	a.held = append(a.held, fd)
	err = unix.Connect(fd, &unix.SockaddrInet4{Port: int(a.target.Port()), Addr: a.target.Addr().As4()})
	if err != nil && !errors.Is(err, unix.EINPROGRESS) && !errors.Is(err, unix.EAGAIN) { // EAGAIN: no port is free
		return fmt.Errorf("connect: %w", err)
	}
	a.made++
	if a.say != "" {
		_, _ = unix.Write(fd, []byte(a.say)) // the daemon may have reset the connection, or not accepted it yet
	}
	return nil
}

func (a *attacker) leave() {
	for _, fd := range a.held {
		_ = unix.Close(fd)
	}
}

// attack makes connections as another user until stop is called. It returns once the attacker holds
// its first connections.
func (a *attacker) attack(ctx context.Context, t *testing.T) (stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(ctx)
	ready, ended := make(chan struct{}), make(chan error, 1)
	go func() {
		runtime.LockOSThread() // never unlocked, so that the thread exits with its user ID
		defer a.leave()
		if _, _, errno := unix.RawSyscall(unix.SYS_SETRESUID, nobody, nobody, nobody); errno != 0 { // this thread only
			close(ready)
			ended <- errno
			return
		}
		pace := time.NewTicker(time.Millisecond) // slow, to avoid attention
		defer pace.Stop()
		var err error
		for err == nil && ctx.Err() == nil {
			err = a.connect()
			if a.made == a.most {
				close(ready)
			}
			if a.made >= a.most {
				<-pace.C
			}
		}
		if a.made < a.most {
			close(ready)
		}
		ended <- err
	}()
	<-ready
	stop = sync.OnceFunc(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Errorf("attacker: %v", err)
		}
		t.Logf("the attacker made %d connections", a.made)
	})
	t.Cleanup(stop)
	return stop
}

// Any user of the node can make any number of connections to the session port. The daemon must
// limit them. Otherwise no descriptor is left for CRI clients and for its own watchdog.
func TestIdleConnectionsDoNotCutKubeletOff(t *testing.T) {
	d := harness.StartDaemon(t, harness.StartedBy("prlimit", fmt.Sprintf("--nofile=%d", fewFiles)))
	c := d.RunPod(t, harness.HostNetwork).Run(t)
	port := streamPort(t, offerExec(t, d, c))
	execIn(t, d, c)
	before := machine.CountFiles(t, d.Cmd.Process.Pid, "fd")
	bound := before + unidentified + 40 // descriptors of the client, an exec and launchers
	for name, say := range map[string]string{"silent": "", "half a request": "GET /exec/AAAA HTTP/1.1\r\nHost: ", "TLS": "\x16\x03\x01\x02\x00"} {
		t.Run(name, func(t *testing.T) {
			defer (&attacker{target: port, say: say, most: idleAttacker}).attack(t.Context(), t)()
			highest := 0
			for range 3 {
				execIn(t, d, c)
				newClientAsks(t, d)
				if _, _, err := d.Cri.ExecSync(t.Context(), c.Id, []string{"true"}, 0); err != nil {
					t.Error(err)
				}
				highest = max(highest, machine.CountFiles(t, d.Cmd.Process.Pid, "fd"))
			}
			t.Logf("descriptors: %d before, at most %d meanwhile, bound %d", before, highest, bound)
			if highest > bound {
				t.Errorf("the daemon had %d descriptors, %d before the attack; the bound is %d", highest, before, bound)
			}
		})
	}
}

func offerExec(t *testing.T, d *harness.Daemon, c *harness.Container) string {
	t.Helper()
	return harness.Get(d.Cri.Exec(t.Context(), &runtimeapi.ExecRequest{ContainerId: c.Id, Cmd: []string{"echo", "here"}, Stdout: true, Stderr: true}))(t).Url
}

// execIn runs an exec session over each protocol.
func execIn(t *testing.T, d *harness.Daemon, c *harness.Container) {
	t.Helper()
	for _, p := range sessions.Protocols {
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		began := time.Now()
		var out, failures bytes.Buffer
		if code, err := p.Stream(ctx, sessions.Plain(), offerExec(t, d, c), remotecommand.StreamOptions{Stdout: &out, Stderr: &failures}); err != nil || code != 0 || out.String() != "here\n" {
			t.Errorf("exec over %s: code %d, %q, %q, %v", p.Name, code, out.String(), failures.String(), err)
		}
		t.Logf("exec over %s: %v", p.Name, time.Since(began).Round(time.Millisecond))
	}
}

// newClientAsks connects to the CRI socket and makes a call, as the watchdog does.
func newClientAsks(t *testing.T, d *harness.Daemon) {
	t.Helper()
	conn := harness.Get(grpc.NewClient("unix://"+d.Socket, grpc.WithTransportCredentials(insecure.NewCredentials())))(t)
	defer conn.Close()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	if _, err := runtimeapi.NewRuntimeServiceClient(conn).Version(ctx, &runtimeapi.VersionRequest{}); err != nil {
		t.Errorf("call of a new CRI client: %v", err)
	}
}

// The maximum number of sessions leaves descriptors for CRI, the watchdog and the daemon itself.
func TestSessionsLeaveDescriptorsForDaemon(t *testing.T) {
	d := harness.StartDaemon(t, harness.StartedBy("prlimit", fmt.Sprintf("--nofile=%d", fewFiles)))
	pod := d.RunPod(t, harness.HostNetwork)
	c := pod.Run(t)
	refused := 0
	for range fewFiles {
		conn, err := forwardSession(t, d, pod)
		if err != nil {
			refused++
			continue
		}
		defer conn.Close()
	}
	used := machine.CountFiles(t, d.Cmd.Process.Pid, "fd")
	t.Logf("%d of %d sessions refused, %d of %d descriptors in use", refused, fewFiles, used, fewFiles)
	if refused == 0 || used > fewFiles-reserved+40 {
		t.Errorf("%d sessions were refused, %d descriptors are in use", refused, used)
	}
	newClientAsks(t, d)
	if _, _, err := d.Cri.ExecSync(t.Context(), c.Id, []string{"true"}, 0); err != nil {
		t.Error(err)
	}
	pod.Run(t)
}

// forwardSession opens a port-forward session.
func forwardSession(t *testing.T, d *harness.Daemon, pod *harness.Pod) (net.Conn, error) {
	t.Helper()
	u := harness.Get(url.Parse(harness.Get(d.Cri.PortForward(t.Context(), &runtimeapi.PortForwardRequest{PodSandboxId: pod.Id}))(t).Url))(t)
	conn, err := net.Dial("tcp", u.Host)
	if err != nil {
		return nil, err
	}
	_ = conn.SetDeadline(time.Now().Add(time.Minute))
	_, err = fmt.Fprintf(conn, "POST %s HTTP/1.1\r\nHost: %s\r\nConnection: Upgrade\r\nUpgrade: SPDY/3.1\r\nX-Stream-Protocol-Version: portforward.k8s.io\r\n\r\n", u.Path, u.Host)
	if err != nil {
		return nil, errors.Join(err, conn.Close())
	}
	response, err := http.ReadResponse(bufio.NewReader(conn), nil)
	if err != nil {
		return nil, errors.Join(err, conn.Close())
	}
	if response.StatusCode != http.StatusSwitchingProtocols {
		return nil, errors.Join(errors.New(strings.TrimSpace(response.Status)), conn.Close())
	}
	return conn, nil
}
