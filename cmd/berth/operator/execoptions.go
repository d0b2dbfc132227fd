package operator

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"strings"

	"github.com/spf13/pflag"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/cmd/berth/client"
	"berth/internal/safefs"
	"berth/oci/users"
	"berth/sandbox/stream"
	"berth/server/admin"
)

// execOptions are flags of exec that CRI has no fields for.
type execOptions struct {
	user, dir string
	env       []string
}

func (o *execOptions) addFlags(flags *pflag.FlagSet) {
	flags.StringVarP(&o.user, "user", "u", "", "user of the command: NAME|UID[:GROUP|GID] (default: the container's)")
	flags.StringVarP(&o.dir, "workdir", "w", "", "directory of the command (default: the container's)")
	flags.StringArrayVarP(&o.env, "env", "e", nil, "NAME=VALUE for the command's environment; NAME alone passes on berth's own")
}

func (o *execOptions) isEmpty() bool { return o.user == "" && o.dir == "" && len(o.env) == 0 }

// url asks the runtime for a session. If there are no options, it uses CRI.
func (o *execOptions) url(ctx context.Context, c *client.Client, container *runtimeapi.Container,
	req *runtimeapi.ExecRequest) (string, error) {
	if o.isEmpty() {
		reply, err := c.Exec(ctx, req)
		return reply.GetUrl(), err
	}
	options, err := o.resolve(ctx, c, container)
	if err != nil {
		return "", err
	}
	return c.ExecWith(ctx, admin.ExecRequest{ContainerID: req.GetContainerId(), Args: req.GetCmd(), TTY: req.GetTty(),
		Stdin: req.GetStdin(), Stdout: req.GetStdout(), Stderr: req.GetStderr(), Options: options})
}

// resolve finds the user in the container's files, and takes variables without a value from this
// process's environment.
func (o *execOptions) resolve(ctx context.Context, c *client.Client,
	container *runtimeapi.Container) (stream.ExecOptions, error) {
	options := stream.ExecOptions{Dir: o.dir}
	for _, variable := range o.env {
		if !strings.Contains(variable, "=") {
			value, ok := os.LookupEnv(variable)
			if !ok {
				continue // as in docker and podman
			}
			variable += "=" + value
		}
		options.Env = append(options.Env, variable)
	}
	if o.user == "" {
		return options, options.Check()
	}
	passwd, group, err := accountFiles(ctx, c, container)
	if err != nil {
		return options, err
	}
	user, err := users.Resolve(passwd, group, users.Request{ImageUser: o.user})
	if err != nil {
		return options, fmt.Errorf("--user: %w", err)
	}
	options.User = &stream.ExecUser{UID: user.UID, GID: user.GID, Groups: user.Groups}
	hasHome := slices.ContainsFunc(options.Env, func(v string) bool { return strings.HasPrefix(v, "HOME=") })
	if user.Home != "" && !hasHome {
		options.Env = append(options.Env, "HOME="+user.Home)
	}
	return options, options.Check()
}

// accountFiles reads /etc/passwd and /etc/group of a running container. A missing file is nil.
func accountFiles(ctx context.Context, c *client.Client,
	container *runtimeapi.Container) (passwd, group []byte, err error) {
	p, err := openProcess(ctx, c, container)
	if err != nil {
		return nil, nil, err
	}
	defer p.close()
	root, err := safefs.OpenRoot(fmt.Sprintf("/proc/%d/root", p.pid))
	if err != nil {
		return nil, nil, err
	}
	defer root.Close()
	if err := p.alive(); err != nil {
		return nil, nil, err
	}
	read := func(path string) []byte {
		data, readErr := safefs.ReadFile(root, path, users.MaxFile)
		if readErr != nil && !errors.Is(readErr, fs.ErrNotExist) {
			err = errors.Join(err, fmt.Errorf("read /%s of container %s: %w", path, p.container, readErr))
		}
		return data
	}
	passwd, group = read("etc/passwd"), read("etc/group")
	return passwd, group, err
}
