package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	goruntime "runtime"
	"strings"
	"sync/atomic"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"golang.org/x/sys/unix"

	"berth/integration/bench/report"
	"berth/integration/bench/subject"
	"berth/integration/fixture"
)

// coldLinks are the rates of the registry's link, in units that tc(8) reads with "bit".
var coldLinks = []string{"100M", "1G"}

// coldDelay is how long the registry waits before each answer. It stands for the round trip: the
// kernels of some test machines lack netem.
const coldDelay = 20 * time.Millisecond

// coldWorkload is a server in the large image.
type coldWorkload struct {
	name    string
	command []string
	serves  func(context.Context) error // nil error: it answers
}

const coldPort = "8087"

var coldWorkloads = []coldWorkload{
	{"python", []string{"python3", "-m", "http.server", coldPort}, answersHTTP(coldPort)},
	{"import", []string{"python3", "-c", "import pandas, scipy.stats, sklearn.linear_model, matplotlib.pyplot, http.server as h\n" +
		"h.HTTPServer(('', " + coldPort + "), h.SimpleHTTPRequestHandler).serve_forever()"}, answersHTTP(coldPort)},
	{"node", []string{"node", "-e", "require('http').createServer((q, s) => s.end('ok')).listen(" + coldPort + ")"}, answersHTTP(coldPort)},
	{"nginx", []string{"nginx", "-g", "daemon off;"}, answersHTTP("80")},
	{"redis", []string{"redis-server", "--port", coldPort}, answersPing},
}

func coldRows() []report.Row {
	var names []string
	for _, w := range coldWorkloads {
		names = append(names, w.name)
	}
	return report.ColdRows(coldLinks, names)
}

// coldExperiments returns the experiments of option -cold.
func coldExperiments() (all []experiment) {
	for _, link := range coldLinks {
		for _, w := range coldWorkloads {
			key := "cold-" + link + "-" + w.name
			all = append(all, experiment{
				name:    "cold start of " + w.name + ", " + link,
				rows:    []string{key + "-ready", key + "-full", key + "-moved", key + "-waits", key + "-p99", key + "-read"},
				applies: func(s *subject.Subject) bool { return !s.Twin }, warmUp: 1, samples: wanted, limit: 10 * time.Minute, budget: time.Minute,
				sample: func(ctx context.Context, c *contestant) (values, error) {
					started, err := c.b.cold.start(ctx, c.s, link, w)
					return started.values(key), err
				},
			})
		}
	}
	return all
}

// cold has the registry and its link.
type cold struct {
	registry *fixture.Registry
	image    string
	about    string       // describes the image
	moved    atomic.Int64 // bytes that the registry has sent

	namespace *os.File // the registry's network
}

// openCold starts the registry behind its link, containerd, and berth with and without lazy layers.
func (b *bench) openCold(ctx context.Context) (err error) {
	b.cold = &cold{}
	if b.cold.registry, err = b.cold.listen(); err != nil {
		return err
	}
	b.registry = b.cold.registry
	if err := b.cold.push(filepath.Join(b.coldDir, "cold.tar.gz")); err != nil {
		return err
	}
	work, err := b.pushWorkload()
	if err != nil {
		return err
	}
	site := &subject.Site{Machine: b.machine, Dir: b.dir, State: b.state, Work: work, HTTP: b.registry.Host}
	for column, lines := range map[string][]string{report.Ours: nil, report.Lazy: {`lazy.policy = "on"`, `lazy.min_time = "0s"`}} {
		s, err := site.Berth(ctx, column, b.berth, b.revision, false, lines...)
		if err != nil {
			return err
		}
		b.subjects = append(b.subjects, s)
	}
	if b.peers != "" {
		return b.openPeers(ctx, site)
	}
	return nil
}

// Addresses of the registry's link.
const (
	coldAddress = "192.0.2.129"
	coldGateway = "192.0.2.130"
	coldDevice  = "cold0" // this machine's end
	coldOther   = "cold1" // the registry's end
)

