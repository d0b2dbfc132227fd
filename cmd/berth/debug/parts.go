package debug

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"time"

	"github.com/spf13/pflag"
	"golang.org/x/sys/unix"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/cmd/berth/client"
	"berth/cmd/berthd/daemon"
	"berth/cmd/berthd/exporter"
	"berth/cmd/config"
	"berth/internal/version"
)

// node describes the daemon for the parts.
type node struct {
	mask    *masker
	cfg     *config.Config
	flags   []string // flags of the daemon that this command got, without --state
	state   string   // the flag that selects the check of the state
	logFile string
	notes   []error // why cfg may not be the daemon's
}

// askTimeout bounds the question for the daemon's configuration, which it answers from memory.
const askTimeout = 5 * time.Second

// newNode finds the daemon's directories. It asks the running daemon, or else reads the
// configuration files, or else uses the defaults.
func newNode(ctx context.Context, flags *pflag.FlagSet, logFile string) *node {
	n := &node{cfg: config.Default(), logFile: logFile, state: "--state"}
	flags.Visit(func(f *pflag.Flag) {
		given := "--" + f.Name + "=" + f.Value.String()
		switch f.Name {
		case "output", "limit", "log":
		case "state":
			n.state = given
		default:
			n.flags = append(n.flags, given)
		}
	})
	if cfg, _, err := config.Load(flags); err == nil {
		n.cfg = cfg
	} else {
		n.notes = append(n.notes, fmt.Errorf("read the configuration: %w", err))
	}
	if err := n.ask(ctx); err != nil {
		n.notes = append(n.notes, err)
	}
	n.learn(ctx)
	return n
}

// ask takes the configuration of the running daemon.
func (n *node) ask(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	c, err := client.Dial(ctx, n.cfg.Listen)
	if err != nil {
		return err
	}
	defer c.Close() // no call is in progress
	reported, err := c.Settings(ctx)
	if err == nil {
		var running *config.Config
		if running, err = config.LoadReported(pflag.NewFlagSet("", pflag.ContinueOnError), reported); err == nil {
			running.Listen = n.cfg.Listen // systemd may have passed the socket
			n.cfg = running
		}
	}
	if err != nil {
		return fmt.Errorf("ask the daemon for its configuration: %w", err)
	}
	return nil
}

// learn makes the masker, with the names of the node's objects.
func (n *node) learn(ctx context.Context) {
	programs := []string{"/proc/self/exe"}
	if self, err := os.Executable(); err == nil {
		dir := filepath.Dir(self)
		shim := cmp.Or(n.cfg.ShimPath, filepath.Join(dir, "berth-shim"))
		programs = append(programs, filepath.Join(dir, daemon.Program), shim)
	}
	m, err := newMasker(programs...)
	if err != nil {
		n.notes = append(n.notes, err)
	}
	names := append([]string{hostName(), version.Full()}, n.cfg.Paths()...)
	var u unix.Utsname
	if unix.Uname(&u) == nil {
		names = append(names, unix.ByteSliceToString(u.Release[:]))
	}
	for _, dir := range n.cfg.RegistryDirs {
		hosts, _ := filepath.Glob(filepath.Join(dir, "*", "hosts.toml")) // the part reports errors
		for _, path := range hosts {
			names = append(names, filepath.Base(filepath.Dir(path)))
		}
	}
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	objects, _ := n.objects(ctx) // the part reports errors
	for _, o := range objects {
		names = append(names, o.ID, o.Namespace, o.Name, o.Image)
	}
	n.mask = m.with(names...)
}

// parts returns the parts of the bundle. Figures of the running daemon come first, because a
// restart loses them.
func (n *node) parts() []part {
	return []part{
		{"goroutines.txt", n.page("/debug/pprof/goroutine?debug=2", n.mask.stacks)},
		{"heap.pb.gz", n.page("/debug/pprof/heap", asIs)}, // functions and sizes
		{"metrics.txt", n.page(exporter.AllMetrics, n.mask.samples)},
		{"daemon.txt", n.daemonProcess},
		{"status.json", n.status},
		{"pods.json", n.pods},
		{"traces.json", n.traces},
		{"config.json", n.config},
		{"registries.txt", n.registries},
		{"cni.txt", n.networks},
		{"check.json", n.berth("check", "--json")},
		{"check-state.json", n.berth("check", n.state, "--json")},
		{"log.txt", n.log},
		{"versions.txt", n.versions},
		{"kernel.txt", n.kernel},
		{"kernel-log.txt", command(n.mask.free, "dmesg", "--level=emerg,alert,crit,err,warn")},
		{"mounts.txt", n.files(n.mask.mounts, "/proc/self/mountinfo")},
		{"disks.txt", n.disks},
		{"cgroups.txt", n.cgroups},
		{"processes.txt", n.processes},
	}
}

