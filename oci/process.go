package oci

import (
	"path"
	"slices"
	"strings"

	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"github.com/opencontainers/runtime-spec/specs-go"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/internal/errdefs"
)

const defaultPath = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

// processArgs builds the command line by Kubernetes' rules. command replaces the image's Entrypoint
// and Cmd, and args replaces Cmd.
// https://kubernetes.io/docs/tasks/inject-data-application/define-command-argument-container/
func processArgs(config *runtimeapi.ContainerConfig, image *ocispec.ImageConfig) ([]string, error) {
	command, args := config.GetCommand(), config.GetArgs()
	if len(command) == 0 {
		command = image.Entrypoint
		if len(command) == 1 && command[0] == "" { // written by Dockerfiles that reset the base image's ENTRYPOINT
			command = nil
		}
		if len(args) == 0 {
			args = image.Cmd
		}
	}
	line := slices.Concat(command, args)
	if len(line) == 0 {
		return nil, errdefs.InvalidArgument("no command: neither the container nor its image has one")
	}
	if line[0] == "" {
		return nil, errdefs.InvalidArgument("command is an empty string")
	}
	for _, arg := range line {
		if strings.IndexByte(arg, 0) >= 0 {
			return nil, errdefs.InvalidArgument("command: NUL byte in %q", arg)
		}
	}
	return line, nil
}

// environment is an ordered list of variables. A variable that is set again keeps its position.
type environment struct {
	vars  []string
	index map[string]int
}

func (e *environment) set(key, value string) {
	// The spec is JSON, which cannot hold invalid UTF-8, but a secret can. As in containerd and
	// CRI-O, it is replaced by U+FFFD.
	v := strings.ToValidUTF8(key+"="+value, "\uFFFD")
	if i, ok := e.index[key]; ok {
		e.vars[i] = v
		return
	}
	if e.index == nil {
		e.index = make(map[string]int)
	}
	e.index[key] = len(e.vars)
	e.vars = append(e.vars, v)
}

func (e *environment) get(key string) string {
	i, ok := e.index[key]
	if !ok {
		return ""
	}
	return e.vars[i][len(key)+1:]
}

// processEnv returns the environment. It has the variables of berth, of the node, of the image and
// of the CRI config. Later variables replace earlier ones.
func processEnv(in ContainerInput) ([]string, error) {
	var e environment
	setDefaults(&e, in)
	for _, kv := range in.Defaults.Env {
		name, value, _ := strings.Cut(kv, "=")
		e.set(name, value)
	}
	if err := e.addImage(in.Image.Env); err != nil {
		return nil, err
	}
	for _, kv := range in.Config.GetEnvs() {
		key, value := kv.GetKey(), string(kv.GetValue())
		if key == "" || strings.ContainsAny(key, "=\x00") || strings.IndexByte(value, 0) >= 0 {
			return nil, errdefs.InvalidArgument("environment variable %q: empty name, or '=' or NUL in it", key)
		}
		e.set(key, value)
	}
	if e.get("HOME") == "" {
		e.set("HOME", in.User.HomeVariable())
	}
	return e.vars, nil
}

func setDefaults(e *environment, in ContainerInput) {
	key, value, _ := strings.Cut(defaultPath, "=")
	e.set(key, value)
	hostname := in.Pod.Config.GetHostname()
	if hostname == "" {
		hostname = in.Host.Hostname
	}
	e.set("HOSTNAME", hostname)
	if in.Config.GetTty() {
		e.set("TERM", "xterm")
	}
}

// addImage adds the variables of an image config. Like containerd it ignores entries that have no
// name, which occur in some images.
func (e *environment) addImage(env []string) error {
	for _, kv := range env {
		key, value, ok := strings.Cut(kv, "=")
		if !ok || key == "" {
			continue
		}
		if strings.IndexByte(kv, 0) >= 0 {
			return errdefs.InvalidArgument("image environment variable %q: NUL byte", key)
		}
		e.set(key, value)
	}
	return nil
}

// processCwd returns the working directory of the CRI config, of the image, or "/".
func processCwd(config, image string) (string, error) {
	dir := config
	if dir == "" {
		dir = image
	}
	if dir == "" {
		return "/", nil
	}
	if !path.IsAbs(dir) || strings.IndexByte(dir, 0) >= 0 {
		return "", errdefs.InvalidArgument("working directory %q is not an absolute path", dir)
	}
	clean := path.Clean(dir)
	if isProcessDir(clean) {
		return "", errdefs.InvalidArgument("working directory %q leads through a process's own files", dir)
	}
	return clean, nil
}

// isProcessDir reports whether a clean path is in a process's directory below /proc. While a
// container is being created, fd/N and cwd there lead out of the container (CVE-2024-21626).
// libcontainer checks the directory after chdir, so it detects links of the image that lead there.
func isProcessDir(p string) bool {
	rest, ok := strings.CutPrefix(p, "/proc/")
	if !ok {
		return false
	}
	name, _, _ := strings.Cut(rest, "/")
	return name == "self" || name == "thread-self" || strings.Trim(name, "0123456789") == ""
}

// ExecProcess returns the process of an exec in a container. It has the user, groups, capabilities,
// environment, directory, labels and limits of the container's first process. cmd must not be
// empty. The result shares no memory with spec.
func ExecProcess(spec *specs.Spec, cmd []string, tty bool) *specs.Process {
	p := *spec.Process
	p.Args = slices.Clone(cmd)
	p.Terminal = tty
	p.ConsoleSize = nil
	p.Env = slices.Clone(p.Env)
	if tty && !slices.ContainsFunc(p.Env, func(kv string) bool { return strings.HasPrefix(kv, "TERM=") }) {
		p.Env = append(p.Env, "TERM=xterm")
	}
	p.User.AdditionalGids = slices.Clone(p.User.AdditionalGids)
	p.Rlimits = slices.Clone(p.Rlimits)
	p.Capabilities = cloneCapabilities(p.Capabilities)
	if p.OOMScoreAdj != nil {
		score := *p.OOMScoreAdj
		p.OOMScoreAdj = &score
	}
	if p.Scheduler != nil { // set by a plugin, like the next field
		scheduler := *p.Scheduler
		scheduler.Flags = slices.Clone(scheduler.Flags)
		p.Scheduler = &scheduler
	}
	if p.IOPriority != nil {
		priority := *p.IOPriority
		p.IOPriority = &priority
	}
	return &p
}

func cloneCapabilities(c *specs.LinuxCapabilities) *specs.LinuxCapabilities {
	if c == nil {
		return nil
	}
	return &specs.LinuxCapabilities{
		Bounding:    slices.Clone(c.Bounding),
		Effective:   slices.Clone(c.Effective),
		Permitted:   slices.Clone(c.Permitted),
		Inheritable: slices.Clone(c.Inheritable),
		Ambient:     slices.Clone(c.Ambient),
	}
}