// listen starts a registry in a network namespace of its own. The namespace lives as long as the
// registry's socket.
func (c *cold) listen() (*fixture.Registry, error) {
	type result struct {
		registry *fixture.Registry
		err      error
	}
	done := make(chan result)
	go func() {
		goruntime.LockOSThread() // for good: the thread ends with the goroutine
		r, err := c.listenInNamespace()
		done <- result{r, err}
	}()
	r := <-done
	if r.err != nil {
		return nil, fmt.Errorf("registry behind a link: %w", r.err)
	}
	r.registry.Hook(func(http.ResponseWriter, *http.Request) bool {
		time.Sleep(coldDelay)
		return false
	})
	return r.registry, command("ip", "address", "add", coldGateway+"/30", "dev", coldDevice)
}

// shape limits the rate of the link.
func (c *cold) shape(rate string) error {
	return command("nsenter", fmt.Sprintf("--net=/proc/%d/fd/%d", os.Getpid(), c.namespace.Fd()),
		"tc", "qdisc", "replace", "dev", coldOther, "root", "tbf", "rate", rate+"bit", "burst", "256kb", "latency", "100ms")
}

func (c *cold) listenInNamespace() (*fixture.Registry, error) {
	if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
		return nil, os.NewSyscallError("unshare", err)
	}
	machine := fmt.Sprint(os.Getpid()) // ip(8) finds its main thread's namespace
	for _, args := range [][]string{
		{"link", "add", coldOther, "type", "veth", "peer", "name", coldDevice, "netns", machine},
		{"address", "add", coldAddress + "/30", "dev", coldOther},
		{"link", "set", coldOther, "up"},
	} {
		if err := command("ip", args...); err != nil {
			return nil, err
		}
	}
	// The other end must be up before anything is sent.
	if err := command("nsenter", "--net=/proc/"+machine+"/ns/net", "ip", "link", "set", coldDevice, "up"); err != nil {
		return nil, err
	}
	namespace, err := os.Open("/proc/thread-self/ns/net")
	if err != nil {
		return nil, err
	}
	c.namespace = namespace
	return fixture.ListenRegistry(coldAddress+":0", func(l net.Listener) net.Listener { return counted{l, &c.moved} })
}

// counted counts the bytes that its connections send.
type counted struct {
	net.Listener
	n *atomic.Int64
}

// Accept implements net.Listener.
func (l counted) Accept() (net.Conn, error) {
	conn, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	return countedConn{conn, l.n}, nil
}

type countedConn struct {
	net.Conn
	n *atomic.Int64
}

// Write implements net.Conn.
func (c countedConn) Write(p []byte) (int, error) {
	n, err := c.Conn.Write(p)
	c.n.Add(int64(n))
	return n, err
}

func command(name string, args ...string) error {
	if out, err := exec.Command(name, args...).CombinedOutput(); err != nil {
		return fmt.Errorf("%s %s: %w: %s", name, strings.Join(args, " "), err, out)
	}
	return nil
}

// push pushes an image with one layer, a compressed tar.
func (c *cold) push(layerFile string) error {
	layer, err := tarball.LayerFromFile(layerFile)
	if err != nil {
		return fmt.Errorf("layer of the image: %w", err)
	}
	packed, err := layer.Size()
	if err != nil {
		return err
	}
	unpacked, err := layer.Uncompressed()
	if err != nil {
		return err
	}
	size, err := io.Copy(io.Discard, unpacked)
	if err := errors.Join(err, unpacked.Close()); err != nil {
		return err
	}
	img, err := fixture.ImageOf(v1.Config{Env: []string{"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME=/root"}, WorkingDir: "/srv"}, layer)
	if err != nil {
		return err
	}
	c.about = fmt.Sprintf("The image has one gzip layer with Debian's packages of Python (pandas, SciPy, scikit-learn, Matplotlib), node, nginx, redis and compilers: %d MB, and %d MB as a tar.",
		packed/1e6, size/1e6)
	c.image, err = c.registry.Push("bench/cold:latest", img)
	return err
}