// kernelFiles contain numbers and names that the kernel gives.
var kernelFiles = []string{
	"/proc/version", "/proc/uptime", "/proc/loadavg", "/proc/meminfo", "/proc/cgroups",
	"/proc/pressure/cpu", "/proc/pressure/memory", "/proc/pressure/io", "/proc/filesystems", "/proc/modules",
	"/proc/sys/kernel/pid_max", "/proc/sys/kernel/threads-max", "/proc/sys/fs/file-nr",
	"/proc/sys/fs/inotify/max_user_instances",
}

// kernel returns the kernel's parameters, version and figures.
func (n *node) kernel(ctx context.Context) (clean, error) {
	parameters, err := n.files(n.mask.free, "/proc/cmdline")(ctx)
	figures, figuresErr := n.files(asIs, kernelFiles...)(ctx)
	return append(parameters, figures...), errors.Join(err, figuresErr)
}

// page returns a page of the daemon's debug socket.
func (n *node) page(path string, convert cleaner) collector {
	return func(ctx context.Context) (clean, error) {
		resp, err := exporter.Get(ctx, n.cfg.State, path)
		if err != nil {
			return nil, err
		}
		defer resp.Body.Close()
		if resp.StatusCode != http.StatusOK {
			return nil, errors.New(resp.Status)
		}
		content, err := io.ReadAll(io.LimitReader(resp.Body, maxPart+1))
		return converted(convert, content, err)
	}
}

// converted cleans content that may be partial.
func converted(convert cleaner, content []byte, err error) (clean, error) {
	cleaned, convertErr := convert(content)
	return cleaned, errors.Join(err, convertErr)
}

// connected calls ask with a connection to the daemon, and encodes the answer.
func (n *node) connected(ctx context.Context, ask func(*client.Client) (any, error)) ([]byte, error) {
	c, err := client.Dial(ctx, n.cfg.Listen)
	if err != nil {
		return nil, err
	}
	defer c.Close() // no call is in progress
	answer, err := ask(c)
	if err != nil {
		return nil, err
	}
	return json.Marshal(answer)
}

// status returns verbose Status. The configuration is a separate part.
func (n *node) status(ctx context.Context) (clean, error) {
	content, err := n.connected(ctx, func(c *client.Client) (any, error) {
		reply, err := c.RuntimeServiceClient.Status(ctx, &runtimeapi.StatusRequest{Verbose: true})
		if err != nil {
			return nil, err
		}
		answer := map[string]any{"conditions": reply.GetStatus().GetConditions()}
		for key, value := range reply.GetInfo() {
			if key != "config" {
				answer[key] = json.RawMessage(value)
			}
		}
		return answer, nil
	})
	if err != nil {
		return nil, err
	}
	return n.mask.document(content)
}

// object is a pod or container, without the fields that may contain secrets.
type object struct {
	ID, Pod, Namespace, Name, Image, Handler, State string `json:",omitempty"`
	Attempt                                         uint32
	Created                                         time.Time
}

// pods lists pods and containers.
func (n *node) pods(ctx context.Context) (clean, error) {
	all, err := n.objects(ctx)
	content, encodeErr := indented(all)
	return content, errors.Join(err, encodeErr)
}

