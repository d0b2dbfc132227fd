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
	"berth/cmd/berth/config"
	"berth/cmd/berth/serve/exporter"
	"berth/internal/version"
)

// node describes the daemon for the parts.
type node struct {
	cfg     *config.Config
	flags   []string // flags of berth serve that this command got, without --state
	state   string   // the flag that selects the check of the state
	logFile string
	notes   []error // why cfg may not be the daemon's
}

// askLimit bounds the question for the daemon's configuration, which it answers from memory.
const askLimit = 5 * time.Second

// newNode finds the daemon's directories: from the running daemon, else from the configuration
// files, else from the defaults.
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
	ctx, cancel := context.WithTimeout(ctx, askLimit)
	defer cancel()
	c, err := client.Dial(ctx, n.cfg.Listen)
	if err != nil {
		n.notes = append(n.notes, err)
		return n
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
		n.notes = append(n.notes, fmt.Errorf("ask the daemon for its configuration: %w", err))
	}
	return n
}

// parts returns the parts of the bundle. Figures of the running daemon come first, because a
// restart loses them.
func (n *node) parts() []part {
	return []part{
		{name: "goroutines.txt", collect: n.page("/debug/pprof/goroutine?debug=2")},
		{name: "heap.pb.gz", collect: n.page("/debug/pprof/heap"), binary: true},
		{name: "metrics.txt", collect: n.page("/metrics")},
		{name: "daemon.txt", collect: n.daemonProcess},
		{name: "status.json", collect: n.status},
		{name: "pods.json", collect: n.pods},
		{name: "traces.json", collect: n.traces},
		{name: "config.json", collect: n.config},
		{name: "registries.txt", collect: n.registries},
		{name: "cni.txt", collect: n.networks},
		{name: "check.json", collect: n.berth("check", "--json")},
		{name: "check-state.json", collect: n.berth("check", n.state, "--json")},
		{name: "log.txt", collect: n.log},
		{name: "versions.txt", collect: n.versions},
		{name: "kernel.txt", collect: files(kernelFiles...)},
		{name: "kernel-log.txt", collect: command("dmesg", "--level=emerg,alert,crit,err,warn")},
		{name: "mounts.txt", collect: files("/proc/self/mountinfo")},
		{name: "disks.txt", collect: n.disks},
		{name: "cgroups.txt", collect: n.cgroups},
		{name: "processes.txt", collect: processes},
	}
}

var kernelFiles = []string{
	"/proc/version", "/proc/cmdline", "/proc/uptime", "/proc/loadavg", "/proc/meminfo", "/proc/cgroups",
	"/proc/pressure/cpu", "/proc/pressure/memory", "/proc/pressure/io", "/proc/filesystems", "/proc/modules",
	"/proc/sys/kernel/pid_max", "/proc/sys/kernel/threads-max", "/proc/sys/fs/file-nr",
	"/proc/sys/fs/inotify/max_user_instances",
}

// page returns a page of the daemon's debug socket.
func (n *node) page(path string) func(context.Context) ([]byte, error) {
	return func(ctx context.Context) ([]byte, error) {
		resp, err := exporter.Get(ctx, n.cfg.State, path)
		if err != nil {
			return nil, err
		}
		defer resp.Body.Close()
		if resp.StatusCode != http.StatusOK {
			return nil, errors.New(resp.Status)
		}
		return io.ReadAll(io.LimitReader(resp.Body, maxPart+1))
	}
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
	return json.MarshalIndent(answer, "", "  ")
}

// status returns verbose Status.
func (n *node) status(ctx context.Context) ([]byte, error) {
	return n.connected(ctx, func(c *client.Client) (any, error) {
		reply, err := c.RuntimeServiceClient.Status(ctx, &runtimeapi.StatusRequest{Verbose: true})
		if err != nil {
			return nil, err
		}
		answer := map[string]any{"conditions": reply.GetStatus().GetConditions()}
		for key, value := range reply.GetInfo() {
			answer[key] = json.RawMessage(value)
		}
		return answer, nil
	})
}

// object is a pod or container without what may contain secrets.
type object struct {
	ID, Pod, Namespace, Name, Image, Handler, State string `json:",omitempty"`
	Attempt                                         uint32
	Created                                         time.Time
}

// pods lists pods and containers.
func (n *node) pods(ctx context.Context) ([]byte, error) {
	return n.connected(ctx, func(c *client.Client) (any, error) {
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
	})
}

// maxTraces is the number of pods whose traces are collected, newest first.
const maxTraces = 100

