package stream

import (
	"math"
	"path"
	"slices"
	"strings"

	specs "github.com/opencontainers/runtime-spec/specs-go"

	"berth/internal/errdefs"
)

// Command is a command to execute in a container.
type Command struct {
	Args     []string
	Terminal bool
	Options  ExecOptions
}

// ExecOptions change the process of an exec. By default it has the user, directory and environment
// of the container's main process. Capabilities, seccomp and LSM labels are always the container's.
type ExecOptions struct {
	User *ExecUser `json:"user,omitempty"`
	Dir  string    `json:"dir,omitempty"` // absolute path in the container
	Env  []string  `json:"env,omitempty"` // NAME=VALUE; replaces variables of the same name
}

// ExecUser is the user of a process, by IDs in the container.
type ExecUser struct {
	UID    uint32   `json:"uid"`
	GID    uint32   `json:"gid"`
	Groups []uint32 `json:"groups,omitempty"` // additional ones
}

// Check returns InvalidArgument for options that no process can have.
func (o ExecOptions) Check() error {
	if o.User != nil {
		for _, id := range append([]uint32{o.User.UID, o.User.GID}, o.User.Groups...) {
			if id > math.MaxInt32 { // as in package oci/users
				return errdefs.InvalidArgument("user: the ID %d is too large", id)
			}
		}
	}
	if o.Dir != "" && (!path.IsAbs(o.Dir) || strings.Contains(o.Dir, "\x00")) {
		return errdefs.InvalidArgument("directory: %q is not an absolute path", o.Dir)
	}
	for _, variable := range o.Env {
		if name, _, ok := strings.Cut(variable, "="); !ok || name == "" || strings.Contains(variable, "\x00") {
			return errdefs.InvalidArgument("environment: %q is not NAME=VALUE", name)
		}
	}
	return nil
}

// apply changes a process.
func (o ExecOptions) apply(p *specs.Process) {
	if o.User != nil {
		p.User.UID, p.User.GID, p.User.AdditionalGids = o.User.UID, o.User.GID, slices.Clone(o.User.Groups)
		p.User.Username = ""
	}
	if o.Dir != "" {
		p.Cwd = o.Dir
	}
	for _, variable := range o.Env {
		name, _, _ := strings.Cut(variable, "=")
		p.Env = slices.DeleteFunc(p.Env, func(old string) bool { return strings.HasPrefix(old, name+"=") })
		p.Env = append(p.Env, variable)
	}
}