// objects asks the daemon for pods and containers.
func (n *node) objects(ctx context.Context) ([]object, error) {
	c, err := client.Dial(ctx, n.cfg.Listen)
	if err != nil {
		return nil, err
	}
	defer c.Close() // no call is in progress
	all := []object{}
	pods, err := c.ListPodSandbox(ctx, &runtimeapi.ListPodSandboxRequest{})
	if err != nil {
		return nil, err
	}
	for _, p := range pods.GetItems() {
		all = append(all, object{ID: p.GetId(), Namespace: p.GetMetadata().GetNamespace(), Name: p.GetMetadata().GetName(),
			Handler: p.GetRuntimeHandler(), State: p.GetState().String(), Attempt: p.GetMetadata().GetAttempt(),
			Created: time.Unix(0, p.GetCreatedAt())})
	}
	containers, err := c.ListContainers(ctx, &runtimeapi.ListContainersRequest{})
	for _, x := range containers.GetContainers() {
		all = append(all, object{ID: x.GetId(), Pod: x.GetPodSandboxId(), Name: x.GetMetadata().GetName(),
			Image: x.GetImage().GetImage(), State: x.GetState().String(), Attempt: x.GetMetadata().GetAttempt(),
			Created: time.Unix(0, x.GetCreatedAt())})
	}
	return all, err
}

// maxTraces is the number of pods whose traces are collected, newest first.
const maxTraces = 100

// traces returns the traces of the newest pods by ID. It uses no other part of their verbose
// status.
func (n *node) traces(ctx context.Context) (clean, error) {
	content, err := n.connected(ctx, func(c *client.Client) (any, error) {
		reply, err := c.ListPodSandbox(ctx, &runtimeapi.ListPodSandboxRequest{})
		if err != nil {
			return nil, err
		}
		pods := reply.GetItems()
		slices.SortFunc(pods, func(a, b *runtimeapi.PodSandbox) int {
			return cmp.Compare(b.GetCreatedAt(), a.GetCreatedAt())
		})
		all := map[string]json.RawMessage{}
		for _, p := range pods[:min(len(pods), maxTraces)] {
			status, err := c.PodSandboxStatus(ctx, &runtimeapi.PodSandboxStatusRequest{PodSandboxId: p.GetId(), Verbose: true})
			if err != nil {
				continue // the pod may be gone
			}
			if text := status.GetInfo()["trace"]; text != "" {
				all[p.GetId()] = json.RawMessage(text)
			}
		}
		return all, ctx.Err()
	})
	if err != nil {
		return nil, err
	}
	return n.mask.document(content)
}

// config returns the configuration in effect.
func (n *node) config(context.Context) (clean, error) {
	content, err := indented(n.cfg.Masked(n.mask.text))
	return content, errors.Join(append(n.notes, err)...)
}

// registries returns the hosts.toml files without HTTP headers.
func (n *node) registries(context.Context) (clean, error) {
	var b bytes.Buffer
	var failed error
	for _, dir := range n.cfg.RegistryDirs {
		paths, err := filepath.Glob(filepath.Join(dir, "*", "hosts.toml"))
		failed = errors.Join(failed, err)
		for _, path := range paths {
			failed = errors.Join(failed, n.addFile(&b, path, n.mask.hosts))
		}
	}
	return b.Bytes(), failed
}

// networks returns the CNI configuration files without secrets.
func (n *node) networks(context.Context) (clean, error) {
	var b bytes.Buffer
	entries, err := os.ReadDir(n.cfg.CNIConfDir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	for _, e := range entries {
		switch filepath.Ext(e.Name()) {
		case ".conf", ".conflist", ".json":
			err = errors.Join(err, n.addFile(&b, filepath.Join(n.cfg.CNIConfDir, e.Name()), n.mask.network))
		}
	}
	for _, dir := range n.cfg.CNIBinDirs {
		fmt.Fprintf(&b, "==> plugins in %s\n", dir)
		plugins, _ := os.ReadDir(dir) // often missing
		for _, p := range plugins {
			if identifier.MatchString(p.Name()) {
				fmt.Fprintln(&b, p.Name())
			}
		}
	}
	return b.Bytes(), err
}

// addFile adds a file's content after convert, under a heading.
func (n *node) addFile(b *bytes.Buffer, path string, convert cleaner) error {
	content, err := readFile(path)
	if err == nil {
		content, err = convert(content)
	}
	if err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	fmt.Fprintf(b, "==> %s\n%s\n", n.mask.text(path), content)
	return nil
}

// readFile reads at most maxPart bytes.
func readFile(path string) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return io.ReadAll(io.LimitReader(f, maxPart))
}