// coldStart holds the measurements of a cold start.
type coldStart struct {
	ready, full time.Duration
	moved       int64 // bytes that the registry has sent until ready

	lazy  bool
	waits uint64        // reads that have waited for content until the image was complete
	p99   time.Duration // of these waits
	read  time.Duration // of /usr/lib, after that
}

// values returns the measurements by the keys of their rows.
func (c coldStart) values(key string) values {
	v := values{
		key + "-ready": {c.ready.Seconds()}, key + "-full": {c.full.Seconds()}, key + "-moved": {float64(c.moved) / (1 << 20)},
		key + "-read": {c.read.Seconds()},
	}
	if c.lazy {
		v[key+"-waits"] = []float64{float64(c.waits)}
		v[key+"-p99"] = []float64{c.p99.Seconds() * 1000}
	}
	return v
}

// start pulls the image, which the runtime does not have, and starts a container. It removes both.
func (c *cold) start(ctx context.Context, s *subject.Subject, link string, w coldWorkload) (got coldStart, err error) {
	if err := c.shape(link); err != nil {
		return got, err
	}
	var waits subject.ReadWaits
	if got.lazy = s.Column == report.Lazy; got.lazy {
		if waits, err = s.ReadWaits(ctx); err != nil {
			return got, err
		}
	}
	unix.Sync()
	before, begin := c.moved.Load(), time.Now()
	pod, pulled, err := s.StartService(ctx, c.image, w.command)
	if pod != nil {
		defer func() {
			err = errors.Join(err, pod.Remove(ctx))
			_, removed := s.RemoveImage(ctx, c.image)
			err = errors.Join(err, removed)
		}()
	}
	if err != nil {
		return got, err
	}
	if err := until(ctx, w.serves); err != nil {
		return got, err
	}
	got.ready, got.moved = time.Since(begin), c.moved.Load()-before
	if err := until(ctx, func(context.Context) error { return complete(s) }); err != nil {
		return got, err
	}
	got.full = pulled
	if got.lazy {
		got.full = time.Since(begin)
		now, err := s.ReadWaits(ctx)
		if err != nil {
			return got, err
		}
		got.waits, got.p99 = now.Since(waits)
	}
	got.read, err = pod.Read(ctx, "/usr/lib")
	return got, err
}

// until calls condition every few milliseconds until it returns nil.
func until(ctx context.Context, condition func(context.Context) error) error {
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for {
		err := condition(ctx)
		if err == nil {
			return nil
		}
		select {
		case <-ctx.Done():
			return errors.Join(err, ctx.Err())
		case <-tick.C:
		}
	}
}

// complete returns nil if a runtime has no incomplete layer. Only berth has a directory of them.
func complete(s *subject.Subject) error {
	left, err := os.ReadDir(filepath.Join(s.Root, "images/erofs/lazy"))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	for _, e := range left {
		if e.IsDir() {
			return fmt.Errorf("layer %s is incomplete", e.Name())
		}
	}
	return err
}

// answersHTTP returns a function that checks whether a server at a port answers.
func answersHTTP(port string) func(context.Context) error {
	return func(ctx context.Context) error {
		ctx, cancel := context.WithTimeout(ctx, time.Minute)
		defer cancel()
		request, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://127.0.0.1:"+port+"/", nil)
		if err != nil {
			return err
		}
		request.Close = true // the next server is another one
		response, err := http.DefaultClient.Do(request)
		if err != nil {
			return err
		}
		defer response.Body.Close()
		if response.StatusCode != http.StatusOK {
			return fmt.Errorf("the server answers %s", response.Status)
		}
		return nil
	}
}

func answersPing(ctx context.Context) error {
	conn, err := (&net.Dialer{Timeout: time.Minute}).DialContext(ctx, "tcp", "127.0.0.1:"+coldPort)
	if err != nil {
		return err
	}
	defer conn.Close()
	if _, err := conn.Write([]byte("PING\r\n")); err != nil {
		return err
	}
	line, err := bufio.NewReader(conn).ReadString('\n')
	if err == nil && line != "+PONG\r\n" {
		err = fmt.Errorf("the server answers %q", line)
	}
	return err
}