// traces returns the traces of the newest pods by ID. It uses no other part of their verbose
// status.
func (n *node) traces(ctx context.Context) ([]byte, error) {
	return n.connected(ctx, func(c *client.Client) (any, error) {
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
}

// config returns the configuration in effect.
func (n *node) config(context.Context) ([]byte, error) {
	content, err := json.MarshalIndent(n.cfg, "", "  ")
	return content, errors.Join(append(n.notes, err)...)
}

// registries returns the hosts.toml files without HTTP headers.
func (n *node) registries(context.Context) ([]byte, error) {
	var b bytes.Buffer
	var failed error
	for _, dir := range n.cfg.RegistryDirs {
		paths, err := filepath.Glob(filepath.Join(dir, "*", "hosts.toml"))
		failed = errors.Join(failed, err)
		for _, path := range paths {
			failed = errors.Join(failed, addFile(&b, path, maskTOML))
		}
	}
	return b.Bytes(), failed
}

// networks returns the CNI configuration files without secrets.
func (n *node) networks(context.Context) ([]byte, error) {
	var b bytes.Buffer
	entries, err := os.ReadDir(n.cfg.CNIConfDir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	for _, e := range entries {
		switch filepath.Ext(e.Name()) {
		case ".conf", ".conflist", ".json":
			err = errors.Join(err, addFile(&b, filepath.Join(n.cfg.CNIConfDir, e.Name()), maskJSON))
		}
	}
	for _, dir := range n.cfg.CNIBinDirs {
		fmt.Fprintf(&b, "==> plugins in %s\n", dir)
		plugins, _ := os.ReadDir(dir) // often missing
		for _, p := range plugins {
			fmt.Fprintln(&b, p.Name())
		}
	}
	return b.Bytes(), err
}

// addFile adds a file's content after convert, under a heading.
func addFile(b *bytes.Buffer, path string, convert func([]byte) ([]byte, error)) error {
	content, err := readFile(path)
	if err == nil {
		content, err = convert(content)
	}
	if err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	fmt.Fprintf(b, "==> %s\n%s\n", path, content)
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

// files returns the contents of files. Missing ones are left out.
func files(paths ...string) func(context.Context) ([]byte, error) {
	return func(context.Context) ([]byte, error) {
		var b bytes.Buffer
		var failed error
		for _, path := range paths {
			err := addFile(&b, path, func(content []byte) ([]byte, error) { return content, nil })
			if !errors.Is(err, fs.ErrNotExist) {
				failed = errors.Join(failed, err)
			}
		}
		return b.Bytes(), failed
	}
}

// berth returns the output of a subcommand of this program. A finding makes checks exit with 1 or
// 3.
func (n *node) berth(args ...string) func(context.Context) ([]byte, error) {
	return func(ctx context.Context) ([]byte, error) {
		content, err := command("/proc/self/exe", append(args, n.flags...)...)(ctx)
		exit, ok := errors.AsType[*exec.ExitError](err)
		if ok && (exit.ExitCode() == 1 || exit.ExitCode() == 3) && len(content) > 0 {
			err = nil
		}
		return content, err
	}
}

// command returns the output of a command, also if it fails or exceeds its limit.
func command(name string, args ...string) func(context.Context) ([]byte, error) {
	return func(ctx context.Context) ([]byte, error) {
		cmd := exec.CommandContext(ctx, name, args...)
		cmd.WaitDelay = lateLimit / 2
		var stderr bytes.Buffer
		cmd.Stderr = &stderr
		content, err := cmd.Output()
		if err != nil && stderr.Len() > 0 {
			text := stderr.String()
			err = fmt.Errorf("%w: %s", err, strings.TrimSpace(text[:min(len(text), 500)]))
		}
		return content, err
	}
}

// maxLog is how much of a log file is kept, from its end.
const maxLog = 4 << 20

// log returns the daemon's log.
func (n *node) log(ctx context.Context) ([]byte, error) {
	if n.logFile == "" {
		return command("journalctl", "--unit=berth", "--since=-6h", "--lines=20000", "--no-pager", "--output=short-iso")(ctx)
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
	return io.ReadAll(io.LimitReader(f, maxPart))
}

// versions returns the versions of berth, Go, the kernel and the distribution.
func (n *node) versions(ctx context.Context) ([]byte, error) {
	var b bytes.Buffer
	fmt.Fprintf(&b, "berth %s\n%s %s/%s\n", version.Full(), runtime.Version(), runtime.GOOS, runtime.GOARCH)
	var u unix.Utsname
	if err := unix.Uname(&u); err == nil {
		for _, field := range [][65]byte{u.Sysname, u.Release, u.Version, u.Machine} {
			fmt.Fprintf(&b, "%s ", unix.ByteSliceToString(field[:]))
		}
		b.WriteByte('\n')
	}
	content, err := files("/etc/os-release")(ctx)
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
func (n *node) disks(context.Context) ([]byte, error) {
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