// files returns the contents of files. Missing files are left out.
func (n *node) files(convert cleaner, paths ...string) collector {
	return func(context.Context) (clean, error) {
		var b bytes.Buffer
		var failed error
		for _, path := range paths {
			if err := n.addFile(&b, path, convert); !errors.Is(err, fs.ErrNotExist) {
				failed = errors.Join(failed, err)
			}
		}
		return b.Bytes(), failed
	}
}

// berth returns the output of a subcommand of this program. A finding makes checks exit with 1 or
// 3.
func (n *node) berth(args ...string) collector {
	return func(ctx context.Context) (clean, error) {
		content, err := output(ctx, "/proc/self/exe", append(args, n.flags...)...)
		exit, ok := errors.AsType[*exec.ExitError](err)
		if ok && (exit.ExitCode() == 1 || exit.ExitCode() == 3) && len(content) > 0 {
			err = nil
		}
		return converted(n.mask.document, content, err)
	}
}

// command returns the output of a command.
func command(convert cleaner, name string, args ...string) collector {
	return func(ctx context.Context) (clean, error) {
		content, err := output(ctx, name, args...)
		return converted(convert, content, err)
	}
}

// output returns the output of a command, also if it fails or exceeds its limit.
func output(ctx context.Context, name string, args ...string) ([]byte, error) {
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.WaitDelay = lateTimeout / 2
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	content, err := cmd.Output()
	if err != nil && stderr.Len() > 0 {
		text := stderr.String()
		err = fmt.Errorf("%w: %s", err, strings.TrimSpace(text[:min(len(text), 500)]))
	}
	return content, err
}

// maxLog is how much of a log file is kept, from its end.
const maxLog = 4 << 20

// log returns the daemon's log.
func (n *node) log(ctx context.Context) (clean, error) {
	if n.logFile == "" {
		return command(n.mask.logLines, "journalctl", "--unit=berth", "--since=-6h", "--lines=20000", "--no-pager",
			"--output=short-iso")(ctx)
	}
	f, err := os.Open(n.logFile)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	if info, err := f.Stat(); err == nil && info.Size() > maxLog {
		if _, err := f.Seek(-maxLog, io.SeekEnd); err != nil {
			return nil, err
		}
	}
	content, err := io.ReadAll(io.LimitReader(f, maxPart))
	return converted(n.mask.logLines, content, err)
}

// versions returns the versions of berth, Go, the kernel and the distribution.
func (n *node) versions(ctx context.Context) (clean, error) {
	var b bytes.Buffer
	fmt.Fprintf(&b, "berth %s\n%s %s/%s\n", version.Full(), runtime.Version(), runtime.GOOS, runtime.GOARCH)
	var u unix.Utsname
	if err := unix.Uname(&u); err == nil {
		for _, field := range [][65]byte{u.Sysname, u.Release, u.Version, u.Machine} {
			fmt.Fprintf(&b, "%s ", unix.ByteSliceToString(field[:]))
		}
		b.WriteByte('\n')
	}
	content, err := n.files(asIs, "/etc/os-release")(ctx)
	b.Write(content)
	if daemon, askErr := n.connected(ctx, func(c *client.Client) (any, error) {
		return c.Version(ctx, &runtimeapi.VersionRequest{})
	}); askErr == nil {
		fmt.Fprintf(&b, "==> daemon\n%s\n", daemon)
	} else {
		err = errors.Join(err, askErr)
	}
	return b.Bytes(), err
}

// disks returns the free space of berth's filesystems.
func (n *node) disks(context.Context) (clean, error) {
	var b bytes.Buffer
	var failed error
	for _, path := range []string{n.cfg.Root, n.cfg.State, "/var/log", "/"} {
		var st unix.Statfs_t
		if err := unix.Statfs(path, &st); err != nil {
			failed = errors.Join(failed, &fs.PathError{Op: "statfs", Path: path, Err: err})
			continue
		}
		fmt.Fprintf(&b, "%s: type 0x%x, %d of %d MiB available, %d of %d inodes free\n", path, st.Type,
			st.Bavail*uint64(st.Bsize)>>20, st.Blocks*uint64(st.Bsize)>>20, st.Ffree, st.Files)
	}
	return b.Bytes(), failed
}
