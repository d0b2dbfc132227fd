package ociruntime

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"os"
	"os/exec"
	"slices"
	"strings"

	"github.com/opencontainers/runtime-spec/specs-go/features"
)

// Capabilities are the features of a runtime that Probe detects.
type Capabilities struct {
	Version    string `json:"version"`              // the first line of its --version
	SubCgroups bool   `json:"subCgroups,omitempty"` // exec has the option --cgroup
	Features   bool   `json:"features"`             // it has the command features; if not, the following are false
	Sandboxed  bool   `json:"sandboxed,omitempty"`  // see the package's comment
	// It is Sandboxed, and tells the usage of a container.
	Measures bool `json:"measures,omitempty"`

	RecursiveReadOnly bool `json:"recursiveReadOnly"` // the mount option rro
	UserNamespaces    bool `json:"userNamespaces"`    // user namespaces and ID-mapped mounts, which pods with one need
	CgroupNamespaces  bool `json:"cgroupNamespaces"`
}

// MeasuresHelp is what berth-task says of a shim that Measures.
const MeasuresHelp = "usage - of a container"

// Probe detects a runtime's capabilities. The error wraps fs.ErrNotExist or fs.ErrPermission if
// there is no such program.
func Probe(ctx context.Context, path string, args []string) (Capabilities, error) {
	r := &Runtime{Path: path, Args: args}
	version, err := r.output(ctx, "--version")
	if err != nil {
		return Capabilities{}, err
	}
	c := Capabilities{Version: firstLine(version)}
	// runsc documents its command wait. Others have no such command or no help.
	help, err := r.output(ctx, "help", "wait")
	c.Sandboxed = err == nil && strings.HasPrefix(string(help), "wait ")
	c.Measures = c.Sandboxed && strings.Contains(string(help), MeasuresHelp)
	help, err = r.output(ctx, "exec", "--help")
	c.SubCgroups = err == nil && strings.Contains(string(help), "--cgroup")
	document, err := r.output(ctx, "features")
	if err != nil {
		// crun before 1.8.6 and runc before 1.1 do not know the command.
		var exit *exec.ExitError
		if errors.As(err, &exit) && ctx.Err() == nil {
			return c, nil
		}
		return c, err
	}
	return c, c.parse(document)
}

// parse reads a document in the format of the runtime-spec's features.md.
func (c *Capabilities) parse(document []byte) error {
	var f features.Features
	if err := json.Unmarshal(document, &f); err != nil {
		return &Error{Command: "features", Message: "its answer is no features document: " + err.Error(), Err: err}
	}
	c.Features = true
	c.RecursiveReadOnly = slices.Contains(f.MountOptions, "rro")
	l := f.Linux
	// A sandbox has its own namespaces, so the runtime's features do not apply.
	c.CgroupNamespaces = l != nil && slices.Contains(l.Namespaces, "cgroup") && !c.Sandboxed
	if l != nil && l.MountExtensions != nil && l.MountExtensions.IDMap != nil {
		idmap := l.MountExtensions.IDMap.Enabled
		c.UserNamespaces = idmap != nil && *idmap && slices.Contains(l.Namespaces, "user") && !c.Sandboxed
	}
	return nil
}

// output runs a command that changes nothing and returns its output.
func (r *Runtime) output(ctx context.Context, args ...string) ([]byte, error) {
	var out bytes.Buffer
	cmd := r.command(ctx, "", args...)
	cmd.Stdout = &out
	err := r.call(cmd, args[0])
	return out.Bytes(), err
}

// Usage returns the usage of a container of a runtime that Measures: a cgstats.Sample in JSON.
func (r *Runtime) Usage(ctx context.Context, id string) ([]byte, error) {
	return r.output(ctx, "usage", id)
}

func firstLine(text []byte) string {
	line, _, _ := strings.Cut(string(text), "\n")
	return strings.TrimSpace(line[:min(len(line), 128)])
}

// Executable returns the identity of a program's file, which changes with the file. The error wraps
// fs.ErrNotExist, or fs.ErrPermission for a file that is no program.
func Executable(path string) (os.FileInfo, error) {
	info, err := os.Stat(path)
	if err != nil {
		return nil, err
	}
	if !info.Mode().IsRegular() || info.Mode()&0o111 == 0 {
		return nil, &os.PathError{Op: "execute", Path: path, Err: os.ErrPermission}
	}
	return info, nil
}
