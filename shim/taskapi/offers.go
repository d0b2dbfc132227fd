package taskapi

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strings"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	"github.com/opencontainers/runtime-spec/specs-go/features"

	"berth/shim/ociruntime"
)

func (c *command) printVersion() error {
	ctx, cancel := context.WithTimeout(context.Background(), callTimeout)
	defer cancel()
	info, err := c.info(ctx)
	if err != nil {
		// Kata's and older shims have only -v.
		out, versionErr := exec.CommandContext(ctx, c.path, "-v").Output()
		if versionErr != nil {
			return errors.Join(err, c.failure("-v", "", versionErr))
		}
		_, err := os.Stdout.Write(out)
		return err
	}
	fmt.Println(info.GetName(), info.GetVersion().GetVersion())
	return nil
}

// features returns what the shim says of the runtime-spec's features; nil: nothing.
func (c *command) features(ctx context.Context) (*features.Features, error) {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	info, err := c.info(ctx)
	if err != nil || info.GetFeatures() == nil {
		return nil, nil // an old shim, or one that runs no runtime with the command features
	}
	var f features.Features
	if err := json.Unmarshal(info.GetFeatures().GetValue(), &f); err != nil {
		return nil, fmt.Errorf("features of the shim: %w", err)
	}
	return &f, nil
}

func (c *command) printFeatures(ctx context.Context) error {
	f, err := c.features(ctx)
	if err != nil {
		return err
	}
	if f == nil {
		f = &features.Features{}
	}
	return json.NewEncoder(os.Stdout).Encode(f)
}

// gVisorAnnotations begins the names of annotations among the features of gVisor's shim.
const gVisorAnnotations = "dev.gvisor."

// help describes the command wait, as runsc does, if the processes of containers are invisible to
// the node. A shim reports namespaces if its containers use the node's. gVisor's shim reports them
// too, but they exist only in the sandbox. gVisor's statistics of a container are its share of the
// sandbox's, so they are not offered.
func (c *command) help(ctx context.Context) error {
	f, err := c.features(ctx)
	if err != nil {
		return err
	}
	switch {
	case f != nil && isGVisor(f):
		fmt.Println("wait - included in run")
	case f != nil && f.Linux != nil && slices.Contains(f.Linux.Namespaces, string(specs.PIDNamespace)):
		return errors.New("no such command")
	default:
		fmt.Println("wait - included in run\n" + ociruntime.MeasuresHelp)
	}
	return nil
}

func isGVisor(f *features.Features) bool {
	for name := range f.Annotations {
		if strings.HasPrefix(name, gVisorAnnotations) {
			return true
		}
	}
	return false
}
