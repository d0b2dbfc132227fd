package subject

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Daemon is a runtime's daemon that the benchmark starts.
type Daemon struct {
	Socket string // CRI socket
	args   []string
	env    []string
	log    string
	procs  string // cgroup.procs of its cgroup

	cmd    *exec.Cmd
	exited chan error // buffered; gets the result of cmd.Wait
}

// Site holds the places of the runtimes that the benchmark starts.
type Site struct {
	Machine string // name of the cgroup of all runtimes and pods
	Dir     string // on a disk: images, copies of programs, logs
	State   string // on tmpfs: files that do not outlive the boot
	Work    Workload
	CRIU    string // program for berth; empty: no checkpoints
	HTTP    string // a registry that speaks plain HTTP, but not on loopback; empty: none
	// WithoutCPU is a program that runs the peers' OCI runtimes without the pods' CPU weight,
	// because the cpu controller is missing (testdata/withoutcpu.c). Empty: not needed.
	WithoutCPU string

	bridges int
}

// startLimit is how long a daemon may take until it answers.
const startLimit = 2 * time.Minute

// recipe describes how to start a daemon.
type recipe struct {
	name     string   // name of its directory and its cgroup
	programs []string // paths; the daemon gets copies, so that it shares no page of its programs with other processes
	// ociRuntime is the path of another program to copy. Where the cpu controller is missing, its
	// copy has the suffix .oci, and Site.WithoutCPU takes its name. Empty: none.
	ociRuntime string
	config     string // content of its configuration file
	// args returns the command line. bin is the directory of the copies, config the path of the
	// configuration file.
	args func(bin, config string) []string
}

// start makes directories and cgroups for a daemon, starts the daemon and connects s to it.
func (at *Site) start(ctx context.Context, s *Subject, r recipe) (*Subject, error) {
	dir := at.dir(r.name)
	for _, path := range []string{dir.bin, dir.netd, dir.state, s.Root} {
		if err := os.MkdirAll(path, 0o711); err != nil {
			return nil, err
		}
	}
	copies := map[string]string{}
	for _, program := range r.programs {
		copies[filepath.Base(program)] = program
	}
	if r.ociRuntime != "" {
		oci := filepath.Base(r.ociRuntime)
		copies[oci] = r.ociRuntime
		if at.WithoutCPU != "" {
			copies[oci], copies[oci+".oci"] = at.WithoutCPU, r.ociRuntime
		}
	}
	for name, program := range copies {
		if err := copyProgram(filepath.Join(dir.bin, name), program); err != nil {
			return nil, err
		}
	}
	if err := os.WriteFile(dir.config, []byte(r.config), 0o600); err != nil {
		return nil, err
	}
	cgroup := filepath.Join("/", at.Machine, r.name)
	procs, err := makeCgroup(cgroup + "/daemon")
	if err != nil {
		return nil, err
	}
	s.cgroups, s.parent = []string{cgroup}, cgroup+"/pods"
	s.logs, s.Image, s.Command = dir.logs, at.Work.Image, at.Work.command()
	s.Daemon = &Daemon{
		Socket: dir.socket, args: r.args(dir.bin, dir.config), log: dir.log, procs: procs,
		env: append(os.Environ(), "PATH="+dir.bin+":"+os.Getenv("PATH")),
	}
	if err := s.startDaemon(ctx); err != nil {
		return nil, errors.Join(fmt.Errorf("%s: %w", r.name, err), s.Daemon.stop())
	}
	return s, nil
}

// dirs are the places of one daemon.
type dirs struct{ bin, netd, state, config, logs, log, socket string }

func (at *Site) dir(name string) dirs {
	d, state := filepath.Join(at.Dir, name), filepath.Join(at.State, name)
	return dirs{
		bin: d + "/bin", netd: d + "/net.d", config: d + "/config.toml", logs: d + "/logs", log: d + "/log",
		state: state, socket: state + "/cri.sock",
	}
}

// copyProgram copies an executable file in small pieces, as package managers and cp do. Linux
// (6.18, ext4) caches a file that was written at once in pages of 2 MiB. A daemon that touches one
// byte of such a page is charged for the whole page: 31 MiB instead of 10 in berth's case.
func copyProgram(to, from string) (err error) {
	source, err := os.Open(from)
	if err != nil {
		return err
	}
	defer source.Close()
	target, err := os.OpenFile(to, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o755)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, target.Close()) }()
	_, err = io.CopyBuffer(struct{ io.Writer }{target}, struct{ io.Reader }{source}, make([]byte, 32<<10))
	return err
}

// Restart stops the daemon and starts it again. It returns the time from the start until the daemon
// lists all pods.
func (s *Subject) Restart(ctx context.Context, pods int) (time.Duration, error) {
	if err := s.Daemon.stop(); err != nil {
		return 0, err
	}
	begin := time.Now()
	if err := s.startDaemon(ctx); err != nil {
		return 0, err
	}
	n, err := s.CountPods(ctx)
	took := time.Since(begin)
	if err == nil && n != pods {
		err = fmt.Errorf("the restarted daemon lists %d pods, want %d", n, pods)
	}
	return took, err
}

// startDaemon starts the daemon and waits until it answers.
func (s *Subject) startDaemon(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, startLimit)
	defer cancel()
	d := s.Daemon
	if err := d.start(); err != nil {
		return err
	}
	for {
		err := s.connect(ctx, d.Socket)
		if err == nil {
			return nil
		}
		select {
		case ended := <-d.exited:
			d.exited <- ended // for stop
			return fmt.Errorf("daemon exited: %w; end of its log: %s", ended, d.tail())
		case <-ctx.Done():
			return fmt.Errorf("daemon does not answer: %w; end of its log: %s", err, d.tail())
		case <-time.After(time.Millisecond):
		}
	}
}

func (d *Daemon) start() error {
	log, err := os.OpenFile(d.log, os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o600)
	if err != nil {
		return err
	}
	defer log.Close()
	// The daemon moves itself into its cgroup before it starts, so that all its children are
	// inside.
	d.cmd = exec.Command("/bin/sh", slices.Concat([]string{"-c", `echo $$ >"$0" && exec "$@"`, d.procs}, d.args)...)
	d.cmd.Env, d.cmd.Stdout, d.cmd.Stderr = d.env, log, log
	if err := d.cmd.Start(); err != nil {
		return err
	}
	d.exited = make(chan error, 1)
	go func(cmd *exec.Cmd, exited chan<- error) { exited <- cmd.Wait() }(d.cmd, d.exited)
	return nil
}

// stop stops the daemon. Its pods go on.
func (d *Daemon) stop() error {
	if d.exited == nil {
		return nil
	}
	if err := d.cmd.Process.Signal(unix.SIGTERM); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return fmt.Errorf("stop the daemon: %w", err)
	}
	var err error
	select {
	case err = <-d.exited:
	case <-time.After(startLimit):
		err = errors.Join(fmt.Errorf("daemon ran %v after SIGTERM", startLimit), d.cmd.Process.Kill(), <-d.exited)
	}
	d.exited = nil
	var exit *exec.ExitError
	if errors.As(err, &exit) && exit.Sys().(syscall.WaitStatus).Signal() == unix.SIGTERM {
		err = nil // the signal may have killed the daemon
	}
	if err != nil {
		return fmt.Errorf("daemon exited: %w; end of its log: %s", err, d.tail())
	}
	return nil
}

// tail returns the end of the daemon's log.
func (d *Daemon) tail() string {
	content, err := os.ReadFile(d.log)
	if err != nil {
		return err.Error()
	}
	return fmt.Sprintf("%q", content[max(0, len(content)-2000):])
}
